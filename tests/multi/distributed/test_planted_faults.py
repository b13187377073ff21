"""What would make ranks come to something else, planted: each is caught, by the comparison or by the ranks themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hotloop
from hotloop.data.order import Order, RankRows
from hotloop.distributed.join import check_sums
from hotloop.distributed.world import World, check_in_step
from hotloop.distributed.wrappers import ddp, sync_batch_norm
from hotloop.distributed.wrappers.global_batch_rng import GlobalBatchRng
from hotloop.errors import OutOfStepError, PartsDifferError, PlanError, TrainingError
from hotloop.lowering.steps.data_parallel import DataParallelStep
from hotloop.lowering.steps.gradient_check import LaterGradients
from hotloop.plan import Plan
from tests.multi.distributed.test_ddp import distance
from tests.support.processes.rank_processes import of_ranks
from tests.support.tasks.rank_tasks import images

PLAN = Plan(parallel="data", ranks=2)
STEPS = 3


def small() -> hotloop.Task:
    return images(torch.float64, samples=100, batch_size=25, validation=None)


def an_unequal_shard(patch: pytest.MonkeyPatch) -> None:
    """The second rank takes a row of the first's, too."""
    part = RankRows.batch

    def batch(self: RankRows, permutation: torch.Tensor, number: int) -> torch.Tensor:
        rows = part(self, permutation, number)
        if self.rank:
            rows = torch.cat([Order.batch(self, permutation, number)[:1], rows[1:]])
        return rows

    patch.setattr(RankRows, "batch", batch)


def a_missing_sum(patch: pytest.MonkeyPatch) -> None:
    """Each rank keeps its own gradients."""

    def alone(owner, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    alone.__annotations__ = ddp._sum_bucket.__annotations__
    patch.setattr(ddp, "_sum_bucket", alone)


def an_average_of_parts(patch: pytest.MonkeyPatch) -> None:
    """Each rank's mean counts the same, however many samples it is a mean of."""
    differentiate = DataParallelStep._differentiate

    def equal(self: Any, computed: Any, batch: Any, samples: int) -> Any:
        self._rows = 1
        return differentiate(self, computed, batch, samples)

    patch.setattr(DataParallelStep, "_differentiate", equal)


def an_unsynchronised_buffer(patch: pytest.MonkeyPatch) -> None:
    """Batch norms follow the mean of the rank's rows alone."""
    follow = sync_batch_norm._update_running_stats

    def own(running: torch.Tensor, now: torch.Tensor, momentum: float) -> None:
        follow(running, now + 1 + torch.distributed.get_rank(), momentum)

    patch.setattr(sync_batch_norm, "_update_running_stats", own)


def norms_of_parts(patch: pytest.MonkeyPatch) -> None:
    """Batch norms look at the rank's rows alone."""
    patch.setattr(sync_batch_norm._AllReduceSum, "apply", lambda own, meter: own)


def a_dropped_sample(patch: pytest.MonkeyPatch) -> None:
    """The second rank leaves out its last row, and counts it."""
    part = RankRows.batch

    def batch(self: RankRows, permutation: torch.Tensor, number: int) -> torch.Tensor:
        rows = part(self, permutation, number)
        return rows[:-1] if self.rank else rows

    patch.setattr(RankRows, "batch", batch)


def another_mask(patch: pytest.MonkeyPatch) -> None:
    """Each rank draws the first rows' numbers."""
    cut = GlobalBatchRng._cut

    def first(self: GlobalBatchRng, drawing: Any) -> torch.Tensor:
        self.first = 0
        return cut(self, drawing)

    patch.setattr(GlobalBatchRng, "_cut", first)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "none": lambda patch: None,
    **{fault.__name__: fault for fault in (an_unequal_shard, a_missing_sum, an_average_of_parts)},
    **{fault.__name__: fault for fault in (an_unsynchronised_buffer, norms_of_parts)},
}
SEEN_BY_THE_CHECK: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    **{name: plant for name, plant in FAULTS.items() if name != "an_unequal_shard"},
    **{fault.__name__: fault for fault in (a_dropped_sample, another_mask)},
}
SEEN_BY_THE_RANKS = ("a_missing_sum", "an_unsynchronised_buffer", "norms_of_parts")


def after(plan: Plan) -> hotloop.lowering.program.Program:
    program = hotloop.lower(small(), plan)
    program.advance(STEPS)
    return program


def compute(world: World) -> dict[str, Any]:
    found = {}
    for name, plant in FAULTS.items():
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            patch.setattr(LaterGradients, "check", lambda *_: None)
            state = after(PLAN).state()
        try:
            said = check_in_step(world, state) or ""
        except OutOfStepError as error:
            said = str(error)
        found[name] = state, said
    found["a wrong sum"] = joining_sees(world)
    for mode in ("data", "sharded", "towers"):
        for name, plant in SEEN_BY_THE_CHECK.items():
            if mode == "data" or name != "a_missing_sum":
                found[mode, name] = refusal(PLAN.with_axes(parallel=mode), plant)
    return found


def refusal(plan: Plan, plant: Callable[[pytest.MonkeyPatch], None]) -> tuple[str, int]:
    """The error of the first steps, and how many of them ran."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        steps = 0
        try:
            program = hotloop.lower(dataclasses.replace(small(), average=None), plan)
            while steps < STEPS:
                program.advance(1)
                steps += 1
        except PlanError as error:  # before training
            return str(error), 0
        except PartsDifferError as error:
            return str(error), steps
        return "", steps


def a_wrong_sum(patch: pytest.MonkeyPatch) -> None:
    """What gloo's average was once: the sum, divided by something else than the number of ranks."""
    add_up = torch.distributed.all_reduce

    def wrong(total: torch.Tensor) -> None:
        add_up(total)
        total /= 3

    patch.setattr(torch.distributed, "all_reduce", wrong)


def joining_sees(world: World) -> str:
    check_sums(world, "cpu")
    with pytest.MonkeyPatch.context() as patch:
        a_wrong_sum(patch)
        try:
            check_sums(world, "cpu")
        except TrainingError as error:
            return str(error)
    return ""


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("planted")
    return of_ranks(folder, PLAN, compute)[0]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees_it(planted: dict[str, Any], fault: str) -> None:
    alone = after(Plan()).state()
    far = max(distance((planted[fault][0], [], {}), (alone, [], {})).values())
    assert far < 1e-10 if fault == "none" else far > 1e-6


@pytest.mark.parametrize("mode", ["data", "sharded", "towers"])
@pytest.mark.parametrize("fault", SEEN_BY_THE_CHECK)
def test_ranks_that_compute_another_step_than_one_process_are_refused(
    planted: dict[str, Any], mode: str, fault: str
) -> None:
    if (mode, fault) not in planted:
        return  # this mode has another engine
    said, steps = planted[mode, fault]
    if fault == "none":
        assert (said, steps) == ("", STEPS)
    else:
        assert steps == 0
        assert said.removeprefix("step 1: ").startswith(f"parallel={mode}") and len(said.splitlines()) == 1


@pytest.mark.parametrize("fault", FAULTS)
def test_the_ranks_see_what_they_hold_differently(planted: dict[str, Any], fault: str) -> None:
    said = planted[fault][1]
    assert bool(said) is (fault in SEEN_BY_THE_RANKS)
    if said:
        assert said.startswith("after step 3 rank 1 and rank 0 differ in ")


def test_a_rank_that_joins_sees_sums_that_are_wrong(planted: dict[str, Any]) -> None:
    assert planted["a wrong sum"].startswith("torch.distributed computes wrong sums on cpu: [1.0, 2.0, ")
    assert "expected [3.0, 6.0, " in planted["a wrong sum"]
