"""The random generators that the parts of a training step hold: they are set before each step."""

from __future__ import annotations

from typing import Any

from torch import nn

from hotloop.generators import OwnedGenerators
from hotloop.parallel.world import World
from hotloop.rng import seed_for
from hotloop.task import Task

_NEAR = 64
"""Objects whose attributes are compared after each span of steps, for new generators; the comparison takes 0.3 us each."""


class StepGenerators:
    """Sets the generators of model, loss and step, and those of optimizer and schedule, from the seed of each step.

    Attributes:
        of_batch: those that compute a batch: each rank draws numbers of its own for its rows.
        of_update: those that update the weights: all ranks draw the same numbers.
    """

    def __init__(self, task: Task, model: nn.Module, optimizer: Any, schedule: Any, world: World) -> None:
        self.of_batch = OwnedGenerators(task.owners(model), near=_NEAR)
        self.of_update = OwnedGenerators({"optimizer": optimizer, "schedule": schedule}, near=_NEAR)
        self._world = world
        self._late: list[str] = []
        self._is_first = True
        self.refresh()

    def refresh(self) -> None:
        """Finds generators that are new."""
        self.of_batch.refresh()
        self.of_update.refresh()

    def seed(self, seed: int) -> None:
        """Sets all generators from the seed of a step."""
        rank = self._world.rank
        self.of_batch.seed(seed_for(seed, "rank", rank) if rank else seed)
        self.of_update.seed(seed)

    def note_late(self) -> None:
        """Notes generators that steps made since the last call of `refresh`."""
        for owned in (self.of_batch, self.of_update):
            self._late += owned.found_late(thorough=self._is_first)
        self._is_first = False

    def take_late(self) -> list[str]:
        """Paths of the generators that steps made, since the last call."""
        late, self._late, self._is_first = self._late, [], False
        return late
