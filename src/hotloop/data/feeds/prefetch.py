"""Copies the next batch to an accelerator while the device computes the present batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from hotloop.data.batch_tree import map_tensors, to_device, tree_tensors

T = TypeVar("T")


def iterate_ahead(items: Iterable[T]) -> Iterator[T]:
    """Yields the items; requests each item before it yields the item before.

    An error is raised after the items before it were yielded.
    """
    source = iter(items)
    pending: list[T] = []
    while True:
        try:
            item = next(source)
        except StopIteration:
            yield from pending
            return
        except Exception:
            yield from pending
            raise
        yield from pending
        pending = [item]


class DeviceCopy:
    """Copies batches to a device, in order with its other work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def begin(self, batch: Any) -> Any:
        """Starts the copy of a batch; returns the argument of `end`."""
        return to_device(batch, self.device)

    def end(self, begun: Any) -> Any:
        """Returns the batch, ready for the following computation."""
        return begun


class SideStreamCopy(DeviceCopy):
    """Copies batches from pinned memory to a CUDA device while the device computes."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)

    def begin(self, batch: Any) -> Any:
        pinned = map_tensors(_pin, batch)
        with torch.cuda.stream(self._stream):
            moved = to_device(pinned, self.device)
            done = self._stream.record_event()
        return moved, done

    def end(self, begun: Any) -> Any:
        moved, done = begun
        computing = torch.cuda.current_stream(self.device)
        computing.wait_event(done)
        for tensor in tree_tensors(moved):
            tensor.record_stream(computing)  # else the allocator may reuse its memory too early
        return moved


def _pin(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()


def prefetch_to_device(batches: Iterable[tuple[Any, ...]], device: torch.device) -> Iterator[tuple[Any, ...]]:
    """Yields the tuples with the first item moved to `device`, one tuple ahead."""
    copy = SideStreamCopy(device) if device.type == "cuda" else DeviceCopy(device)
    for begun, *rest in iterate_ahead((copy.begin(batch), *rest) for batch, *rest in batches):
        yield copy.end(begun), *rest
