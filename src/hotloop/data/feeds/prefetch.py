"""Batches on their way to an accelerator: the next one is copied while the present one is computed with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from hotloop.data.batch_tree import map_tensors, to_device, tree_tensors

T = TypeVar("T")


def iterate_ahead(items: Iterable[T]) -> Iterator[T]:
    """The same items; each is asked for before the one before it is handed out.

    An error is raised where it belongs: after the items that came before it were handed out.
    """
    source = iter(items)
    held: list[T] = []
    while True:
        try:
            item = next(source)
        except StopIteration:
            yield from held
            return
        except Exception:
            yield from held
            raise
        yield from held
        held = [item]


class DeviceCopy:
    """Copies batches to a device in the order of its other work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def begin(self, batch: Any) -> Any:
        """Starts the copy of a batch; what `end` takes."""
        return to_device(batch, self.device)

    def end(self, begun: Any) -> Any:
        """The batch, ready for what is computed next."""
        return begun


class SideStreamCopy(DeviceCopy):
    """Copies batches to a CUDA device from pinned memory, beside what it computes."""

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
            tensor.record_stream(computing)  # or its memory would be given away while it is still computed with
        return moved


def _pin(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_cuda or tensor.is_pinned() else tensor.pin_memory()


def prefetch_to_device(batches: Iterable[tuple[Any, ...]], device: torch.device) -> Iterator[tuple[Any, ...]]:
    """The same tuples, the first item of each moved to `device`, one ahead of those that are asked for."""
    copy = SideStreamCopy(device) if device.type == "cuda" else DeviceCopy(device)
    for begun, *rest in iterate_ahead((copy.begin(batch), *rest) for batch, *rest in batches):
        yield copy.end(begun), *rest
