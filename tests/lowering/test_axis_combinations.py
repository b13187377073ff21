"""The Plan's axes together: each two values that a CPU can run at once do, in some plan, what the baseline does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor

import hotloop
from hotloop.core.feasibility import violations
from hotloop.core.state import State, differing_paths
from hotloop.lowering.program import Program
from hotloop.lowering.transforms import accumulation
from hotloop.lowering.transforms.accumulation import MeanDraws, split_batch
from hotloop.plan import BASELINE, Plan
from hotloop.tuning.auto import feasibility_facts
from tests.lowering.test_cpu_plans import IMAGES, STEPS, assert_equal_within_rounding
from tests.support.programs import a_task, advance, through_file
from tests.support.tasks.model_families import FAMILIES, family

Row = Mapping[str, Any]
"""A combination: the Task's family and form of data, and an axis' value for each axis."""

HALF = 9  # in the middle of the third epoch

AXES: dict[str, tuple[Any, ...]] = {
    "layout": ("contiguous", "channels_last"),
    "optimizer": ("default", "forloop", "foreach", "fused"),
    "accumulation": (1, 3),
    "threads": (None, 1),
    "residency": ("stream", "host", "device"),
    "workers": (0, 1),
}
DATA = ("arrays", "data set")
COMPILED = ("forward", "step")
PACKAGE: Row = dict(  # the whole step as a file: what holds for `step` holds for it, and it takes longest to compile
    family="mlp",
    data="data set",
    compile="package",
    layout="channels_last",
    optimizer="fused",
    accumulation=1,
    threads=1,
    residency="device",
    workers=1,
)


def rows(**choices: tuple[Any, ...]) -> list[dict[str, Any]]:
    """All combinations of the choices that can be run."""
    every = (dict(zip(choices, values, strict=True)) for values in product(*choices.values()))
    return [row for row in every if can_be_run(row)]


def can_be_run(row: Row) -> bool:
    """What the documentation says, written down once more: `core/feasibility.py` must say the same."""
    if row["layout"] == "channels_last" and row["family"] not in IMAGES:
        return False
    pieces = row["accumulation"] > 1
    return not pieces or row["family"] != "cnn"  # which normalises over the batch


def pairs(row: Row) -> set[tuple[Any, Any]]:
    """Each two choices that a combination brings together."""
    return set(combinations(row.items(), 2))


def covering(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A few of the combinations in which each pair of all of them occurs: always the one with most that are new."""
    of_row = [(row, pairs(row)) for row in rows]
    missing = set().union(*(found for _, found in of_row))
    while missing:
        row, found = max(of_row, key=lambda one: len(one[1] & missing))
        missing -= found
        yield row


EAGER_ROWS = rows(family=tuple(FAMILIES), data=DATA, compile=("none",), **AXES)
# One family, since each is compiled alone in test_cpu_plans.py, and a compilation takes seconds.
COMPILED_ROWS = rows(family=("mlp",), data=DATA, compile=COMPILED, **AXES)
EAGER = list(covering(EAGER_ROWS))
COMPILED_FEW = list(covering(COMPILED_ROWS))
CHOSEN = [*EAGER, *COMPILED_FEW, PACKAGE]
MORE = [*EAGER[1::2], *COMPILED_FEW[1::2], PACKAGE]


def plan_of(row: Row) -> Plan:
    return Plan(**{axis: value for axis, value in row.items() if axis in Plan.model_fields})


class Rows(torch.utils.data.Dataset):
    def __init__(self, columns: tuple[Tensor, ...]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(column[index] for column in self.columns)


_TASKS = {
    (name, data): replace(family(name), data=Rows(family(name).data) if data == "data set" else family(name).data)
    for name in FAMILIES
    for data in DATA
}


def lower(row: Row, plan: Plan | None = None) -> Program:
    """The row's Task, under its plan unless there is another."""
    return hotloop.lower(_TASKS[row["family"], row["data"]], plan or plan_of(row))


def after(program: Program, steps: int) -> State:
    advance(program, steps)
    return program.state()


@cache
def baseline(family: str, data: str, means: bool = False) -> State:
    """The State of a Task after all steps of the baseline; `means` is for the cache alone."""
    return after(hotloop.lower(_TASKS[family, data]), STEPS)


def draws_in_pieces(row: Row) -> bool:
    """Whether noise is drawn for each piece of a batch: as good as the noise of the whole, but other numbers."""
    return row["family"] == "vae" and row["accumulation"] > 1


def named(row: Row) -> str:
    axes = plan_of(row).model_dump(exclude_defaults=True)
    return "-".join([row["family"], row["data"].replace(" ", "_"), *(f"{axis}={axes[axis]}" for axis in axes)])


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.more] * (row in MORE)) for row in CHOSEN], ids=named
)
def test_a_combination_runs_as_the_baseline_does_and_resumes_exactly(row: Row) -> None:
    at_means = draws_in_pieces(row)
    with MeanDraws() if at_means else nullcontext():
        program = lower(row)
        half = after(program, HALF)
        end = after(program, STEPS - HALF)
        assert_equal_within_rounding(end, baseline(row["family"], row["data"], at_means))

        again = lower(row) if row["compile"] == "none" else program
        again.restore(through_file(half))
        assert differing_paths(again.state(), half) == []
        assert differing_paths(after(again, STEPS - HALF), end) == []

        under_the_baseline = lower(row, BASELINE)
        under_the_baseline.restore(half)
        assert differing_paths(under_the_baseline.state(), half) == []
        assert_equal_within_rounding(after(under_the_baseline, STEPS - HALF), end)
        for used in (program, again, under_the_baseline):
            used.close()


@pytest.mark.more
def test_switching_among_combinations_keeps_order_and_result() -> None:
    """From each of a family's to the next, a few steps each."""
    chosen = [row for row in EAGER if row["family"] == "residual"]
    spans = [4] * (len(chosen) - 1)
    state = None
    for row, steps in zip(chosen, [*spans, STEPS - sum(spans)], strict=True):
        program = lower(row)
        if state is not None:
            program.restore(state)
        state = after(program, steps)
        program.close()
    assert state is not None and len(chosen) > 3
    assert_equal_within_rounding(state, baseline("residual", "arrays"))


def test_a_schedule_that_moves_adams_betas_goes_with_a_compiled_step() -> None:
    """Adam's update asks for the size of its first beta, which a compiled step knows only when it runs."""
    task = a_task(
        optimizer=torch.optim.AdamW,
        schedule=lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=total),
        epochs=6,
    )
    assert_equal_within_rounding(
        after(hotloop.lower(task, Plan(compile="step")), STEPS), after(hotloop.lower(task), STEPS)
    )


# ---------------------------------------------------------------- the choice itself


@pytest.mark.parametrize("rows", [EAGER_ROWS, COMPILED_ROWS], ids=["eager", "compiled"])
def test_the_few_hold_each_pair_of_all(rows: list[dict[str, Any]]) -> None:
    every, few = (set().union(*map(pairs, some)) for some in (rows, list(covering(rows))))
    assert few == every
    assert len(list(covering(rows))) < len(rows) / 10
    without_the_last = set().union(*map(pairs, list(covering(rows))[:-1]))
    assert without_the_last < every


def test_what_can_be_run_is_what_feasibility_says() -> None:
    """All combinations, not only the chosen ones; what a batch normalisation does to pieces shows in lowering alone."""
    hardware = feasibility_facts(family("mlp"), BASELINE)[1]
    choices = dict(family=tuple(FAMILIES), data=DATA, compile=("none", *COMPILED, "package"), **AXES)
    facts = {key: feasibility_facts(task, BASELINE)[0] for key, task in _TASKS.items()}
    for values in product(*choices.values()):
        row = dict(zip(choices, values, strict=True))
        normalised = row["family"] == "cnn" and row["accumulation"] > 1
        feasible = not violations(plan_of(row), facts[row["family"], row["data"]], hardware)
        assert feasible == (can_be_run(row) or (normalised and can_be_run(row | {"family": "residual"}))), named(row)


# ---------------------------------------------------------------- planted faults


@pytest.mark.parametrize("row", [row for row in EAGER if row["accumulation"] > 1][:1], ids=named)
def test_a_fault_in_one_combination_is_seen(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece of each batch is left out, where other axes are in play too."""
    program = lower(row)
    monkeypatch.setattr(accumulation, "split_batch", lambda *given: list(split_batch(*given))[1:])
    state = after(program, STEPS)
    program.close()
    with pytest.raises(AssertionError):
        assert_equal_within_rounding(state, baseline(row["family"], row["data"]))


# ---------------------------------------------------------------- what is said


@pytest.mark.more
def test_steps_that_run_eagerly_under_a_compiled_plan_are_said_once() -> None:
    """The incomplete last batch of each epoch, and then, in a loop of one's own, a batch of other strides."""
    said: list[str] = []
    program = hotloop.lower(family("mlp"), Plan(compile="step"), said.append)
    before = len(said)
    advance(program, 3)
    assert said[before:] == []
    advance(program, STEPS)
    assert said[before:] == ["a batch of 8 instead of 16 samples: steps on such batches run eagerly"]

    program = hotloop.lower(family("mlp"), Plan(compile="step"), said.append)
    images, label = (column[:16] for column in family("mlp").data)
    for _ in range(2):
        program.step((images, label))
    assert said[-1].startswith("compiled the step")
    for _ in range(2):
        program.step((images.transpose(2, 3), label))
    other = "a batch of other keys, shapes, dtypes or strides than the first"
    assert said[-1] == f"{other}: steps on such batches run eagerly"
    assert said[-2].startswith("compiled the step")
