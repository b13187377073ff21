"""Functions of the Task's on batches' inputs, with the random generators that they hold set for each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hotloop.data.tree import apply_to_inputs, map_tensors
from hotloop.errors import calling
from hotloop.generators import OwnedGenerators


class OnBatches:
    """One such function; `name` is what an error calls it."""

    def __init__(self, name: str, function: Any) -> None:
        self._name, self._function = name, function
        self._owned = OwnedGenerators({name: function})
        self._is_first = True

    def __call__(self, batch: Any, seed: Callable[[], int], *further: Callable[[], Any]) -> Any:
        """The batch with its inputs replaced by what the function makes of them.

        Args:
            seed: sets the global generators; returns what the function's own are set from.
            further: make the function's other arguments.
        """
        spare = map_tensors(torch.clone, batch) if self._is_first else None
        result = self._applied(batch, seed, further)
        if self._is_first and self._owned.found_late():  # the function makes its generators when it is called first
            result = self._applied(spare, seed, further)
        self._is_first = False
        return result

    def _applied(self, batch: Any, seed: Callable[[], int], further: tuple[Callable[[], Any], ...]) -> Any:
        self._owned.refresh()
        self._owned.seed(seed())
        return apply_to_inputs(
            lambda inputs: calling(self._name, self._function, inputs, *(make() for make in further)), batch
        )
