"""What a habit is said to cost, and where."""

from __future__ import annotations

import pytest

from hotloop.core.records.profile_terms import SlowPattern
from tests.support.profiler.handmade_steps import operator, remedies, seen


def test_what_is_computed_again_is_told_at_the_line_of_the_forward() -> None:
    """The backward asks for it, and does at that line what a forward does."""
    forward = [operator("gelu", 1.0, module="body.0", where="net.py:7", shapes=["64x256"])]
    backward = [
        operator("gelu", 1.0, module="body.0", where="net.py:7", shapes=["64x256"], phase="backward"),
        operator("mm", 2.0, module="head", where="net.py:9", phase="backward"),
    ]
    habit = SlowPattern(what="recomputed forward", where="train.py:20", per_step=6.0, ms=1.5)
    (found,) = [
        one
        for one in remedies(seen({"forward": 1.0, "backward": 3.0}, operators=[*forward, *backward], habits=[habit]))
        if "again" in one.cause
    ]
    assert (found.where, found.gain, found.note) == ("net.py:7", pytest.approx(0.15), False)
    unknown = seen(habits=[habit]).model_copy(update={"operators": []})
    assert [one.where for one in remedies(unknown) if "again" in one.cause] == ["train.py:20"]
