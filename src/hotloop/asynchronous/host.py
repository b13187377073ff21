"""What lives in a worker process, whatever carries its answers."""

from __future__ import annotations

import os

import torch

from hotloop.asynchronous.recipe import Recipe
from hotloop.asynchronous.replica import Replica
from hotloop.errors import HotloopError, TrainingError, blame
from hotloop.parallel.crew import Answer, Ready
from hotloop.parallel.ledger import Work
from hotloop.parallel.server import Weights
from hotloop.plan import Plan
from hotloop.switches import running_under


class Host:
    """A replica, made of a recipe where it is needed; errors are answers like others.

    Args:
        workers: how many share the machine's cores.
    """

    def __init__(self, recipe: Recipe, plan: Plan, workers: int) -> None:
        self._recipe, self._plan, self._workers = recipe, plan, workers
        self._replica: Replica | None = None

    def make_ready(self) -> Answer:
        if self._plan.threads is None:
            torch.set_num_threads(max(1, torch.get_num_threads() // self._workers))
        try:
            task = self._recipe.task()  # its file may set other switches than the run has
            with running_under(self._recipe.switches, torch.device(self._plan.device).type):
                self._replica = Replica(task, self._plan)
        except Exception as error:
            return _told(error)
        return Ready()

    def gradient(self, work: Work, weights: Weights) -> Answer:
        if self._replica is None and isinstance(answer := self.make_ready(), HotloopError):
            return answer
        assert self._replica is not None
        try:
            return self._replica.gradient(work, weights)
        except Exception as error:
            return _told(error)

    def pid(self) -> int:
        """Of the process that it lives in."""
        return os.getpid()


def _told(error: Exception) -> HotloopError:
    return error if isinstance(error, HotloopError) else TrainingError(f"a worker raised {blame(error)}")
