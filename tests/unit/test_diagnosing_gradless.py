"""Work in the forward and in the loss that no gradient comes back to. Records are made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hotloop.profiles import Habit, ModuleTime, OperatorTime, Remedy
from tests.unit.made_steps import operator, product, remedies, seen

MODULES = [
    ModuleTime(name=name, kind="Module", calls=1, forward_ms=1, backward_ms=1, share=0.2)
    for name in ("", "net", "teacher")
]


def trained() -> list[OperatorTime]:
    return [
        product(1.0, where="net.py:3", module="net", used=True),
        product(2.0, where="net.py:3", module="net", phase="backward"),
    ]


def aside(name: str, ms: float = 1.0, **fields: Any) -> OperatorTime:
    given = dict(where="net.py:9", function="Net.forward", module="net", bytes=1e3) | fields
    return operator(name, ms, **given)


def said(ones: list[OperatorTime], **fields: Any) -> list[Remedy]:
    phases = {"forward": 5.0, "loss": 1.5}
    found = remedies(seen(phases, operators=[*trained(), *ones], modules=MODULES, **fields))
    return [one for one in found if "no gradient comes back to" in one.cause]


NAMED: dict[str, tuple[list[OperatorTime], str]] = {
    "statistics without a graph": ([aside("mean"), aside("std")], "statistics or checks"),
    "statistics whose graph is thrown away": ([aside("mean", used=False)], "statistics or checks"),
    "a check of each layer": (
        [aside("isnan"), aside("any", dtype=""), aside("is_nonzero", dtype="")],
        "statistics or checks",
    ),
    "an error that is only told": (
        [aside("mean", module="(loss)", phase="loss", where="train.py:23", function="train")],
        "statistics or checks",
    ),
    "a mask": ([aside("ones"), aside("tril")], "masks, positions"),
    "a bank that is put together anew": (
        [aside("cat", shapes=[]), aside("detach", 0.1, bytes=0.0)],
        "what is kept is copied",
    ),
    "a head that nobody uses": ([aside("addmm", module="net.head", used=False)], "whose graph is thrown away"),
}


@pytest.mark.parametrize("case", NAMED)
def test_what_no_gradient_comes_back_to_is_named(case: str) -> None:
    ones, cause = NAMED[case]
    (found,) = said(ones)
    assert cause in found.cause and found.where == ones[0].where
    assert found.gain >= 0.1 and not found.note


NEEDED: dict[str, list[OperatorTime]] = {
    "a line that a gradient comes back to": [aside("mean"), aside("mul", used=True)],
    "a line that a backward goes through": [aside("mean"), aside("mul", phase="backward")],
    "a batch that is passed on": [aside("sub"), aside("div")],
    "a mask of targets": [aside("ne", dtype=""), aside("sum", dtype="")],
    "what is chosen": [aside("mean", used=False), aside("topk", used=False)],
    "a frozen part": [aside("mean", module="teacher.norm")],
    "a teacher that is asked": [aside("addmm", module="teacher.last"), aside("mean", module="")],
    "inputs put side by side": [aside("cat", shapes=[])],
}


@pytest.mark.parametrize("case", NEEDED)
def test_what_the_step_may_need_is_not_named(case: str) -> None:
    assert said(NEEDED[case]) == []


def test_a_network_of_which_a_habit_tells_is_not_told_of_twice() -> None:
    ones = [
        aside("addmm", module="net.0", used=False, where="train.py:9"),
        aside("mean", where="train.py:9", module=""),
    ]
    assert said(ones)
    assert said(ones, habits=[Habit(what="unused graph", where="train.py:9", per_step=1.0, ms=1.0)]) == []
