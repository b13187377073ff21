"""Causes that were named wrongly: forwards called directly, policies, buffers, numbers read one by one, modules of libraries."""

from __future__ import annotations

from typing import Any

import pytest

from hotloop.core.records.profile import LineTime, ModuleTime, OperatorTime
from hotloop.core.records.profile_terms import SlowPattern
from tests.support.profiler.handmade_steps import line, operator, remedies, seen


def causes(**fields: Any) -> list[str]:
    return [one.cause for one in remedies(seen(**fields)) if not one.note]


def computed(used: bool | None, where: str = "net.py:9", **fields: Any) -> OperatorTime:
    return operator("mul", 3.0, phase="batch", where=where, used=used, **({"function": "Net.forward"} | fields))


def spent(own_ms: float, where: str = "net.py:9", function: str = "Net.forward") -> LineTime:
    return line("batch", own_ms, where, function=function)


@pytest.mark.parametrize("where", ["net.py:9", "net.py:8"])
def test_a_forward_that_is_called_directly_is_the_trainings(where: str) -> None:
    """At another line it may prepare what the network is given."""
    ones = [computed(True), *([computed(None, where)] if where != "net.py:9" else [])]
    assert causes(phases={"batch": 4.0}, operators=ones, lines=[spent(4.0, where)]) == []


@pytest.mark.parametrize("function", ["Net.forward", "<module>"])
def test_python_in_such_a_forward_is_named_as_that(function: str) -> None:
    ones, lines = [computed(True, function=function)], [spent(4.0, function=function)]
    (found,) = causes(phases={"batch": 8.0}, operators=ones, lines=lines)
    assert found == "Python code within the forward"


def test_work_that_no_backward_goes_through_is_still_named() -> None:
    assert causes(phases={"batch": 4.0}, operators=[computed(None)], lines=[spent(4.0)])


ACTING = [
    operator(name, 0.5, 1, phase="python", where="train.py:20", dtype="", function="act") for name in ("eq", "sum")
]


@pytest.mark.parametrize(
    ("beside", "named"),
    [
        ([], True),
        ([operator("multinomial", 0.1, phase="python", where="train.py:21", function="act")], False),
        ([operator("addmm", 0.1, phase="python", where="train.py:19", function="act", module="net.a")], False),
    ],
)
def test_a_function_that_draws_or_asks_a_network_measures_nothing(beside: list[OperatorTime], named: bool) -> None:
    lines = [line("python", 2.0, "train.py:20", function="act"), line("update", 0.1, "train.py:30", library="torch")]
    found = causes(phases={"python": 2.0}, operators=[*ACTING, *beside], lines=lines)
    assert any(cause.startswith("metrics at each step") for cause in found) is named


def rounds(*names: str, **fields: Any) -> list[OperatorTime]:
    given = dict(where="train.py:15", function="act", flops=10.0, bytes=100.0, line_runs=30.0) | fields
    return [operator(name, 0.6, 30, **given) for name in names]


@pytest.mark.parametrize(("chosen", "named"), [([], True), (["multinomial"], False), (["argmax"], False)])
def test_rounds_that_each_act_on_what_was_read_are_no_loop_to_join(chosen: list[str], named: bool) -> None:
    asked = rounds("addmm", "relu", where="net.py:7", function="forward", module="net.a")
    ones = [*asked, *rounds("tanh", "mul"), *rounds("item", *chosen, phase="python")]
    found = causes(phases={"forward": 4.0, "python": 3.0}, operators=ones)
    assert any("many tiny kernels" in cause for cause in found) is named


def test_validation_of_arguments_is_first() -> None:
    habit = SlowPattern(what="argument validation", where="train.py:15", per_step=60, ms=2.0)
    (found, *_) = remedies(seen({"python": 3.0}, habits=[habit]))
    assert found.gain == pytest.approx(0.2) and "set_default_validate_args(False)" in found.remedy


@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.parametrize("name", ["cat", "stack"])
def test_a_buffer_that_is_put_together_anew_is_named_with_its_line(name: str, grows: bool) -> None:
    shapes = (["2 of 900x64"], ["2 of 932x64"]) if grows else (["2 of 900x64"],)
    ones = [
        operator(name, 2.0 / len(shapes), 1 / len(shapes), phase="batch", where="train.py:12", shapes=one)
        for one in shapes
    ]
    (found, *_) = remedies(seen({"batch": 2.5}, operators=ones, lines=[line("batch", 2.5, "train.py:12")]))
    assert (found.where, "grows" in found.cause) == ("train.py:12", grows) and 0.2 <= found.gain <= 0.25


@pytest.mark.parametrize("fields", [{"used": True}, {"phase": "data"}, {"ms": 0.1}], ids=str)
def test_what_is_put_together_for_the_network_or_next_to_nothing_is_not(fields: dict[str, Any]) -> None:
    given = dict(name="cat", ms=2.0, phase="batch", where="train.py:12") | fields
    ones = [operator(**given)]
    assert not any("torch.cat" in cause for cause in causes(phases={"batch": 2.0}, operators=ones))


@pytest.mark.parametrize(("calls", "named"), [(1280, True), (1, False)])
def test_numbers_that_are_read_one_by_one_are_their_lines_whole_cost(calls: int, named: bool) -> None:
    ones = [operator("item", 1.0, calls, phase="python", where="train.py:12", dtype="", shapes=[])]
    lines = [line("python", 4.0, "train.py:12"), line("synchronisation", 1.0, "train.py:12")]
    (found, *_) = remedies(seen({"python": 4.0, "synchronisation": 1.0}, operators=ones, lines=lines))
    assert ("number by number" in found.cause) is named
    if named:
        assert found.where == "train.py:12" and found.gain == pytest.approx(0.5, rel=0.05) and "one_hot" in found.remedy


MODULES = [
    ModuleTime(name=name, kind=kind, calls=1, forward_ms=1, backward_ms=1, share=0.1)
    for name, kind in (("h.0.act", "NewGELU"), ("h.1.act", "NewGELU"), ("h.0.norm", "RMSNorm"))
]


def passes(module: str, where: str) -> list[OperatorTime]:
    names = ("mul", "pow", "tanh", "add")
    return [operator(name, 0.4, where=where, module=module, bytes=4e6, flops=5e5, shapes=["64x4096"]) for name in names]


@pytest.mark.parametrize("library", [True, False])
def test_behind_a_line_that_calls_a_library_modules_are_named(library: bool) -> None:
    ones = [one for m in MODULES for one in passes(m.name, "train.py:5" if library else f"{m.kind}.py:5")]
    found = [cause for cause in causes(phases={"forward": 6.0}, operators=ones, modules=MODULES) if "follow" in cause]
    assert any("in h.0.act (NewGELU) and 1 more" in cause for cause in found) is library
    assert len(found) == 2, "one of each class"


def test_an_operator_of_a_library_is_named_with_its_module() -> None:
    beside = [operator("addmm", 0.1, where="train.py:5", module="h.0.norm", flops=1e3, bytes=1e3)]
    ones = [operator("cumsum", 5.0, where="train.py:5", module="h.1.act", bytes=1e5, flops=1e3), *beside]
    (found, *_) = causes(phases={"forward": 6.0}, operators=ones, modules=MODULES)
    assert "takes much of the forward in h.1.act (NewGELU)" in found
