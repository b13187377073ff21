"""A compiled step looks once at what can't change between steps that follow one another, and sums up later: the result
is bitwise that of looking each time, and wherever something may change it does look."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.core.state import State, differing_paths
from hotloop.lowering.program import Program
from hotloop.lowering.steps.compiled_step import CompiledStep
from hotloop.plan import Plan
from tests.lowering.compile.test_optimizer_scalars import halving, uncompiled  # noqa: F401  a fixture
from tests.support.programs import a_task, advance, labelled

SAMPLES, BATCH = 24, 5  # four whole batches an epoch, and an incomplete one


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    steps: list[int] = []
    run = CompiledStep._run_unchecked

    def noted(step: CompiledStep, batch: Any, samples: int, number: int) -> Tensor:
        steps.append(number)
        return run(step, batch, samples, number)

    monkeypatch.setattr(CompiledStep, "_run_unchecked", noted)
    return steps


def ready(task: hotloop.Task, compile: str = "step") -> Program:
    return hotloop.lower(task, Plan(compile=compile))


def after(program: Program, spans: int, steps: int) -> State:
    for _ in range(spans):
        advance(program, steps)
    return program.state()


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))


TASKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "Adam": {"optimizer": lambda p: torch.optim.Adam(p, lr=0.01)},
    "draws": {"model": dropping},
    "average": {"average": 0.9},
    "schedule by epochs": {"schedule": halving, "schedule_every": "epoch"},
    "targets left out": {"data": (labelled()[0], torch.where(torch.arange(SAMPLES) % 5 == 2, -100, labelled()[1]))},
}


def assert_the_same_bits(name: str, compile: str, unseen: list[int]) -> None:
    task = a_task(**TASKS[name])
    whole = after(ready(task, compile), 1, 13)
    # A step is looked at that begins an epoch, whose batch is incomplete, or before Adam has all its state.
    assert unseen == [*([] if name == "Adam" else [1]), 2, 3, 6, 7, 8, 11, 12]
    unseen.clear()
    singly = after(ready(task, compile), 13, 1)
    assert not unseen
    assert differing_paths(whole, singly) == []
    assert float(whole.sums["samples"]) == 3 * BATCH
    assert float(whole.sums["loss"]) > 0


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", TASKS)
def test_the_result_is_bitwise_that_of_looking_at_each_step(name: str, unseen: list[int]) -> None:
    assert_the_same_bits(name, "step", unseen)


@pytest.mark.more
@pytest.mark.parametrize("name", TASKS)
def test_the_result_of_a_compiled_step_is_too(name: str, unseen: list[int]) -> None:
    assert_the_same_bits(name, "package", unseen)


@pytest.mark.usefixtures("uncompiled")
def test_what_is_summed_up_later_can_be_seen_to_be_missing(unseen: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above would notice."""
    monkeypatch.setattr(CompiledStep, "_count", lambda self, losses: losses.clear())
    whole, singly = after(ready(a_task()), 1, 13), after(ready(a_task()), 13, 1)
    assert unseen
    assert differing_paths(whole, singly)


@pytest.mark.usefixtures("uncompiled")
def test_a_label_that_goes_out_of_bounds_is_the_eager_steps_error(unseen: list[int]) -> None:
    program = ready(a_task(shuffle=False))
    program.advance(2)
    assert unseen == [1]
    table: Any = program.feed
    table.table.columns[1].numpy()[17] = -7  # of which torch's own count of changes knows nothing
    with pytest.raises(IndexError, match="Target -7 is out of bounds"):
        program.advance(4)
    assert unseen == [1]
    assert program.position.batch == 3
    as_far = hotloop.lower(a_task(shuffle=False))
    as_far.advance(3)
    torch.testing.assert_close(program.state().parameters, as_far.state().parameters)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
@pytest.mark.usefixtures("uncompiled")
def test_what_was_done_before_an_error_is_counted(kind: type[BaseException], unseen: list[int]) -> None:
    program, plain = ready(a_task()), hotloop.lower(a_task())
    plain.advance(3)
    step: Any = program._step
    run, calls = step._runner, iter(range(9))

    def failing(flat: list[Tensor]) -> Any:
        if next(calls) == 3:
            raise kind
        return run(flat)

    step._runner = failing
    with pytest.raises(kind):
        program.advance(4)
    assert unseen == [1, 2, 3]
    state, expected = program.state(), plain.state()
    assert state.position == expected.position
    assert state.sums["samples"] == expected.sums["samples"] == 3 * BATCH
    assert float(state.sums["loss"]) == pytest.approx(float(expected.sums["loss"]))


def embedding(x: Tensor, places: Callable[[Tensor], Tensor]) -> Any:
    """Fields of a Task that embeds numbers, as whatever places are made of them."""

    class Embedding(nn.Embedding):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(places(x)).mean(1)

    return {"model": lambda: Embedding(8, 3), "data": (x, labelled()[1])}


@pytest.mark.usefixtures("uncompiled")
def test_an_index_that_is_computed_of_a_batch_is_looked_at_each_time(unseen: list[int]) -> None:
    x = torch.ones(SAMPLES, 2, dtype=torch.int64)
    program = ready(a_task(shuffle=False, **embedding(x, lambda x: x - 1)))
    asked: list[bool] = []
    step: Any = program._step
    steady = step._is_steady
    step._is_steady = lambda loss: (asked.append(steady(loss)), asked[-1])[1]
    program.advance(2)
    table: Any = program.feed
    table.table.columns[0][17] = 0
    with pytest.raises(IndexError):
        program.advance(3)
    assert not unseen
    assert asked == [False, False]  # once in each span


@pytest.mark.usefixtures("uncompiled")
def test_the_smaller_of_two_bounds_on_one_array_counts(unseen: list[int]) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.large, self.small = nn.Embedding(8, 3), nn.Embedding(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return (self.large(x) + self.small(x)).mean(1)

    x = torch.ones(SAMPLES, 2, dtype=torch.int64)
    program = ready(a_task(shuffle=False, model=Two, data=(x, labelled()[1])))
    program.advance(2)
    assert unseen == [1]
    table: Any = program.feed
    table.table.columns[0][17] = 5
    with pytest.raises(IndexError):
        program.advance(3)
    assert unseen == [1]


def weighed(batch: Any) -> Any:
    return len(batch[0])


class Pairs(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        x, y = labelled()
        return x[index], y[index]


LOOKED_AT: dict[str, dict[str, Any]] = {
    "a weight of the Task's own": {"weight": weighed},
    "a schedule by steps": {"schedule": halving},
    "an augmentation": {"augment": lambda x, draws: x + 1},
    "a data set": {"data": Pairs()},
    "many labels": {"data": (torch.zeros(600_000, 6), torch.zeros(600_000, dtype=torch.int64))},
}


@pytest.mark.parametrize("name", LOOKED_AT)
@pytest.mark.usefixtures("uncompiled")
def test_where_something_may_change_each_step_is_looked_at(name: str, unseen: list[int]) -> None:
    plan = Plan(compile="step", residency="stream") if name == "a data set" else Plan(compile="step")
    program = hotloop.lower(a_task(**LOOKED_AT[name]), plan)
    program.advance(4)
    assert program.compiled_steps == 4
    assert not unseen


@pytest.mark.parametrize("believed", [False, True], ids=["seen", "taken for apart"])
@pytest.mark.usefixtures("uncompiled")
def test_a_loss_in_memory_that_steps_change_is_added_at_once(
    believed: bool, unseen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiler may put a loss where a buffer lies; added up later, each would be the last one."""
    expected = float(after(ready(a_task(model=Counting)), 1, 4).sums["loss"])
    unseen.clear()
    if believed:
        monkeypatch.setattr(CompiledStep, "_has_own_memory", lambda self, loss: True)
    program = ready(a_task(model=Counting))
    step: Any = program._step
    run = step._runner

    def in_buffer(flat: list[Tensor]) -> list[Tensor]:
        loss, *others = run(flat)
        return [step.parts.model.kept.copy_(loss), *others]

    step._runner = in_buffer
    program.advance(4)
    assert bool(unseen) is believed
    assert (float(program.state().sums["loss"]) == pytest.approx(expected)) is not believed


class Counting(nn.Linear):
    """With a buffer of shape () that nobody reads."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.register_buffer("kept", torch.zeros(()))


@pytest.mark.usefixtures("uncompiled")
def test_a_rate_that_is_changed_between_spans_counts(unseen: list[int]) -> None:
    program = ready(a_task())
    program.advance(3)
    before = program.state().parameters
    program.optimizer.param_groups[0]["lr"] = 0.0
    program.advance(1)
    program.end_epoch(1.0)
    program.advance(4)
    assert len(unseen) == 2 + 3
    assert all(value.equal(before[name]) for name, value in program.state().parameters.items())


@pytest.mark.usefixtures("uncompiled")
def test_no_more_losses_are_held_than_are_added_up_together(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    count = CompiledStep._count

    def noted(step: CompiledStep, losses: list[Any]) -> None:
        held.append(len(losses))
        count(step, losses)

    monkeypatch.setattr(CompiledStep, "_count", noted)
    monkeypatch.setattr("hotloop.lowering.steps.compiled_step._AT_ONCE", 3)
    program = ready(a_task(batch_size=2))
    program.advance(12)
    assert max(held) == 3
    assert sum(held) == 11
    assert float(program.state().sums["samples"]) == 24
