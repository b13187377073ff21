"""A Task is watched in this process, and nothing of that remains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hotloop.core.state import differing_paths
from hotloop.lowering.build import lower
from hotloop.plan import Plan
from hotloop.profiler.task_profile import agree_on_steps, record_program
from tests.support.programs import a_task


def added(inputs: Tensor, draws: object) -> Tensor:
    return inputs + 1


def test_a_task_has_phases_and_its_program_goes_on_as_before() -> None:
    program = lower(a_task(augment=added))
    before, own = program.state(), type(program.model).__call__
    profile = record_program(program, steps=20, source="a task")
    assert profile.source == "a task" and profile.steps == 20
    assert sum(profile.phases.values()) == pytest.approx(profile.step_ms)
    assert {"data", "batch", "forward", "loss", "backward", "update"} <= profile.phases.keys()
    assert profile.samples_per_step == 5
    assert not profile.notes[1:] and profile.exit_code is None
    # Neither the line that has it trained, nor those of the step that hotloop writes; the Task's own are.
    places = {one.where for one in [*profile.optimizers, *profile.operators]} | {line.where for line in profile.lines}
    own_line = f"tests/profiler/test_task_profile.py:{added.__code__.co_firstlineno + 1}"
    assert {place for place in places if "hotloop/" in place or "site-packages" in place or "test_" in place} <= {
        own_line
    }
    assert differing_paths(before, program.state()) == []
    assert type(program.model).__call__ is own and torch.nn.Module.__call__ is own
    program.advance(2)


@pytest.mark.more
def test_a_step_in_pieces_has_all_samples_of_its_batch() -> None:
    assert record_program(lower(a_task(), Plan(accumulation=2)), steps=8).samples_per_step == 5


@pytest.mark.few("5-False")
@pytest.mark.parametrize(("batch_size", "one"), [(5, False), (24, True)])
def test_all_data_may_be_one_batch(batch_size: int, one: bool) -> None:
    assert record_program(lower(a_task(batch_size=batch_size)), steps=8).one_batch is one


def test_ranks_have_as_many_steps_as_the_first_has_time_for_or_as_were_asked_for() -> None:
    world: Any = SimpleNamespace(is_single=False, broadcast_int=lambda value: value)
    assert [agree_on_steps(steps, 1.0, world) for steps in (None, 200)] == [30, 200]


@pytest.mark.more
def test_a_step_of_a_closure() -> None:
    task = a_task(optimizer=lambda parameters: torch.optim.LBFGS(parameters, max_iter=2))
    profile = record_program(lower(task), steps=12)
    assert profile.steps == 12 and profile.optimizers[0].kind == "LBFGS"
    assert profile.phases["backward"] > 0 and profile.phases["update"] > 0
