"""What is said of an update: loops over tensors, and what isn't one."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from hotloop.core.records.profile import GroupTime, Remedy
from tests.support.profiler.handmade_steps import adam, as_task, operator, remedies, seen, table


def test_a_fused_optimizer_asks_each_tensor_too() -> None:
    """As torch's fused SGD does, which is hardly faster than one call for each of many small tensors."""
    assert not remedies(seen({"update": 1.4}, optimizers=[adam(1.4, tensors=200)]))
    assert remedies(seen({"update": 1.4}, optimizers=[adam(1.4, tensors=10)]))


def test_of_an_update_that_nobody_knows_its_arithmetic_is_not_won() -> None:
    def updating(tensors: int, each_ms: float) -> Remedy | None:
        ones = [
            operator("mm", 20 * each_ms, 20, phase="update", where="mine.py:7", line_runs=20.0, flops=1e8, bytes=1e5),
            operator("add_", 0.2, 20, phase="update", where="mine.py:7", line_runs=20.0, flops=1e2, bytes=1e3),
        ]
        found = remedies(
            seen({"update": 8.0}, optimizers=[adam(8.0, "", tensors=tensors, kind="Mine")], operators=ones)
        )
        return next((one for one in found if "for-loop" in one.cause), None)

    products = updating(20, 0.39)
    assert products is None or products.gain < 0.1
    small = updating(20, 0.01)
    assert small is not None and small.gain > 0.05
    assert updating(7, 0.01) is None


def test_two_optimizers_of_two_classes_that_one_line_steps_are_two_remedies() -> None:
    uses = [adam(2.0), adam(2.0, kind="SGD")]
    found = [one for one in remedies(seen({"update": 4.0}, optimizers=uses)) if "for-loop" in one.cause]
    assert sorted(one.cause.split()[3] for one in found) == ["Adam", "SGD"]


def test_two_optimizers_of_one_class_share_what_its_lines_take() -> None:
    """As a generator's and a discriminator's do, which run the same lines."""
    ones = [operator("add_", 3.0, 200, phase="update", where="mine.py:7", line_runs=200.0, flops=1e2, bytes=1e3)]
    uses = [adam(ms, "", tensors=50, kind="Mine", where=f"gan.py:{ms}") for ms in (4.5, 1.5)]
    found = [one for one in remedies(seen({"update": 6.0}, optimizers=uses, operators=ones)) if "for-loop" in one.cause]
    told = [re.findall(r"([\d.]+) ms|start of (\d+)", one.evidence) for one in found]
    (whole, _), (won, _), (_, calls) = told[0]
    assert float(won) <= float(whole) == 4.5 and calls == "150"


def test_optimizers_that_step_at_one_line_count_together() -> None:
    """2 % each is nothing, 37 % is much: 40 % without the Python code of a fused update."""

    def found(where: Callable[[int], str]) -> list[Remedy]:
        uses = [adam(0.2, tensors=1, numbers=100, where=where(n)) for n in range(20)]
        return [one for one in remedies(seen({"update": 4.0}, optimizers=uses)) if "for-loop" in one.cause]

    (one,) = found(lambda n: "train.py:13")
    assert one.gain == pytest.approx(0.37, abs=0.01) and "updates 20 parameters" in one.cause
    assert "one group" in one.remedy and not found(lambda n: f"train.py:{n}")


@pytest.mark.parametrize(("groups", "ms", "named"), [(40, 3.0, True), (2, 3.0, False), (40, 0.3, False)])
def test_a_kernel_for_each_group_is_told_by_the_python_between_them(groups: int, ms: float, named: bool) -> None:
    group = GroupTime(name="0", tensors=1, numbers=100, ms=None)
    kernel = operator("_fused_adam_", 0.2, groups, phase="update", where="train.py:13")
    uses = [adam(ms, "fused", groups=[group] * groups)]
    found = remedies(seen({"update": ms}, optimizers=uses, operators=[kernel]))
    assert any("groups, one after the other" in one.cause for one in found) is named


@pytest.mark.parametrize(("settings", "part"), [(1, 39 / 40), (20, 20 / 40), (33, 0.0), (40, 0.0)])
def test_groups_of_different_settings_stay_apart(settings: int, part: float) -> None:
    """As where each layer has its own learning rate; those of several optimizers are told apart as well."""

    def gain(many: int) -> float:
        groups = [GroupTime(name="0", tensors=1, numbers=100, settings=n % many, ms=None) for n in range(40)]
        uses = [adam(1.5, "fused", groups=groups[:20]), adam(1.5, "fused", groups=groups[20:])]
        kernel = operator("_fused_adam_", 0.2, 40, phase="update", where="train.py:13")
        found = remedies(seen({"update": 3.0}, optimizers=uses, operators=[kernel]))
        return sum(one.gain for one in found if "groups, one after the other" in one.cause)

    assert gain(settings) == pytest.approx(gain(1) * part * 40 / 39)


@pytest.mark.parametrize(
    ("within", "name", "named"), [("", "mul_", True), ("step", "mul_", False), ("", "linalg_vector_norm", False)]
)
def test_what_goes_from_tensor_to_tensor_beside_the_optimizer_is_the_loops_own(
    within: str, name: str, named: bool
) -> None:
    """But for clipping, which torch does so itself."""
    fields = dict(phase="update", bytes=1e3, flops=1e2)
    ones = [
        operator("_fused_adam_", 0.1, where="train.py:13", within="step", **fields),
        operator(name, 0.5, 100, where="train.py:14", within=within, **fields),
    ]
    found = remedies(seen({"update": 3.0}, optimizers=[adam(0.2, "fused")], operators=ones))
    assert [one.where for one in found if "beside the optimizer" in one.cause] == ["train.py:14"] * named


@pytest.mark.parametrize(("name", "named"), [("zero_", True), ("_foreach_zero_", True), ("detach_", False)])
def test_gradients_that_are_zeroed_in_place_are_named(name: str, named: bool) -> None:
    one = operator(name, 0.9, 10, phase="update", where="train.py:9", within="zero_grad")
    found = remedies(seen({"update": 1.0}, optimizers=[adam(0.1, "fused")], operators=[one]))
    assert [one.where for one in found if "zeroed in place" in one.cause] == ["train.py:9"] * named


@pytest.mark.parametrize(("kind", "name"), [("Mine", "_foreach_add_"), ("LBFGS", "add_"), ("Muon", "mm")])
def test_an_optimizer_that_takes_lists_or_has_no_other_way_is_no_loop(kind: str, name: str) -> None:
    ones = [
        operator(name, 0.1, phase="update", where="mine.py:7", line_runs=1.0),
        operator(
            "add_", 1.5, 100, phase="update", where="mine.py:7", line_runs=1.0
        ),  # torch goes through them on a CPU
    ]
    found = remedies(seen({"update": 5.0}, optimizers=[adam(5.0, "", kind=kind)], operators=ones))
    assert not [one for one in found if "for-loop" in one.cause]


def test_reading_in_the_optimizer_is_not_the_users() -> None:
    ones = [operator("item", 0.01, phase="update", where="train.py:13")]
    assert remedies(seen(operators=ones, optimizers=[adam(0.1, "fused")])) == []


def test_reading_after_an_update_by_hand_is() -> None:
    ones = [operator("item", 0.01, phase="update", where="train.py:14")]
    (note,) = remedies(seen(operators=ones, optimizers=[adam(0.0, "", kind="by hand", where="train.py:12", groups=[])]))
    assert ".item()" in note.cause and note.where == "train.py:14" and note.note


@pytest.mark.parametrize(("each_ms", "share"), [(0.01, 0.3), (0.04, 0.0)])
def test_lists_win_on_a_cpu_what_lies_between_the_operations_alone(each_ms: float, share: float) -> None:
    """There torch goes through them from tensor to tensor, too: what each operation takes stays."""
    ones = [operator("add_", 100 * each_ms, 100, phase="update", where="train.py:13", flops=1e2, bytes=1e3)]
    profile = seen({"update": 4.0}, optimizers=[adam(4.0, kind="RMSprop")], operators=ones)
    found = [one for one in remedies(as_task(profile)) if "for-loop" in one.cause]
    assert sum(one.gain for one in found) == pytest.approx(share)
    assert all(one.axes == {"optimizer": "foreach"} and "one kernel" not in one.evidence for one in found)


def test_lists_are_one_kernel_on_an_accelerator() -> None:
    profile = seen({"update": 4.0}, optimizers=[adam(4.0, kind="RMSprop")], device="cuda:0")
    assert "as one kernel" in remedies(profile)[0].evidence


def test_lists_are_not_proposed_on_a_cpu_to_an_optimizer_that_they_hold_up() -> None:
    ones = [operator("add_", 1.0, 100, phase="update", where="train.py:13", flops=1e2, bytes=1e3)]
    profile = seen({"update": 4.0}, optimizers=[adam(4.0, kind="ASGD")], operators=ones)
    assert not [one for one in remedies(profile) if "for-loop" in one.cause]


@pytest.mark.parametrize(
    ("kind", "gradient", "apart"),
    [("SGD", "sparse", True), ("Adagrad", "sparse", True), ("SGD", "dense", False), ("Adam", "sparse", False)],
)
def test_a_single_kernel_takes_no_sparse_gradients(kind: str, gradient: str, apart: bool) -> None:
    """Adam takes none in any way, so that those that there are go to another optimizer."""
    profile = seen({"update": 4.0}, optimizers=[adam(4.0, kind=kind)], operators=table("10000x8", gradient))
    found = next(one for one in remedies(as_task(profile)) if "for-loop" in one.cause)
    assert ("another optimizer" in found.remedy) is apart and found.axes == ({} if apart else {"optimizer": "fused"})


@pytest.mark.parametrize(
    ("calls", "line_runs", "name", "gain"),
    [(1, 1.0, "sub_", 0.0), (7, 7.0, "sub_", 0.0), (100, 100.0, "sub_", 0.4), (100, 1.0, "_foreach_sub_", 0.0)],
)
def test_an_update_by_hand_is_only_one_in_a_loop_if_it_goes_from_tensor_to_tensor(
    calls: int, line_runs: float, name: str, gain: float
) -> None:
    fields = dict(phase="update", where="sgd.py:3", flops=0.0, bytes=1e4 / calls, line_runs=line_runs)
    use = adam(4.0, "", kind="by hand", where="train.py:12", groups=[])
    found = remedies(seen({"update": 4.0}, optimizers=[use], operators=[operator(name, 1.0, calls, **fields)]))
    said = [one for one in found if "by hand" in one.cause]
    assert sum(one.gain for one in said) == pytest.approx(gain, abs=0.02)
    assert [one.where for one in said] == ["sgd.py:3"] * bool(gain)


def test_an_update_over_lists_that_a_comprehension_makes_is_no_loop() -> None:
    """The comprehension runs the line for each tensor, and on a CPU torch runs an operator for each."""
    fields = dict(phase="update", where="sgd.py:3", flops=0.0, bytes=1e2, line_runs=101.0)
    ones = [
        operator("_foreach_sub_", 0.5, 1, **fields),
        operator("sub_", 1.0, 100, outer="aten::_foreach_sub_", **fields),
    ]
    use = adam(4.0, "", kind="by hand", where="train.py:12", groups=[])
    found = remedies(seen({"update": 4.0}, optimizers=[use], operators=ones))
    assert not [one for one in found if "by hand" in one.cause]


@pytest.mark.parametrize(("made", "named"), [(1.0, True), (0.1, False)])
def test_an_optimizer_that_is_made_in_each_step_makes_its_state_there(made: float, named: bool) -> None:
    ones = [operator(name, 1.0, phase="update", where="train.py:13") for name in ("zero_", "mul_")]
    found = remedies(seen({"update": 2.0}, operators=ones, optimizers=[adam(2.0, "fused", made=made)]))
    (remade,) = [one for one in found if "made anew" in one.cause] or [None]
    assert (remade is not None) is named
    assert remade is None or (remade.gain, remade.where) == (pytest.approx(0.1), "train.py:13")
