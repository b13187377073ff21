"""Workers as actors of Ray, which restarts an actor when it dies."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any

from hotloop.distributed.ray.cluster import connect, ray_module, translate_ray_errors
from hotloop.errors import HotloopError, TrainingError
from hotloop.lowering.parameter_server.scheduler import (
    PollHook,
    WorkerAnswer,
    WorkerLost,
    WorkerReady,
    WorkItem,
    no_poll,
)
from hotloop.lowering.parameter_server.server import WeightVersion
from hotloop.lowering.parameter_server.workers.worker import RemoteTask, WorkerHost
from hotloop.plan import Plan

_START_RETRIES = 3
"""Restarts by Ray of a worker that dies before its first batch."""


class ActorPool:
    """Actors in Ray's cluster (`RAY_ADDRESS`, or a local one), else in a new cluster.

    A Task from a file is read from the run's folder, which all machines of the cluster must see.

    Raises:
        PlanError: Ray isn't installed.
        HotloopError: a worker can't build the Task.
        TrainingError: Ray's object store is full, or a worker died repeatedly before its first batch.
    """

    def __init__(self, recipe: RemoteTask, plan: Plan, workers: int) -> None:
        self._ray = ray_module()
        self._own = not self._ray.is_initialized()
        if self._own:
            connect()
        self._pending: dict[Any, int] = {}
        self._waiting: deque[tuple[int, WorkerAnswer]] = deque()
        self._weights: tuple[int, Any] = (-1, None)
        self._actors: list[Any] = []
        try:
            with translate_ray_errors(self._ray):
                self._start(recipe, plan, workers)
        except BaseException:
            self.close()
            raise
        self._waiting.extend((worker, WorkerReady()) for worker in range(workers))

    def submit(self, worker: int, work: WorkItem, weights: WeightVersion) -> None:
        if self._weights[0] != weights.version:
            with translate_ray_errors(self._ray):
                self._weights = weights.version, self._ray.put(weights)  # once for all workers
        self._pending[self._actors[worker].gradient.remote(work, self._weights[1])] = worker

    def receive(self, look: PollHook = no_poll) -> tuple[int, WorkerAnswer]:
        if self._waiting:
            return self._waiting.popleft()
        with translate_ray_errors(self._ray):
            return self._receive(look)

    def _receive(self, look: PollHook) -> tuple[int, WorkerAnswer]:
        done: list[Any] = []
        while not done:  # short waits, so that Ctrl-C is handled
            done, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=0.2)
            if not done:
                look()
        worker = self._pending.pop(done[0])
        try:
            return worker, self._ray.get(done[0])
        except self._ray.exceptions.RayActorError:
            back = self._actors[worker].make_ready.options(max_task_retries=-1)  # waits for the restart
            self._pending[back.remote()] = worker
            return worker, WorkerLost("died, and Ray starts it again")

    def close(self) -> None:
        for actor in self._actors:
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)
        self._actors = []
        if self._own and self._ray.is_initialized():
            self._ray.shutdown()

    def _start(self, recipe: RemoteTask, plan: Plan, workers: int) -> None:
        options = self._resources(plan, workers) | {"max_restarts": -1, "scheduling_strategy": "SPREAD"}
        actor = self._ray.remote(**options)(WorkerHost)
        self._actors = [actor.remote(recipe, plan, workers) for _ in range(workers)]
        left = self._actors
        for _ in range(_START_RETRIES + 1):
            self._ray.get([actor.pid.options(max_task_retries=-1).remote() for actor in left])  # waits for restarts

            answers = [actor.make_ready.remote() for actor in left]
            left = [actor for actor, answer in zip(left, answers, strict=True) if self._is_lost(answer)]
            if not left:
                return
        raise TrainingError(
            f"{len(left)} of {workers} workers died {_START_RETRIES + 1} times before their first batch",
            fix="find what kills them: `ray logs` lists what they wrote",
        )

    def _is_lost(self, answer: Any) -> bool:
        """Checks whether the actor died before its answer.

        Raises:
            HotloopError: the actor can't build the Task.
        """
        try:
            found = self._ray.get(answer)
        except self._ray.exceptions.RayActorError:
            return True
        if isinstance(found, HotloopError):
            raise found
        return False

    def pids(self) -> dict[int, int]:
        """Returns the process id of each worker, once all restarted ones are back."""
        found = self._ray.get([actor.pid.options(max_task_retries=-1).remote() for actor in self._actors])
        return dict(enumerate(found))

    def _resources(self, plan: Plan, workers: int) -> dict[str, float]:
        """Returns the resources that Ray reserves per worker; none for fewer cores than workers, which then share
        these.
        """
        if plan.device.startswith("cuda"):
            return {"num_gpus": 1}
        return {"num_cpus": 1 if self._ray.cluster_resources().get("CPU", 0) >= workers else 0}
