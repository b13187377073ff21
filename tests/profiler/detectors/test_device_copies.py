"""Copies that cost nothing on a CPU: of what isn't the batch, or to NumPy and back, they are notes."""

from __future__ import annotations

import pytest

from hotloop.core.records.profile import Remedy
from tests.support.profiler.handmade_steps import operator, remedies, seen


def asked(*calls: tuple[str, float], shape: str = "64x10") -> list[Remedy]:
    """What is said of a line with such calls, each of a name so many times."""
    ones = [operator(name, 0.001, often, where="train.py:6", phase="python", shapes=[shape]) for name, often in calls]
    return remedies(seen(operators=ones))


def test_outputs_that_are_brought_to_the_host_and_read_as_a_whole() -> None:
    """`.cpu()` asks for a device, and so does `.numpy()` itself."""
    (note,) = asked(("to", 2), ("resolve_neg", 1))
    assert "moved back and forth" in note.cause and note.where == "train.py:6" and note.note


@pytest.mark.parametrize(("shape", "calls"), [("64x10", 1), ("1", 2)])
def test_what_is_read_where_it_is_isnt_moved(shape: str, calls: int) -> None:
    assert not [one for one in asked(("to", calls), ("resolve_neg", 1), shape=shape) if "moved" in one.cause]


@pytest.mark.parametrize(
    ("shape", "is_batch"), [("64x256", True), ("64x10", True), ("64", True), ("32x256", False), ("2048x256", False)]
)
def test_what_has_as_many_rows_belongs_to_the_batch(shape: str, is_batch: bool) -> None:
    """As targets; and losses of torch's ask for a dtype of what they are given."""
    assert ["a copy to the device" in one.cause for one in asked(("to", 1), shape=shape)] == [True] * (not is_batch)


@pytest.mark.parametrize(
    ("left", "is_batch"), [("64x10", False), ("64x5", True), ("", True)], ids=["comes back", "another", "arrives"]
)
def test_but_not_what_comes_back_from_numpy(left: str, is_batch: bool) -> None:
    given = dict(where="train.py:16", phase="python", shapes=["64x10"])
    ones = [operator("lift_fresh", 0.001, **given), operator("to", 0.001, **given)]
    ones += [operator("resolve_neg", 0.001, where="train.py:15", phase="python", shapes=[left])] if left else []
    assert [one.where for one in remedies(seen(operators=ones))] == ["train.py:16"] * (not is_batch)
