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

    def find_late(self) -> list[str]:
        """A line for each generator that steps made since the last call of `refresh`."""
        both = (self.of_batch, self.of_update)
        late = [path for owned in both for path in owned.found_late(thorough=self._is_first)]
        self._is_first = False
        return [
            f"a step makes the random generator {path}: what the first step of each process draws from it doesn't follow "
            "from the seed, so a resumed run may differ"
            for path in late
        ]
