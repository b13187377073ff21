"""Asynchronous training in one process under a virtual clock, with the same result in each run.

The gradients are real; only their arrival times are simulated. So the effect of staleness can be studied with any
number of workers, and tests of the server need no processes:

    program = simulate_training(task, workers=30, times=UniformTimes(), policy=StalenessPolicy(divide=False))
    while not program.advance(100).ended: ...
    program.staleness   # {29: 412, 30: 398, ...}: number of updates by staleness
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from hotloop.core.random.rng import generator_for
from hotloop.errors import PlanError, TrainingError
from hotloop.lowering.build import lower
from hotloop.lowering.parameter_server.scheduler import (
    PollHook,
    WorkerAnswer,
    WorkerLost,
    WorkerReady,
    WorkItem,
    no_poll,
)
from hotloop.lowering.parameter_server.server import StalenessPolicy, WeightVersion
from hotloop.lowering.parameter_server.server_program import ParameterServerProgram, parameter_server_program
from hotloop.lowering.parameter_server.workers.worker import WorkerReplica
from hotloop.plan import BASELINE, Plan
from hotloop.task import Task

StepTimes = Callable[[int, int], float]
"""`(worker, number of its earlier batches)` -> virtual seconds for the next batch."""


@dataclass(frozen=True)
class SteadyTimes:
    """Constant times: `seconds[worker]`, or the last of them for further workers."""

    seconds: Sequence[float] = (1.0,)

    def __call__(self, worker: int, batch: int) -> float:
        return self.seconds[min(worker, len(self.seconds) - 1)]


@dataclass(frozen=True)
class UniformTimes:
    """Random times for each batch, uniform from `mean * (1 - spread)` to `mean * (1 + spread)`."""

    mean: float = 1.0
    spread: float = 0.2
    seed: int = 0

    def __call__(self, worker: int, batch: int) -> float:
        drawn = torch.rand((), generator=generator_for(self.seed, "times", worker, batch))
        return self.mean * (1 + self.spread * (2 * float(drawn) - 1))


@dataclass(frozen=True)
class ExponentialTimes:
    """Random times for each batch, exponential with this mean: many short and some very long."""

    mean: float = 1.0
    seed: int = 0

    def __call__(self, worker: int, batch: int) -> float:
        drawn = torch.empty(()).exponential_(generator=generator_for(self.seed, "times", worker, batch))
        return self.mean * float(drawn)


class SimulatedPool:
    """Workers that share one replica in the order of a virtual clock.

    Args:
        replica: computes their gradients.
        workers: number of workers.
        times: virtual seconds per batch; `math.inf` for a stopped worker, which never answers.
        deaths: worker -> time of its death.

    Attributes:
        now: virtual seconds since the beginning.
    """

    def __init__(
        self, replica: WorkerReplica, workers: int, times: StepTimes, deaths: Mapping[int, float] | None = None
    ) -> None:
        if workers < 1:
            raise PlanError(f"{workers} workers", expected="1 or more")
        self.now = 0.0
        self._replica, self._times, self._deaths = replica, times, dict(deaths or {})
        self._number = itertools.count()  # orders equal times by assignment
        self._batch_counts = [0] * workers
        self._events: list[tuple[float, int, int, tuple[WorkItem, WeightVersion] | WorkerReady | WorkerLost]] = []
        for worker in range(workers):
            self._push(0.0, worker, WorkerReady())

    def submit(self, worker: int, work: WorkItem, weights: WeightVersion) -> None:
        done = self.now + self._times(worker, self._batch_counts[worker])
        self._batch_counts[worker] += 1
        death = self._deaths.get(worker, math.inf)
        if death <= done and death < math.inf:
            self._push(max(death, self.now), worker, WorkerLost("died"))
        elif done < math.inf:
            self._push(done, worker, (work, weights))

    def receive(self, look: PollHook = no_poll) -> tuple[int, WorkerAnswer]:
        if not self._events:
            raise TrainingError("no worker is left to answer", fix="check the times and the deaths")
        self.now, _, worker, what = heapq.heappop(self._events)
        return worker, self._replica.gradient(*what) if isinstance(what, tuple) else what

    def close(self) -> None:
        self._events.clear()

    def _push(self, when: float, worker: int, what: tuple[WorkItem, WeightVersion] | WorkerReady | WorkerLost) -> None:
        heapq.heappush(self._events, (when, next(self._number), worker, what))


def simulate_training(
    task: Task,
    *,
    workers: int,
    times: StepTimes = SteadyTimes(),
    policy: StalenessPolicy = StalenessPolicy(),  # noqa: B008 - frozen
    deaths: Mapping[int, float] | None = None,
    plan: Plan = BASELINE,
) -> ParameterServerProgram:
    """Returns a Program that trains `task` asynchronously in virtual time; `feed.crew.now` is the time.

    Args:
        workers: number of simulated workers.
        times: virtual seconds per batch: `SteadyTimes`, `UniformTimes`, `ExponentialTimes`, or another function.
        policy: treatment of stale gradients.
        deaths: worker -> virtual time of its death.
        plan: how to compute the gradients.
    """
    program = parameter_server_program(lower(task, plan).parts, policy)
    program.set_workers(simulated_workers(task, workers, times, deaths, plan))
    return program


def simulated_workers(
    task: Task, workers: int, times: StepTimes, deaths: Mapping[int, float] | None = None, plan: Plan = BASELINE
) -> SimulatedPool:
    """Returns new workers for `ParameterServerProgram.set_workers`; see `simulate_training`."""
    return SimulatedPool(WorkerReplica(task, plan), workers, times, deaths)
