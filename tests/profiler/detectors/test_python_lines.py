"""What is said of lines of the loop and of its helpers: what they do, and which of them are one part. Records are made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hotloop.core.records.profile import LineTime, OperatorTime, Profile, Remedy, ThreadUse
from hotloop.core.records.profile_terms import Phase, SlowPattern
from hotloop.profiler.detectors.step import ProfiledStep
from tests.support.profiler.handmade_steps import STEP_MS, adam, first, line, loop, operator, remedies, seen


def trained() -> list[LineTime]:
    places = (("forward", 21), ("backward", 25), ("update", 30))
    return [line(phase, 1.0, f"train.py:{number}", library="torch") for phase, number in places]


def aside(numbers: tuple[int, ...], phase: str = "python", each: float = 0.2, **fields: Any) -> list[LineTime]:
    return [line(phase, each + 0.01 * (n == numbers[-1]), f"train.py:{n}", **fields) for n in numbers]


def test_small_lines_of_the_loop_between_two_that_train_are_one_part() -> None:
    lines = [*trained(), *aside((31, 33, 34, 36))]
    (found,) = remedies(seen({"python": 0.8}, lines=lines))
    assert (found.where, found.gain) == ("train.py:36", pytest.approx(0.08))


@pytest.mark.parametrize(
    "lines",
    [
        [*aside((19, 20)), *aside((31, 32))],
        [*aside((31, 32)), *aside((33, 34), "batch")],
        [*aside((31, 32)), *aside((33, 34), function="train.<locals>.helper")],
    ],
    ids=["around a line that trains", "in two phases", "in another function"],
)
def test_small_lines_that_are_no_one_part_are_not_added_up(lines: list[LineTime]) -> None:
    phases = {phase: sum(one.own_ms for one in lines if one.phase == phase) for phase in ("python", "batch")}
    assert remedies(seen({name: ms for name, ms in phases.items() if ms}, lines=[*trained(), *lines])) == []


def test_a_line_that_is_named_stands_by_itself() -> None:
    """And hides none of the other lines around it."""
    reading = operator("item", 1.0, where="train.py:33", phase="python", dtype="")
    lines = [*trained(), line("python", 1.0, "train.py:33"), *aside((31, 34, 36))]
    found = remedies(seen({"python": 1.6}, lines=lines, operators=[reading]))
    assert sorted(one.where for one in found) == ["train.py:33", "train.py:36"]


def encoded(each_ms: float) -> list[Remedy]:
    """Of samples that are encoded one by one, each with three small operations."""
    ones = loop(64, each_ms, "text.py:5", phase="batch", line_runs=64.0)
    return remedies(seen({"batch": 5.0}, operators=ones, lines=[line("batch", 5.0, "text.py:5", function="encode")]))


def test_a_loop_that_is_plain_python_first_of_all_is_named_as_that() -> None:
    found = encoded(0.005)
    assert found[0].cause.startswith("plain Python in the loop") and found[0].gain == pytest.approx(0.5)


def test_a_loop_between_the_parts_of_training_wins_all_that_its_lines_take() -> None:
    (found,) = encoded(0.015)
    assert found.cause.startswith("many tiny kernels") and found.gain == pytest.approx(0.5 * 63 / 64, rel=0.01)


ARRAYS: dict[str, tuple[list[OperatorTime], str]] = {
    "a history that is saved": ([], "numpy is called at each step"),
    "a number that is read": (
        [operator("resolve_neg", 0.01, phase="python", where="log.py:4", shapes=["1"])],
        "numpy is called at each step",
    ),
    "a tensor": (
        [operator("resolve_neg", 0.01, phase="python", where="log.py:4")],
        "a tensor moved back and forth: numpy",
    ),
    "a tensor that is handed over": (
        [operator("resolve_neg", 0.01, phase="python", where="train.py:33")],
        "a tensor moved back and forth: numpy",
    ),
}


@pytest.mark.parametrize("case", ARRAYS)
def test_tensors_are_moved_where_operators_show_it(case: str) -> None:
    operators, cause = ARRAYS[case]
    line_of_numpy = line("python", 3.0, "log.py:5", library="numpy", function="keep", within="train.py:33")
    lines = [line_of_numpy, line("python", 0.1, "log.py:4", function="keep", within="train.py:33")]
    assert cause in first(seen({"python": 3.1}, lines=lines, operators=operators)).cause


@pytest.mark.parametrize(
    ("worked", "cause"), [(0.5, "torch's own Python is called"), (2.0, "tensors made or converted")]
)
def test_torch_may_be_called_without_making_a_tensor(worked: float, cause: str) -> None:
    """As for an optimizer that is made anew in each step."""
    ones = [operator("zeros", worked, phase="python", where="train.py:35", bytes=1e6)]
    lines = [line("python", 3.0, "train.py:35", library="torch")]
    assert first(seen({"python": 3.0}, lines=lines, operators=ones)).cause.startswith(cause)


BETWEEN: dict[str, tuple[dict[str, float], str, str]] = {
    "a sleep": ({"unattributed": 2.0}, "", "waiting in the loop"),
    "a library": ({"loss": 2.0}, "sklearn", "sklearn is called at each step"),
    "plain Python": ({"loss": 2.0}, "", "Python code between forward and backward"),
}


@pytest.mark.parametrize("case", BETWEEN)
def test_between_forward_and_backward_the_loop_does_what_it_likes(case: str) -> None:
    phases, library, cause = BETWEEN[case]
    profile: Profile = seen(phases, lines=[*trained(), line("loss", 2.0, "train.py:23", library=library)])
    found = first(profile)
    assert found.cause.startswith(cause) and found.where == "train.py:23"


def test_a_line_of_the_loop_that_counts_by_itself_stands_alone() -> None:
    """As a schedule's step beside a progress bar; what is left beside them is one part."""
    counting = [line("python", 0.6, "train.py:32"), line("python", 0.8, "train.py:35", library="tqdm")]
    found = remedies(seen({"python": 2.2}, lines=[*trained(), *counting, *aside((31, 33, 34, 36))]))
    assert {one.where: round(one.gain, 2) for one in found} == {
        "train.py:32": 0.06,
        "train.py:35": 0.08,
        "train.py:36": 0.08,
    }
    assert [one.where for one in found if "tqdm" in one.cause] == ["train.py:35"]


def test_a_tensor_leaves_at_a_line_that_takes_too_little_to_be_seen() -> None:
    leaving = operator("resolve_neg", 0.001, phase="python", where="log.py:4", function="keep")
    hot = line("python", 3.0, "log.py:5", library="numpy", function="keep", within="train.py:33")
    assert "moved back and forth" in first(seen({"python": 3.0}, lines=[hot], operators=[leaving])).cause
    elsewhere = leaving.model_copy(update={"function": "other", "where": "log.py:9"})
    assert "numpy is called" in first(seen({"python": 3.0}, lines=[hot], operators=[elsewhere])).cause


def within(found: list[Remedy]) -> list[Remedy]:
    return [one for one in found if one.cause.startswith("Python code within the forward")]


def test_lines_that_their_operators_explain_are_no_plain_python() -> None:
    """Samples put some of a long forward's lines higher than their operators, and others lower."""
    numbers = range(10, 50)
    ones = [operator("tanh", 0.1, where=f"net.py:{n}") for n in numbers]
    lines = [line("forward", 0.15 if n % 2 else 0.05, f"net.py:{n}", function="forward") for n in numbers]
    profile = seen({"forward": 4.0, "backward": 6.0}, lines=lines, operators=ones)
    assert within(remedies(profile)) == []


def test_a_function_that_is_called_in_two_phases_counts_in_both() -> None:
    lines = [line(phase, ms, "net.py:9", function="scaled") for phase, ms in (("forward", 0.8), ("loss", 0.1))]
    (found,) = within(remedies(seen({"forward": 0.8, "loss": 0.1}, lines=lines)))
    assert found.gain == pytest.approx(0.09)


def test_of_short_lines_operators_tell_more_than_samples() -> None:
    """Samples put nearly all of the batch into one of two lines; operators say that the other one takes as long."""
    lines = [line("batch", 9.0, "train.py:21"), line("batch", 1.0, "train.py:22")]
    work = [operator("index", 1.4, phase="batch", where=one.where) for one in lines]
    profile = seen({"batch": 3.0}, operators=work, lines=lines)
    own_ms = [one.own_ms for one in ProfiledStep(profile, STEP_MS).lines("batch")]
    assert own_ms == [pytest.approx(1.6), pytest.approx(1.4)]


def test_a_copy_of_all_that_was_and_draws_are_told_from_other_tensors_that_are_made() -> None:
    def cause(name: str) -> str:
        work = [operator(name, 2.0, phase="python", where="train.py:21", shapes=[])]
        return first(seen({"python": 3.0}, operators=work, lines=[line("python", 3.0, "train.py:21")])).cause

    assert "concatenated" in cause("cat") and "concatenated" not in cause("repeat")
    assert "random numbers are drawn" in cause("normal_") and "made or converted" in cause("repeat")


@pytest.mark.parametrize("comprehension", ["<dictcomp>", "train.<locals>.<listcomp>"])
def test_a_comprehension_is_one_part_with_its_line(comprehension: str) -> None:
    """Up to Python 3.11 it is a function of its own."""
    function = "<module>" if comprehension.startswith("<") else "train"
    own = dict(where="train.py:33", function=function)
    lines = [*trained(), line("python", 0.6, **own), line("python", 0.7, **own | {"function": comprehension})]
    stepped = line("update", 1.0, "train.py:30", library="torch", function=function)
    (found,) = remedies(seen({"python": 1.3}, lines=[*lines, stepped]))
    assert found.gain == pytest.approx(0.13) and comprehension not in found.evidence


def test_a_line_that_reads_all_parameters_is_about_them() -> None:
    shapes = [f"{10 * n}x10" for n in range(1, 21)]
    work = [operator("mul", 0.1, phase="python", where="train.py:21", shapes=[one]) for one in shapes]
    use = adam(0.1, "fused", tensors=20, numbers=sum(100 * n for n in range(1, 21)))
    found = remedies(
        seen({"python": 6.0}, operators=work, lines=[line("python", 6.0, "train.py:21")], optimizers=[use])
    )
    there = [one.cause for one in found if one.where == "train.py:21"]
    assert there and all("over parameters" in cause for cause in there)


@pytest.mark.parametrize(
    ("names", "fields", "named"),
    [
        (("randint", "index"), {}, False),
        (("index_select",), {}, False),
        (("index",), {"calls": 64}, True),
        (("index",), {"line_runs": 64.0}, True),
        (("index", "normal_"), {}, True),
        (("index",), {"phase": "python"}, True),
        ((), {}, True),
    ],
)
def test_a_batch_that_one_index_cuts_out_is_not_to_be_made_faster(
    names: tuple[str, ...], fields: dict[str, Any], named: bool
) -> None:
    given = dict(phase="batch", where="train.py:20", dtype="") | fields
    ones = [operator(name, 0.2, bytes=100.0, **given) for name in names]
    assert bool(remedies(seen({"batch": 1.0}, operators=ones, lines=[line("batch", 1.0)]))) is named


@pytest.mark.parametrize(("where", "named"), [("train.py:36", True), ("train.py:99", False)])
def test_what_saves_at_each_step_is_a_checkpoint_and_all_of_its_function_goes_with_it(where: str, named: bool) -> None:
    lines = [
        line("logging", 1.5, "train.py:36", function="save", library="torch"),
        line("python", 2.0, "train.py:37", function="save"),
    ]
    habits = [SlowPattern(what="checkpoint", where=where, per_step=1.0, ms=1.5)]
    one = remedies(seen({"logging": 1.5, "python": 2.0}, lines=lines, habits=habits))[0]
    assert (one.where, one.gain) == ("train.py:37", pytest.approx(0.35))
    assert one.cause.startswith("a checkpoint is written at each step") is named


@pytest.mark.parametrize(("where", "told"), [("train.py:3", "train.py:3"), ("", "train.py:12")])
def test_too_many_threads_are_told_where_they_are_asked_for(where: str, told: str) -> None:
    threads = ThreadUse(torch=48, cores=2, busy=1.9, others=0.0, slower=4.0, where=where)
    found = remedies(seen({"forward": 8.0}, threads=threads).model_copy(update={"step_where": "train.py:12"}))
    assert [one.where for one in found if "too many threads" in one.cause] == [told]


@pytest.mark.parametrize("module", ["q_network.0", ""], ids=["network", "none"])
def test_a_line_that_calls_a_network_is_no_plain_python(module: str) -> None:
    """As one that chooses an action: what it runs stands in the forward, which it calls."""
    inside = operator("addmm", 0.1, where="net.py:46", phase="python", module=module, flops=1e3, bytes=1e3)
    called = line("python", 0.01, "net.py:46", function="Net.forward", within="train.py:33")
    lines = [*trained(), line("python", 2.0, "train.py:33"), called]
    found = remedies(seen({"python": 2.0}, lines=lines, operators=[inside]))
    assert any("plain Python" in one.cause for one in found) is not bool(module)


@pytest.mark.parametrize(
    ("library", "draw", "is_named"), [("torch", True, False), ("", True, True), ("torch", False, True)]
)
def test_what_torch_does_to_choose_an_action_is_no_cause(library: str, draw: bool, is_named: bool) -> None:
    """Plain Python of such a function is, and so is torch's work in a function that only asks a network."""
    given = dict(function="select_action")
    operators = [operator("addmm", 0.1, where="net.py:46", phase="python", module="policy.0", flops=1e3, bytes=1e3)]
    operators += [operator("multinomial", 0.1, where="act.py:58", phase="python", **given)] if draw else []
    called = line("python", 0.01, "net.py:46", function="Policy.forward", within="act.py:56")
    asks = line("python", 0.01, "act.py:56", **given)
    lines = [*trained(), asks, called, line("python", 2.0, "act.py:57", library=library, **given)]
    found = remedies(seen({"python": 2.0}, lines=lines, operators=operators))
    assert any(one.where == "act.py:57" for one in found) is is_named


def told(looks: int | None, ms: float = 0.6, phase: Phase = "python") -> list[Remedy]:
    function = "net.py:9" if phase == "forward" else "train.py:33"
    return remedies(seen({phase: ms}, lines=[line(phase, ms, function, looks=looks)]))


@pytest.mark.parametrize("phase", ["python", "forward"])
@pytest.mark.parametrize(("looks", "named"), [(1, False), (2, False), (3, True), (None, True)])
def test_a_line_that_one_or_two_looks_found_may_be_chance(phase: Phase, looks: int | None, named: bool) -> None:
    """In a short step all of a phase is given to the one line that was seen in it."""
    assert [one.gain for one in told(looks, phase=phase)] == [pytest.approx(0.06)] * named


@pytest.mark.parametrize("phase", ["python", "forward"])
def test_so_much_of_the_step_is_no_chance(phase: Phase) -> None:
    assert [one.gain for one in told(1, 2.5, phase)] == [pytest.approx(0.25)]


def test_what_operators_take_is_measured_without_looks() -> None:
    ones = [operator("cos", 0.7, phase="python", where="train.py:33")]
    (found,) = remedies(seen({"python": 1.0}, lines=[line("python", 1.0, "train.py:33", looks=1)], operators=ones))
    assert found.gain == pytest.approx(0.07) and found.evidence.count("0.70 ms") == 1


def test_what_is_told_by_operators_alone_is_told_of_them() -> None:
    """Of the 1.5 ms that a single look gave to the line, 0.6 are known to be an operator's."""
    ones = [operator("cos", 0.6, phase="python", where="train.py:33")]
    (found,) = remedies(seen({"python": 1.5}, lines=[line("python", 1.5, "train.py:33", looks=1)], operators=ones))
    assert found.cause.startswith("tensors made or converted") and found.gain == pytest.approx(0.06)


def test_lines_whose_operators_count_by_themselves_stand_alone_however_few_looks_found_them() -> None:
    ones = [operator("cat", 0.8, phase="python", where="train.py:33")]
    ones += [operator("cos", 0.7, phase="python", where="train.py:34")]
    trains = [line("update", 1.0, "train.py:30", library="torch")]
    lines = [line("python", one.ms, one.where, looks=2) for one in ones]
    found = remedies(seen({"python": 1.5}, lines=[*trains, *lines], operators=ones))
    assert {one.where: one.gain for one in found} == {
        "train.py:33": pytest.approx(0.08),
        "train.py:34": pytest.approx(0.07),
    }


@pytest.mark.parametrize("phase", ["python", "forward"])
@pytest.mark.parametrize(("looks", "named"), [(1, False), (2, True)])
def test_chance_is_not_several_small_things_either(phase: Phase, looks: int, named: bool) -> None:
    """A helper and the line that calls it were seen once each."""
    inner = line(phase, 0.6, "log.py:5", function="note", within="log.py:9", looks=looks)
    outer = line(phase, 0.02, "log.py:9", function="report", looks=1)
    assert bool(remedies(seen({phase: 0.62}, lines=[inner, outer]))) is named


def test_lines_that_few_looks_found_are_one_part_with_those_around_them() -> None:
    lines = [line("python", 0.6, f"train.py:{n}", looks=1) for n in (33, 34, 35)]
    (found,) = remedies(seen({"python": 1.8}, lines=lines))
    assert found.gain == pytest.approx(0.18)


def helpers(each: float, within: str, phase: str = "python", many: int = 4) -> list[LineTime]:
    """A function of several lines, each of which calls another function that takes a little."""
    found = []
    for n in range(many):
        found += [
            line(phase, each, f"log.py:{10 * n}", function=f"log_{n}", within=f"report.py:{n}"),
            line(phase, 0.0, f"report.py:{n}", function="report", within=within),
        ]
    return found


def training_loop(phase: str = "python", **fields: str) -> list[LineTime]:
    """The loop's line that calls `report()`, the one that trains, and the script's that calls the loop."""
    return [
        line(phase, 0.0, "train.py:22", within="train.py:50"),
        line("backward", 5.0, "train.py:21", library="torch", within="train.py:50"),
        line("update", 1.0, "train.py:30", library="torch", within="train.py:50"),
        line("backward", 0.0, "train.py:50", function="<module>", **fields),
    ]


def spread(found: list[Remedy]) -> list[Remedy]:
    return [one for one in found if "small things" in one.cause or "within the network" in one.cause]


def test_small_helpers_of_one_function_are_named_by_the_line_that_calls_it() -> None:
    lines = [*training_loop(), *helpers(0.2, "train.py:22")]
    (found,) = remedies(seen({"python": 0.8}, lines=lines))
    assert found.where == "train.py:22" and found.gain == pytest.approx(0.08)
    assert found.cause == "several small things at each step: log_0, log_1, log_2, 1 more"


def test_the_innermost_line_that_counts_is_named() -> None:
    """And not those around it, as the one that calls all callbacks."""
    around = [line("python", 0.1, "train.py:7", function="callbacks", within="train.py:22")]
    (found,) = remedies(seen({"python": 0.9}, lines=[*training_loop(), *around, *helpers(0.2, "train.py:7")]))
    assert found.where == "train.py:7" and found.gain == pytest.approx(0.09)


def test_what_counts_too_little_together_is_not_named() -> None:
    assert remedies(seen({"python": 0.4}, lines=[*training_loop(), *helpers(0.1, "train.py:22")])) == []


def test_the_line_that_runs_the_training_says_nothing() -> None:
    lines = [
        *training_loop(),
        *(line("python", 0.2, f"log.py:{n}", function=f"log_{n}", within="train.py:50") for n in range(4)),
    ]
    assert remedies(seen({"python": 0.8}, lines=lines)) == []


def test_functions_that_call_themselves_are_no_endless_way_outwards() -> None:
    lines = [line("python", 0.2, f"log.py:{n}", function=f"log_{n}", within=f"log.py:{(n + 1) % 4}") for n in range(4)]
    assert len(remedies(seen({"python": 0.8}, lines=lines))) <= 1


@pytest.mark.parametrize("library", ["", "torch"])
def test_helpers_within_the_forward_are_named_unless_torch_lies_between(library: str) -> None:
    """A network's line in the loop runs the whole of it."""
    call = line("forward", 0.0, "train.py:22", library=library, within="train.py:50")
    lines = [*training_loop("forward"), call, line("forward", 3.0, "net.py:2", library="torch", within="train.py:22")]
    found = spread(remedies(seen({"forward": 4.0}, lines=[*lines, *helpers(0.2, "train.py:22", "forward")])))
    assert [one.where for one in found] == ([] if library else ["train.py:22"])
