"""Which modules of a network are given the same input, as heads are, and which one another's outputs, as layers are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from hotloop.profiling.naming import Place
from hotloop.profiling.unseen import unseen


@unseen
class Inputs:
    """Of the modules that were called in one step; it keeps none of the inputs alive."""

    def __init__(self) -> None:
        self._given: defaultdict[tuple, dict[int, Place]] = defaultdict(dict)

    def note(self, place: Place, inside: Place | None, args: tuple) -> None:
        """A module is called, inside of another one's forward."""
        first = args[0] if args else None
        if inside is None or not isinstance(first, Tensor):
            return
        # There may be no memory, as of what torch.func maps; the script's modes hear nothing.
        with suppress(RuntimeError, NotImplementedError), torch._C.DisableTorchFunction():
            memory = StorageWeakRef(first.untyped_storage())  # which no other tensor gets as long as this is there
            # What was written there since is another input, as in a stack of layers that add to one tensor.
            self._given[id(inside), place.kind, memory, first._version][id(place)] = place

    def alike(self) -> Iterator[tuple[Place, int]]:
        """Each of several modules of a kind that were given the same memory, and how many they are."""
        for places in self._given.values():
            if len(places) > 1:
                yield from ((place, len(places)) for place in places.values())
