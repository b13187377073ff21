"""Figures as text: small ones keep their digits."""

from __future__ import annotations

import pytest

from hotloop.core.format import format_figure

FIGURES = {
    0.0832: "0.0832",
    1.0: "1.0000",
    0.0: "0.0000",
    1.234e-6: "1.234e-06",
    0.00123456: "0.001235",
    1234.5: "1234",
}


@pytest.mark.parametrize("value", FIGURES)
def test_a_figure_has_four_digits_or_more(value: float) -> None:
    assert format_figure(value) == FIGURES[value]
