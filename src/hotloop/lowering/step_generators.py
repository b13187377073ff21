"""The random generators in the parts of a training step; hotloop seeds these generators before each step."""

from __future__ import annotations

from typing import Any

from torch import nn

from hotloop.core.random.generators import OwnedGenerators
from hotloop.core.random.rng import seed_for
from hotloop.distributed.world import World
from hotloop.task import Task

_NEAREST_OBJECTS = 64
"""Number of objects whose attributes are compared after each span of steps; one comparison takes 0.3 us."""


class StepGenerators:
    """Seeds the generators of model, loss, step, optimizer and schedule from the seed of each step.

    Attributes:
        of_batch: generators of model, loss and step. Each rank draws its own numbers for its rows.
        of_update: generators of optimizer and schedule. All ranks draw the same numbers.
    """

    def __init__(self, task: Task, model: nn.Module, optimizer: Any, schedule: Any, world: World) -> None:
        self.of_batch = OwnedGenerators(task.owners(model), near=_NEAREST_OBJECTS)
        self.of_update = OwnedGenerators({"optimizer": optimizer, "schedule": schedule}, near=_NEAREST_OBJECTS)
        self._world = world
        self._is_first = True
        self.refresh()

    def refresh(self) -> None:
        self.of_batch.refresh()
        self.of_update.refresh()

    def seed(self, seed: int) -> None:
        rank = self._world.rank
        self.of_batch.seed(seed_for(seed, "rank", rank) if rank else seed)
        self.of_update.seed(seed)

    def find_late(self) -> list[str]:
        """Returns a line for each generator that steps created since the last call of `refresh`."""
        both = (self.of_batch, self.of_update)
        late = [path for owned in both for path in owned.late_finds(thorough=self._is_first)]
        self._is_first = False
        return [
            f"a step makes the random generator {path}: what the first step of each process draws from it doesn't follow "
            "from the seed, so a resumed run may differ"
            for path in late
        ]
