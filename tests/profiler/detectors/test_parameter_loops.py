"""Loops over parameters outside of the optimizer, that read or change them. Records are made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hotloop.core.records.profile import LineTime, OperatorTime, Remedy
from tests.support.profiler.handmade_steps import adam, operator, remedies, seen

SMALL = {"16x16": 10, "16": 10}
LARGE = {"1000x1000": 1, "1000": 1}


def numbers(shapes: dict[str, int]) -> int:
    sizes = [(shape.split("x"), calls) for shape, calls in shapes.items()]
    return sum(calls * int(size[0]) * int(size[-1] if len(size) > 1 else 1) for size, calls in sizes)


def read(shapes: dict[str, int], phase: str = "loss", ms: float = 1.0, **fields: Any) -> list[OperatorTime]:
    given = dict(where="train.py:22", phase=phase, bytes=1e3, flops=1e3) | fields
    return [
        operator(name, ms / 4, calls, shapes=[shape], **given)
        for name in ("pow", "sum")
        for shape, calls in shapes.items()
    ]


def found(ones: list[OperatorTime], shapes: dict[str, int], phase: str = "loss") -> list[Remedy]:
    optimizer = adam(0.1, "fused", tensors=sum(shapes.values()), numbers=numbers(shapes))
    return remedies(seen({phase: 2.0}, operators=ones, optimizers=[optimizer]))


@pytest.mark.parametrize("phase", ["loss", "python"])
@pytest.mark.parametrize("shapes", [SMALL, LARGE], ids=["many", "few and large"])
def test_tensors_of_all_shapes_that_are_read_one_by_one_are_parameters(shapes: dict[str, int], phase: str) -> None:
    runs = float(sum(shapes.values()))
    one = found(read(shapes, phase, line_runs=runs), shapes, phase)[0]
    assert (one.where, one.gain >= 0.1) == ("train.py:22", True)
    assert f"over parameters, outside of the optimizer: {runs:.0f} tensors are read" in one.cause
    assert "weight_decay=" in one.remedy and "time steps" not in one.remedy


def test_what_operators_and_looks_both_show_is_told_once_with_what_wins_more() -> None:
    """Operators win what lies between them, the line all that it takes."""
    given = dict(where="train.py:22", phase="python", bytes=1e3, flops=1e3, line_runs=20.0)
    ones = [
        operator(name, 0.8, calls, shapes=[one], **given) for name in ("mul", "sub") for one, calls in SMALL.items()
    ]
    lines = [LineTime(where="train.py:22", function="train", phase="python", ms=4.0, own_ms=4.0)]
    optimizer = adam(0.1, "fused", tensors=20, numbers=numbers(SMALL))
    (one,) = remedies(seen({"python": 4.0}, operators=ones, optimizers=[optimizer], lines=lines))
    assert "over parameters, outside of the optimizer" in one.cause and one.gain == pytest.approx(0.4)


@pytest.mark.parametrize(("shapes", "named"), [(["400x128", "128", "128x3", "3"], True), (["16x3", "16"], False)])
def test_what_changes_as_many_tensors_as_there_are_parameters_changes_their_numbers_too(
    shapes: list[str], named: bool
) -> None:
    """A rollout of as many steps may draw an action in each, in place."""
    calls = 8 / len(shapes)
    given = dict(where="train.py:22", phase="python", bytes=1e3, flops=1e3, line_runs=8.0)
    ones = [operator(name, 0.2, calls, shapes=[one], **given) for name in ("mul_", "add_") for one in shapes]
    optimizer = adam(0.1, "fused", tensors=8, numbers=2 * (400 * 128 + 128 + 128 * 3 + 3))
    lines = [LineTime(where="train.py:22", function="train", phase="python", ms=4.0, own_ms=4.0)]
    causes = [one.cause for one in remedies(seen({"python": 4.0}, operators=ones, optimizers=[optimizer], lines=lines))]
    assert any("8 tensors are changed one by one" in cause for cause in causes) is named


def test_what_is_done_with_each_of_their_numbers_belongs_to_it() -> None:
    ones = [
        *read(SMALL, "python", line_runs=20.0),
        operator("add", 1.0, 20, where="train.py:23", phase="python", shapes=[], bytes=8.0, flops=1.0, line_runs=20.0),
    ]
    (one,) = found(ones, SMALL, "python")
    assert one.gain == pytest.approx(0.2)


NOT_READ: dict[str, list[OperatorTime]] = {
    "a library's own loop": read(SMALL, "python", line_runs=1.0),
    "time steps, which are all alike": read({"16x16": 20}, line_runs=20.0),
    "other tensors": read({"160x16": 10, "16": 10}, line_runs=20.0),
    "ten times as many numbers, in other tensors": read({"169x16": 10, "16": 10}, line_runs=20.0),
}


@pytest.mark.parametrize(("name", "is_named"), [("pow", True), ("index", False)])
def test_rows_that_are_chosen_from_as_many_numbers_are_no_parameters(name: str, is_named: bool) -> None:
    """As those of a network's outputs that a mask chooses, in an evaluation."""
    given = dict(where="train.py:22", phase="python", bytes=1e3, line_runs=2.0)
    ones = [operator(name, 0.8, 1, shapes=[one], **given) for one in LARGE]
    lines = [LineTime(where="train.py:22", function="test", phase="python", ms=4.0, own_ms=4.0)]
    optimizer = adam(0.1, "fused", tensors=2, numbers=numbers(LARGE))
    told = remedies(seen({"python": 4.0}, operators=ones, optimizers=[optimizer], lines=lines))
    assert any("over parameters" in one.cause for one in told) is is_named


@pytest.mark.parametrize("case", NOT_READ)
def test_what_is_no_loop_over_parameters(case: str) -> None:
    ones = NOT_READ[case]
    assert not [one for one in found(ones, SMALL, ones[0].phase) if "over parameters" in one.cause]


def worked(name: str, *shapes: str, device: str = "cpu") -> Remedy | None:
    """What is said of a loop whose operators take most of its time, one of them so called, on tensors of these shapes."""
    given = dict(where="train.py:22", phase="loss", bytes=1e3, flops=1e3, line_runs=2.0)
    ones = [operator(name, 0.9, 1, shapes=[shape, *(other or shape for other in shapes)], **given) for shape in LARGE]
    optimizer = adam(0.1, "fused", tensors=2, numbers=numbers(LARGE))
    told = remedies(seen({"loss": 2.0}, operators=ones, optimizers=[optimizer], device=device))
    return next((one for one in told if "over parameters" in one.cause), None)


@pytest.mark.parametrize(("name", "shapes"), [("pow", ()), ("mul", ("",)), ("linalg_vector_norm", ())])
def test_what_weight_decay_or_clipping_gives_is_won_as_a_whole(name: str, shapes: tuple[str, ...]) -> None:
    one = worked(name, *shapes)
    assert one is not None and one.gain == pytest.approx(0.2) and "weight_decay=" in one.remedy


@pytest.mark.parametrize(("name", "shapes"), [("abs", ()), ("sub", ("",)), ("mul", ("1000",))])
def test_of_other_penalties_a_cpu_wins_the_python_alone(name: str, shapes: tuple[str, ...]) -> None:
    """Such as an absolute value, or how far weights are from earlier ones."""
    assert worked(name, *shapes) is None
    many = read(SMALL, line_runs=20.0, ms=0.4)
    others = [one.model_copy(update={"name": f"aten::{name}"}) for one in many if one.name == "aten::pow"]
    (found_,) = (one for one in found([*many, *others], SMALL) if "over parameters" in one.cause)
    assert 0.05 < found_.gain < 0.16 and "weight_decay=" not in found_.remedy


def hooked(shapes: dict[str, int], *, hooked: bool = True, sampled: bool = True) -> list[Remedy]:
    optimizer = adam(0.1, "fused", tensors=20, numbers=numbers(SMALL))
    given = dict(where="net.py:4", function="Net.<lambda>", phase="backward")
    ones = read(shapes, **given, line_runs=20.0, hooked=hooked)
    line = LineTime(**given, ms=3.0, own_ms=3.0, within="train.py:28")  # type: ignore[arg-type]
    beside = LineTime(where="train.py:28", function="main", library="torch", phase="backward", ms=6.0, own_ms=3.0)
    lines = [line, beside] if sampled else [beside]
    profile = seen({"backward": 6.0}, operators=ones, lines=lines, optimizers=[optimizer])
    return [one for one in remedies(profile) if one.where == "net.py:4"]


def test_hooks_of_all_gradients_are_named_with_what_they_take() -> None:
    (one,) = hooked(SMALL)
    assert "a hook on each parameter's gradient: 20 tensors" in one.cause
    assert 0.2 < one.gain <= 0.3


def test_hooks_that_no_sample_met_are_named_with_what_their_operators_take() -> None:
    (one,) = hooked(SMALL, sampled=False)
    assert "a hook on each parameter's gradient: 20 tensors" in one.cause and "Net.<lambda>" in one.evidence
    assert 0.05 < one.gain <= 0.1


@pytest.mark.parametrize("shapes", [{"16x16": 20}, {"64x16": 10, "16": 10}, {"16x16": 2, "16": 2}])
def test_a_backward_of_ones_own_is_no_hook(shapes: dict[str, int]) -> None:
    assert not any("hook" in one.cause for one in hooked(shapes))


def test_what_autograd_does_by_itself_is_no_hook() -> None:
    assert not any("hook" in one.cause for one in hooked(SMALL, hooked=False))


TWICE = {shape: 2 * calls for shape, calls in SMALL.items()}
"""As where gradients and weights are read, or for each of two backwards."""


@pytest.mark.parametrize("runs", [20.0, 40.0])
def test_parameters_may_be_read_several_times_in_a_step(runs: float) -> None:
    one = found(read(TWICE, line_runs=runs), SMALL)[0]
    assert "20 tensors are read" in one.cause


def statistics(where: str, *names: str, back: bool = False) -> list[OperatorTime]:
    """Of each gradient, read on the host."""
    given = dict(where=where, phase="python", line_runs=20.0, function="Monitor.record")
    reads = [operator("item", 0.0, 20 * len(names), shapes=[], bytes=0.0, flops=0.0, **given)]
    backward = [operator("mul", 0.1, 20, **(given | dict(phase="backward")))] if back else []
    ones = [
        one.model_copy(update={"name": f"aten::{name}"}) for name in names for one in read(SMALL, ms=0.8, **given)[:2]
    ]
    return [*ones, *reads, *backward]


def test_what_only_measures_is_won_as_a_whole_over_all_lines_of_a_statement() -> None:
    ones = [*statistics("train.py:33", "abs", "std"), *statistics("train.py:34", "mean")]
    (one,) = (one for one in found(ones, SMALL, "python") if "over parameters" in one.cause)
    assert one.gain == pytest.approx(3 * 0.4 / 10) and one.where == "train.py:33"
    assert "every hundred steps" in one.remedy


def test_lines_of_another_function_or_far_away_are_another_loop() -> None:
    far = [*statistics("train.py:33", "abs", "std"), *statistics("train.py:44", "mean", "abs")]
    assert len([one for one in found(far, SMALL, "python") if "over parameters" in one.cause]) == 2


def test_what_a_backward_comes_back_to_doesnt_only_measure() -> None:
    ones = statistics("train.py:33", "abs", "std", back=True)
    assert not [one for one in found(ones, SMALL, "python") if "over parameters" in one.cause and one.gain > 0.05]


@pytest.mark.parametrize(("outer", "named"), [("aten::to", True), ("", False)])
def test_a_cast_changes_no_parameter_in_place(outer: str, named: bool) -> None:
    """As the one of `(gradient == 0).float()`; `kept.copy_(weight)` changes what it is called on."""
    given = dict(where="train.py:22", phase="python", line_runs=20.0, bytes=1e3, outer=outer, function="Monitor.record")
    copies = [operator("copy_", 0.0, calls, shapes=[shape, shape], **given) for shape, calls in SMALL.items()]
    ones = [*statistics("train.py:22", "abs", "std"), *copies]
    assert any("are read one by one" in one.cause for one in found(ones, SMALL, "python")) is named
