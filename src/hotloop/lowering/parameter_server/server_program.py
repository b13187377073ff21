"""A Program whose steps are updates of a parameter server, and whose batches are gradients from workers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import Tensor

from hotloop.core.reporter import Say
from hotloop.core.state import State
from hotloop.data.batch_tree import to_device
from hotloop.data.feeds.loader_workers import Check, never_stop
from hotloop.data.order import Order
from hotloop.distributed.watchdog import LONGEST_WAIT_S, default_limit_s
from hotloop.errors import HotloopError, PlanError, TrainingError
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.eager_step import EagerStep
from hotloop.lowering.parameter_server.scheduler import (
    BatchScheduler,
    Gradient,
    WorkerAnswer,
    WorkerLost,
    WorkerPool,
)
from hotloop.lowering.parameter_server.server import ParameterServer, StalenessPolicy
from hotloop.lowering.program import Program

_PATIENCE_S = 5.0
"""Seconds that workers have for an answer after a reason to stop, or three times the longest wait so far."""

_POLL_S = 1.0
"""Largest time in seconds that counts between two checks of a wait: more passes only while this process is stopped."""


class ServerStep(EagerStep):
    """Updates the server with a worker's gradient.

    Attributes:
        server: has the model and the optimizer.
        staleness: number of updates by staleness.
    """

    def __init__(self, parts: LoweringContext, policy: StalenessPolicy) -> None:
        super().__init__(parts)
        self.server = ParameterServer(parts.model, self.optimizer, policy, lambda: self.clip(self._trainable))
        self.staleness: dict[int, int] = {}

    def __call__(self, batch: Gradient, samples: int, step: int) -> Tensor:
        staleness = self.server.update(batch.gradients, batch.work.version, batch.buffers)
        self.staleness[staleness] = self.staleness.get(staleness, 0) + 1
        self.step_schedule()
        if self.average:
            self.update_average(list(self.average.values()), self._averaged)
        loss, scalars, weight = to_device((batch.loss, batch.scalars, batch.weight), self.parts.device)
        self._add(loss, scalars, weight)
        self.sums["samples"] += samples
        return cast(Tensor, loss)

    def on_state_restored(self) -> None:
        """Drops the copy of the weights for workers."""
        self.server.changed()


class GradientFeed:
    """Assigns batches to workers, and yields `(gradient, samples)` as they come.

    Each epoch begins and ends with all its batches counted once.

    Attributes:
        crew: the workers; None before the first ones.
        ledger: assignment of batches to workers.
        lost: number of workers that died.
        stop_reason: returns the reason to stop, if there is one; called while no worker answers.
        limit_s: the longest wait for an answer, in seconds; None derives the limit from the longest wait so far.
    """

    def __init__(self, order: Order, server: ParameterServer, say: Say) -> None:
        self.batches: int | None = order.batches
        self.reseeds = False
        self.crew: WorkerPool | None = None
        self.ledger = BatchScheduler(server.policy.bound)
        self.lost = 0
        self.stop_reason: Callable[[], str | None] = lambda: None
        self.limit_s: float | None = None
        self._longest_s = 0.0
        self._server, self._say = server, say
        self._free: list[int] = []

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, int]]:
        if self.crew is None:
            raise PlanError(
                "no worker computes the gradients of this Program",
                expected="workers, which hotloop.fit and hotloop train start",
                fix="use one of these, or simulate_training of hotloop.lowering.parameter_server.workers.simulation",
            )
        assert self.batches is not None
        self.ledger.begin_epoch(epoch, start, self.batches)

        while not self.ledger.is_done:
            self._assign_batches(self.crew)
            worker, answer = self._next_answer(self.crew)
            if isinstance(answer, HotloopError):
                raise answer
            if isinstance(answer, WorkerLost):
                self._release_worker(worker, answer.reason)
                continue
            self._free.append(worker)
            if isinstance(answer, Gradient) and self.ledger.count(worker, answer.work):
                yield answer, answer.samples

    def _next_answer(self, crew: WorkerPool) -> tuple[int, WorkerAnswer]:
        """Returns the next answer.

        Raises:
            TrainingError: no worker answers within the limit, or within a shorter limit after a reason to stop. A State
                requires the missing gradients, so that none is saved.
        """
        began, since = time.monotonic(), math.inf
        checked, waited_s = began, 0.0

        def check_limits() -> None:
            nonlocal since, checked, waited_s
            reason, now = self.stop_reason(), time.monotonic()
            waited_s += min(now - checked, _POLL_S)
            checked = now
            if waited_s > self._longest_wait_s:
                raise TrainingError(
                    f"no worker has answered for {waited_s:.0f}s",
                    expected="a gradient of any worker",
                    fix="find what blocks all workers; --rank-timeout makes the server wait longer; continue with --resume",
                )
            since = min(since, now) if reason else math.inf
            if now - since > max(_PATIENCE_S, 3 * self._longest_s):
                raise TrainingError(
                    f"stopped ({reason}) without saving: no worker has answered for {now - began:.0f}s",
                    fix="find what blocks them, and continue from the last checkpoint",
                )

        worker, answer = crew.receive(check_limits)
        if isinstance(answer, Gradient):
            self._longest_s = max(self._longest_s, time.monotonic() - began)
        return worker, answer

    @property
    def _longest_wait_s(self) -> float:
        """The longest allowed wait in seconds; longer before the first gradient, as workers may prepare the model."""
        if self.limit_s is not None:
            return self.limit_s
        return default_limit_s(self._longest_s) if self._longest_s else LONGEST_WAIT_S

    def _assign_batches(self, crew: WorkerPool) -> None:
        waiting = []
        for worker in self._free:
            work = self.ledger.take(worker, self._server.version)
            if work is None:
                waiting.append(worker)
                continue
            crew.submit(worker, work, self._server.weights())
        self._free = waiting

    def _release_worker(self, worker: int, why: str) -> None:
        self.lost += 1
        if worker in self._free:
            self._free.remove(worker)
        batch = self.ledger.release_worker(worker)
        self._say(f"worker {worker} {why}" + ("" if batch is None else f"; its batch {batch + 1} goes to another"))

    def set_workers(self, crew: WorkerPool, limit_s: float | None = None) -> None:
        """Starts again with these workers; `limit_s` is that of the class."""
        self.crew, self.limit_s = crew, limit_s
        self._free = []

    def close(self) -> None:
        if self.crew is not None:
            self.crew.close()


class ParameterServerProgram(Program):
    """Program whose `position` counts updates; `state` waits for missing gradients, so that it has a place in the
    order.
    """

    _step: ServerStep
    feed: GradientFeed

    def state(self, *, lent: bool = False) -> State:
        ledger = self.feed.ledger
        ledger.paused = True
        try:
            if self._batches.is_open and ledger.outstanding:
                self.advance(ledger.outstanding)
        finally:
            ledger.paused = False
        return super().state(lent=lent)

    @property
    def staleness(self) -> dict[int, int]:
        """Number of updates by staleness."""
        return dict(self._step.staleness)

    def set_stop(self, reason: Callable[[], str | None], check: Check = never_stop) -> None:
        self.feed.stop_reason = reason

    def set_workers(self, crew: WorkerPool, limit_s: float | None = None) -> None:
        """Replaces the workers that compute the gradients, and ends the former ones.

        Args:
            limit_s: the longest wait for a gradient, in seconds; None derives the limit from the longest wait so far.
        """
        self.feed.close()
        self.feed.set_workers(crew, limit_s)
        self._batches.reset()


def parameter_server_program(parts: LoweringContext, policy: StalenessPolicy) -> ParameterServerProgram:
    """Returns the server's side of an asynchronous training; `set_workers` gives it workers."""
    assert parts.splits.order is not None, "a stream can't be handed out"
    step = ServerStep(parts, policy)
    return ParameterServerProgram(parts, step, GradientFeed(parts.splits.order, step.server, parts.say))
