"""The parameter server in virtual time: what it computes, what it counts, and that planted faults are caught."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.core.state import differing_paths
from hotloop.errors import NonFiniteError, PlanError, TrainingError
from hotloop.lowering.build import lower
from hotloop.lowering.parameter_server.scheduler import BatchScheduler
from hotloop.lowering.parameter_server.server import ParameterServer, StalenessPolicy
from hotloop.lowering.parameter_server.workers.simulation import (
    ExponentialTimes,
    SteadyTimes,
    UniformTimes,
    simulate_training,
)
from hotloop.lowering.program import Program
from hotloop.plan import Plan

SAMPLES, BATCH = 103, 8
BATCHES = math.ceil(SAMPLES / BATCH)


def task(**fields: Any) -> hotloop.Task:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 6, generator=generator)
    y = (x.sum(1) > 0).long()
    y[::7] = -100

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 2))

    given: dict[str, Any] = dict(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
        data=(x, y),
        batch_size=BATCH,
        clip_norm=0.5,
        average=0.9,
        schedule=lambda optimizer, total: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total),
        epochs=2,
    )
    return hotloop.Task(**given | fields)


def an_epoch(program: Program, at_once: int = 5) -> dict[str, float]:
    while not program.advance(at_once).ended:
        pass
    sums = program.read_sums()
    program.end_epoch()
    return sums


def test_one_worker_comes_bitwise_to_what_one_process_comes_to() -> None:
    alone, served = lower(task(), Plan()), simulate_training(task(), workers=1)
    for _ in range(2):
        assert an_epoch(alone) == an_epoch(served)
    assert differing_paths(alone.state(), served.state()) == []


def test_the_same_simulation_comes_bitwise_to_the_same() -> None:
    one, other = (simulate_training(task(), workers=5, times=ExponentialTimes(seed=3)) for _ in range(2))
    assert an_epoch(one, 3) == an_epoch(other, 7)
    assert differing_paths(one.state(), other.state()) == []
    third = simulate_training(task(), workers=5, times=ExponentialTimes(seed=4))
    assert an_epoch(third) != an_epoch(simulate_training(task(), workers=5, times=ExponentialTimes(seed=3)))


def check_each_sample_counts_once() -> None:
    """Worker 0 stops for good with its second batch, worker 1 dies, worker 2 is slow."""

    def times(worker: int, batch: int) -> float:
        return math.inf if (worker, batch) == (0, 1) else 4.0 if worker == 2 else 1.0

    for bound in (None, 1):
        program = simulate_training(task(), workers=4, times=times, deaths={1: 2.5}, policy=StalenessPolicy(bound))
        for _ in range(2):
            sums = an_epoch(program)
            assert sums["samples"] == SAMPLES
            assert sorted(program.feed.ledger.counted) == list(range(BATCHES))
        assert program.feed.lost == 1
        assert program.feed.ledger.refused  # the slow one came too late somewhere
        assert program.position.step == 2 * BATCHES


def test_each_sample_counts_once_whoever_dies_stops_or_is_slow() -> None:
    check_each_sample_counts_once()


def check_a_state_is_of_a_place_in_the_order() -> None:
    program = simulate_training(task(), workers=4, times=UniformTimes(spread=0.9))
    for _ in range(3):
        program.advance(2)
        state = program.state()
        assert sorted(program.feed.ledger.counted) == list(range(state.position.batch))
        assert state.sums["samples"] == sum(len(b) for b in _orders(program)[: state.position.batch])


def _orders(program: Program) -> list[Tensor]:
    order = program.parts.splits.order
    assert order is not None
    return [order.batch(order.epoch(0), number) for number in range(order.batches)]


def test_a_state_is_of_a_place_in_the_order() -> None:
    check_a_state_is_of_a_place_in_the_order()


def test_from_a_state_any_number_of_workers_go_on_and_so_does_one_process() -> None:
    program = simulate_training(task(), workers=4)
    program.advance(6)
    state = program.state()
    for other in (simulate_training(task(), workers=2), lower(task(), Plan())):
        other.restore(state)
        assert differing_paths(other.state(), state) == []
        assert an_epoch(other)["samples"] == SAMPLES
        assert other.position.step == BATCHES


def test_what_was_handed_out_before_a_restore_does_not_count_after_it() -> None:
    program = simulate_training(task(), workers=3)
    first = program.state()
    program.advance(4)
    program.restore(first)
    assert an_epoch(program)["samples"] == SAMPLES
    assert program.position.step == 0 + BATCHES


# --- what an update is


def check_updates(policy: StalenessPolicy) -> None:
    """Two steady workers on a known loss, against the paper's formula written out."""
    x = torch.arange(1.0, 13.0, dtype=torch.float64)[:, None]

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor(3.0, dtype=torch.float64))

    rate = 0.004
    known = hotloop.Task(
        model=Scale,
        step=lambda model, batch: ((model.w * batch - 1) ** 2).mean(),
        optimizer=lambda p: torch.optim.SGD(p, lr=rate),
        data=x,
        batch_size=1,
        shuffle=False,
    )
    program = simulate_training(known, workers=2, times=SteadyTimes((1.0, 2.7)), policy=policy)
    seen = [3.0]
    while not program.advance(1).ended:
        seen.append(program.model.w.item())
    seen.append(program.model.w.item())
    # Worker 0 brings batches at 1, 2, (3, 4, ...), worker 1 at 2.7, 5.4, ...; each is given the next one at once.
    arrivals = sorted([(float(n + 1), 0) for n in range(20)] + [(2.7 * (n + 1), 1) for n in range(8)])
    given = {0: (0, seen[0], 0), 1: (1, seen[0], 0)}
    expected, following = [seen[0]], 2
    for version, (_, worker) in enumerate(arrivals[:10]):  # before the end, where batches are computed twice
        batch, then, at = given[worker]
        value, now, staleness = float(x[batch]), expected[-1], version - at
        gradient = 2 * value * (then * value - 1)
        divided = rate / max(1, staleness) if policy.divide else rate
        expected.append(now - divided * gradient)
        given[worker] = (following, expected[-1], version + 1)
        following += 1
    assert seen[: len(expected)] == pytest.approx(expected, rel=1e-12)
    assert all(one != other for one, other in pairwise(expected))


@pytest.mark.parametrize("policy", [StalenessPolicy(divide=False), StalenessPolicy()], ids=repr)
def test_an_update_is_what_the_paper_says(policy: StalenessPolicy) -> None:
    check_updates(policy)


def test_the_step_size_is_the_tasks_again_after_an_update() -> None:
    program = simulate_training(task(schedule=None), workers=4)
    an_epoch(program)
    assert program.optimizer.param_groups[0]["lr"] == 1e-2
    assert max(program.staleness) == 3


def check_the_bound() -> None:
    program = simulate_training(
        task(batch_size=4), workers=3, times=SteadyTimes((9.0, 1.0, 1.0)), policy=StalenessPolicy(1)
    )
    an_epoch(program)
    assert max(program.staleness) <= 2 * (1 + 2)


def test_a_bound_on_the_staleness_is_kept() -> None:
    check_the_bound()


FAULTS: dict[str, tuple[type, str, Any, Callable[[], None]]] = {
    "a batch applied twice": (
        BatchScheduler,
        "count",
        lambda self, worker, work: self.counted.update({work.batch: worker}) or True,
        check_each_sample_counts_once,
    ),
    "a dead worker's batch forgotten": (
        BatchScheduler,
        "release_worker",
        lambda self, worker: self.counted.update({self._leases.pop(worker).work.batch: worker}),
        check_each_sample_counts_once,
    ),
    "step size not divided": (
        StalenessPolicy,
        "factor",
        lambda self, staleness: 1.0,
        lambda: check_updates(StalenessPolicy()),
    ),
    "divided by one more": (
        StalenessPolicy,
        "factor",
        lambda self, staleness: 1 / (1 + staleness),
        lambda: check_updates(StalenessPolicy()),
    ),
    "weights that change after they were handed out": (
        ParameterServer,
        "weights",
        lambda self: _live(self),
        lambda: check_updates(StalenessPolicy(divide=False)),
    ),
    "the bound not kept": (BatchScheduler, "_is_ahead", lambda self, worker, lease: False, check_the_bound),
    "a state in the midst of what is out": (
        BatchScheduler,
        "outstanding",
        property(lambda self: 0),
        check_a_state_is_of_a_place_in_the_order,
    ),
}


def _live(server: ParameterServer) -> Any:
    from hotloop.lowering.parameter_server.server import WeightVersion

    return WeightVersion(server.version, list(server.model.parameters()), list(server.model.buffers()))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, planted, check = FAULTS[fault]
    check()
    monkeypatch.setattr(owner, name, planted)
    with pytest.raises((AssertionError, TypeError)):
        check()


# --- what is said


def test_a_loss_that_is_no_number_reaches_no_other_worker() -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).mean() * (float("nan") if bool((batch[1] == -100).all()) else 1.0)

    y = torch.zeros(SAMPLES, dtype=torch.int64)
    y[16:24] = -100
    program = simulate_training(
        task(loss=None, step=step, data=(torch.ones(SAMPLES, 6), y), shuffle=False, metrics=None), workers=3
    )
    with pytest.raises(NonFiniteError, match=r"step 3 \(epoch 1, batch 3\): the loss"):
        an_epoch(program)
    assert all(bool(torch.isfinite(value).all()) for value in program.model.parameters())


def test_an_error_of_the_tasks_own_says_where() -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        raise ValueError("of my own")

    with pytest.raises(hotloop.HotloopError, match="of my own"):
        an_epoch(simulate_training(task(loss=None, step=step, metrics=None), workers=2))


def test_sparse_gradients_are_refused() -> None:
    given = task(
        model=lambda: nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Flatten()),
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        data=(torch.ones(SAMPLES, 1, dtype=torch.int64), torch.zeros(SAMPLES, dtype=torch.int64)),
        clip_norm=None,
        average=None,
    )
    with pytest.raises(PlanError, match="sparse gradients"):
        an_epoch(simulate_training(given, workers=2))


def test_when_all_are_gone_it_says_so() -> None:
    with pytest.raises(TrainingError, match="no worker is left"):
        an_epoch(simulate_training(task(), workers=2, deaths={0: 3.0, 1: 4.0}))


def test_a_program_of_ones_own_has_no_workers() -> None:
    with pytest.raises(PlanError, match="no worker computes"):
        lower(task(), Plan(parallel="async", ranks=2)).advance(1)


@pytest.mark.parametrize(
    "axes",
    [
        {"compile": "step"},
        {"residency": "host"},
        {"workers": 2},
        {"precision": "fp16"},
        {"parallel": "none", "staleness": 3},
        {"parallel": "none", "workforce": "ray"},
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(axes: dict[str, Any]) -> None:
    from hotloop.core.feasibility import violations
    from hotloop.core.hardware.probe import probe_hardware
    from hotloop.lowering.context import LoweringContext
    from hotloop.lowering.task_facts import task_facts

    plan = Plan(**{"parallel": "async", "ranks": 2, **axes})
    found = violations(plan, task_facts(LoweringContext.from_task(task(), Plan())), probe_hardware("cpu"))
    assert any("async" in one.reason + one.fix or "parallel" in one.axes for one in found)
