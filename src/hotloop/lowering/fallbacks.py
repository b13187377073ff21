"""What torch's compiler leaves to PyTorch: it believes what PyTorch says of where a result lies in memory, which isn't always true.

`replication_pad2d_backward`, say, promises a gradient in order, and gives one whose channels come last where those of the image
do (torch 2.13). A compiled step that looks at it then fails, and a package, which doesn't, computes with other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import no_python_dispatcher
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map, tree_map_only

from hotloop.patches import patched


@contextmanager
def laid_as_computed() -> Iterator[None]:
    """Meanwhile each such operation of the CPU runs once, on zeros that lie as its operands will, to see where its result does."""
    from torch._inductor import ir  # the compiler, which takes seconds to import

    with patched(ir.ExternKernel, "process_kernel", _told_by_itself):
        yield


def _told_by_itself(process: Any) -> Any:
    def processed(cls: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        told = _told(kernel) if _harmless(kernel) else kernel
        return process.__func__(cls, told, *args, **kwargs)

    return classmethod(processed)


def _harmless(kernel: Any) -> bool:
    """Whether running it changes nothing."""
    draws = torch.Tag.nondeterministic_seeded
    return isinstance(kernel, OpOverload) and not kernel._schema.is_mutable and draws not in kernel.tags


def _told(kernel: OpOverload) -> Callable[..., Any]:
    """The operation on tensors without content, whose result lies as that of tensors with content does."""

    def run(*args: Any, **kwargs: Any) -> Any:
        said = kernel(*args, **kwargs)
        try:
            with _disable_current_modes(), no_python_dispatcher(), torch.no_grad():
                there = kernel(*tree_map_only(Tensor, _zeros, args), **tree_map_only(Tensor, _zeros, kwargs))
        except Exception:  # of zeros it may have no result; of sizes that follow from a batch nothing is known
            return said
        return tree_map(_laid_as, said, there)

    return run


def _zeros(value: Tensor) -> Tensor:
    """With content, and laid out alike."""
    if value.device.type != "cpu":
        raise NotImplementedError("only a CPU computes while something is compiled")
    if not all(isinstance(number, int) for number in (*value.shape, *value.stride())):
        raise NotImplementedError("a size isn't known")
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_()


def _laid_as(said: Any, there: Any) -> Any:
    """What was said of a result, with the strides of one that is there."""
    if not isinstance(said, Tensor) or said.shape != there.shape or _strides(said) == _strides(there):
        return said
    return said.new_empty_strided(said.shape, there.stride())


def _strides(value: Tensor) -> list[int]:
    """Of dimensions that have any."""
    return [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1]
