"""Ticks of logarithmic axes."""

from __future__ import annotations

import pytest

from hotloop.report.html import log_axis


@pytest.mark.parametrize(("low", "high"), [(1e-7, 10.0), (0.3, 0.9), (5.0, 5.0), (2, 700), (1e-9, 1e12), (90, 20_000)])
def test_a_log_axis_has_a_few_ticks_that_are_whole_numbers_or_powers(low: float, high: float) -> None:
    axis = log_axis([low, high, 0.0])
    inside = [tick for tick in axis["tickvals"] if low * 0.999 <= tick <= high * 1.001]
    assert len(inside) <= 12 and len(axis["tickvals"]) <= 16
    assert len(inside) >= 2 or high / low < 4
    assert len(set(axis["ticktext"])) == len(axis["tickvals"])
    assert [float(text.replace(",", "")) for text in axis["ticktext"]] == pytest.approx(axis["tickvals"], rel=1e-6)


def test_an_axis_without_positive_values_has_ticks() -> None:
    assert log_axis([])["tickvals"] and log_axis([0.0])["tickvals"]
