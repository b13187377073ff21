"""Calls the Task's functions on the inputs of batches, with seeded random generators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hotloop.core.random.generators import OwnedGenerators
from hotloop.data.batch_tree import apply_to_inputs, map_tensors
from hotloop.errors import call_user_code


class BatchFunction:
    """A function of the Task on the inputs of batches; errors contain its `name`."""

    def __init__(self, name: str, function: Any) -> None:
        self._name, self._function = name, function
        self._owned = OwnedGenerators({name: function})
        self._is_first = True

    def __call__(self, batch: Any, seed: Callable[[], int], *further: Callable[[], Any]) -> Any:
        """Returns the batch with its inputs replaced by the function's result.

        Args:
            seed: seeds the global generators, and returns the seed of the function's own generators.
            further: functions that return the function's other arguments.
        """
        spare = map_tensors(torch.clone, batch) if self._is_first else None
        result = self._apply(batch, seed, further)
        if self._is_first and self._owned.late_finds():  # the first call may create generators
            result = self._apply(spare, seed, further)
        self._is_first = False
        return result

    def _apply(self, batch: Any, seed: Callable[[], int], further: tuple[Callable[[], Any], ...]) -> Any:
        self._owned.refresh()
        self._owned.seed(seed())
        return apply_to_inputs(
            lambda inputs: call_user_code(self._name, self._function, inputs, *(make() for make in further)), batch
        )
