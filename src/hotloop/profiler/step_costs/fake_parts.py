"""Models and batches of fake tensors, which have shapes and no memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from hotloop.core.hardware.limits import free_memory_bytes
from hotloop.data.batch_tree import map_tensors, tree_tensors
from hotloop.data.row_count import count_rows
from hotloop.errors import InsufficientMemoryError, TaskError, call_user_code, describe_error, type_name

_SHARE = 0.7  # of the free memory that a real construction may take


def fake_model(model: nn.Module | Callable[[], nn.Module], mode: FakeTensorMode, notes: dict[str, None]) -> nn.Module:
    """Returns the model with fake parameters and buffers.

    A factory runs under the fake mode. If the factory reads values, the model is built in memory first.

    Raises:
        InsufficientMemoryError: the model must be built in memory, and free memory is too small.
    """
    if isinstance(model, nn.Module):
        return _fake_copy(model, mode)
    try:
        with mode:
            made = model()
    except Exception as error:
        try:
            with _MemoryLimit(int(_SHARE * free_memory_bytes(torch.device("cpu")))):
                made = call_user_code("the model factory", model)
        except _TooLarge:
            raise InsufficientMemoryError(
                f"the model can't be traced without memory ({describe_error(error)}), and is too large to be built here",
                expected="a factory that doesn't read tensors' values",
                fix="build the layers from shapes alone, or run on a machine with more memory",
            ) from None
        notes["the model was built in memory, because its factory reads values"] = None
    if not isinstance(made, nn.Module):
        raise TaskError(f"the model factory returned {type_name(made)}", expected="a torch.nn.Module")
    return made if _is_fake(made) else _fake_copy(made, mode)


def _is_fake(model: nn.Module) -> bool:
    return all(isinstance(value, FakeTensor) for value in [*model.parameters(), *model.buffers()])


def _fake_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Returns a copy that shares no memory: each parameter and buffer becomes one fake tensor, shared as before."""
    memo: dict[int, Any] = {}
    for value in [*model.parameters(), *model.buffers()]:
        if isinstance(value, FakeTensor):
            continue
        fake = mode.from_tensor(value.detach())
        memo[id(value)] = nn.Parameter(fake, value.requires_grad) if isinstance(value, nn.Parameter) else fake
    return copy.deepcopy(model, memo)


class _TooLarge(Exception):
    pass


class _MemoryLimit(TorchDispatchMode):
    """Stops a construction whose new tensors exceed a number of bytes."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__()
        self.left = most_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("empty", "empty_strided", "zeros", "ones", "randn", "rand", "full"):
            sizes = args[0] if args and isinstance(args[0], list | tuple) else [0]
            dtype = (kwargs or {}).get("dtype") or torch.get_default_dtype()
            self.left -= torch.Size(sizes).numel() * dtype.itemsize
            if self.left < 0:
                raise _TooLarge
        return func(*args, **(kwargs or {}))


def resize_batch(batch: Any, rows: int | None, mode: FakeTensorMode | None) -> tuple[Any, int]:
    """Returns the batch with `rows` rows, of fake tensors under a mode, and the number of its rows."""
    present = count_rows(batch).number
    rows = rows or present

    def resize(tensor: Tensor) -> Tensor:
        has_rows = tensor.ndim > 0 and tensor.shape[0] == present
        shape = (rows, *tensor.shape[1:]) if has_rows else tuple(tensor.shape)
        if mode is None:
            wanted = torch.arange(shape[0], device=tensor.device) % present if has_rows and rows != present else None
            return tensor.clone() if wanted is None else tensor[wanted]
        with mode:
            return torch.empty(shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad)

    return map_tensors(resize, batch), rows


def batch_bytes(batch: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tree_tensors(batch))


@contextmanager
def counted_modules(model: nn.Module) -> Iterator[list[int]]:
    """Yields a list whose first item is the number of module calls so far."""
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    handles = [module.register_forward_pre_hook(count) for module in model.modules()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
