"""Asynchronous training in one process under a virtual clock: the same whenever it is run, however many workers.

The gradients are real; only when each arrives is made up. So what staleness does to a training can be studied on a
laptop with any number of workers, and tests of the server need no processes:

    program = simulated(task, workers=30, times=Uneven(), policy=Policy(divide=False))
    while not program.advance(100).ended: ...
    program.staleness   # {29: 412, 30: 398, ...}: how many updates of each staleness there were
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
"""`(worker, how many batches it had before)` -> virtual seconds that the next one takes it."""


@dataclass(frozen=True)
class SteadyTimes:
    """Each worker always takes as long: `seconds[worker]`, or the last of them for those without one."""

    seconds: Sequence[float] = (1.0,)

    def __call__(self, worker: int, batch: int) -> float:
        return self.seconds[min(worker, len(self.seconds) - 1)]


@dataclass(frozen=True)
class UniformTimes:
    """Times drawn anew for each batch, uniformly from `mean * (1 - spread)` to `mean * (1 + spread)`."""

    mean: float = 1.0
    spread: float = 0.2
    seed: int = 0

    def __call__(self, worker: int, batch: int) -> float:
        drawn = torch.rand((), generator=generator_for(self.seed, "times", worker, batch))
        return self.mean * (1 + self.spread * (2 * float(drawn) - 1))


@dataclass(frozen=True)
class ExponentialTimes:
    """Times drawn anew for each batch, of this mean, many short and some very long."""

    mean: float = 1.0
    seed: int = 0

    def __call__(self, worker: int, batch: int) -> float:
        drawn = torch.empty(()).exponential_(generator=generator_for(self.seed, "times", worker, batch))
        return self.mean * float(drawn)


class SimulatedPool:
    """Workers that are one replica, and take turns on it in the order of a virtual clock.

    Args:
        replica: computes their gradients.
        workers: how many there are.
        times: how long each takes; `math.inf` for one that is stopped and never answers.
        deaths: worker -> when it dies.

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
        self._number = itertools.count()  # of equal times, what was handed out first comes first
        self._had = [0] * workers
        self._coming: list[tuple[float, int, int, tuple[WorkItem, WeightVersion] | WorkerReady | WorkerLost]] = []
        for worker in range(workers):
            self._push(0.0, worker, WorkerReady())

    def submit(self, worker: int, work: WorkItem, weights: WeightVersion) -> None:
        done = self.now + self._times(worker, self._had[worker])
        self._had[worker] += 1
        death = self._deaths.get(worker, math.inf)
        if death <= done and death < math.inf:
            self._push(max(death, self.now), worker, WorkerLost("died"))
        elif done < math.inf:
            self._push(done, worker, (work, weights))

    def receive(self, look: PollHook = no_poll) -> tuple[int, WorkerAnswer]:
        if not self._coming:
            raise TrainingError("no worker is left that would ever answer", fix="look at the times and the deaths")
        self.now, _, worker, what = heapq.heappop(self._coming)
        return worker, self._replica.gradient(*what) if isinstance(what, tuple) else what

    def close(self) -> None:
        self._coming.clear()

    def _push(self, when: float, worker: int, what: tuple[WorkItem, WeightVersion] | WorkerReady | WorkerLost) -> None:
        heapq.heappush(self._coming, (when, next(self._number), worker, what))


def simulate_training(
    task: Task,
    *,
    workers: int,
    times: StepTimes = SteadyTimes(),
    policy: StalenessPolicy = StalenessPolicy(),  # noqa: B008 - frozen
    deaths: Mapping[int, float] | None = None,
    plan: Plan = BASELINE,
) -> ParameterServerProgram:
    """A Program that trains `task` asynchronously in virtual time; `feed.crew.now` tells the time.

    Args:
        workers: how many there would be.
        times: how many virtual seconds a batch takes a worker: `SteadyTimes`, `UniformTimes`, `ExponentialTimes`, or a function of one's own.
        policy: what is done about stale gradients.
        deaths: worker -> the virtual time at which it is gone.
        plan: how the gradients are computed.
    """
    program = parameter_server_program(lower(task, plan).parts, policy)
    program.set_workers(simulated_workers(task, workers, times, deaths, plan))
    return program


def simulated_workers(
    task: Task, workers: int, times: StepTimes, deaths: Mapping[int, float] | None = None, plan: Plan = BASELINE
) -> SimulatedPool:
    """New workers for `ParameterServerProgram.set_workers`; see `simulate_training`."""
    return SimulatedPool(WorkerReplica(task, plan), workers, times, deaths)
