"""Reads the strides of results that Inductor leaves to ATen kernels from the kernels instead of the meta kernels.

`replication_pad2d_backward` promises a contiguous gradient, and returns channels last for channels-last images (torch 2.13):
a compiled step then fails, and a package computes wrong numbers. torch's own `generate_fake_kernels_from_real_mismatches`
needs a whole trace in memory. Upstream: no issue for this kernel, pytorch/pytorch#144187 for another.
Test without the patch: `test_by_what_torch_says_it_reads_something_else`.
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
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from hotloop.core.patches import patch_attribute
from hotloop.lowering.compile.compiled_rng import is_random_op

StrideCache = dict[str, Any]
"""Results on the meta device, by operation and operands."""


@contextmanager
def use_real_output_strides() -> Iterator[None]:
    """Runs such operations on zeros with their operands' strides, if they run on the CPU and have no side effects."""
    from torch._inductor import ir

    cache: StrideCache = {}

    def with_real_strides(process: Any) -> Any:
        def processed(cls: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
            return process.__func__(cls, _infer_result(kernel, cache) if _is_pure(kernel) else kernel, *args, **kwargs)

        return classmethod(processed)

    with patch_attribute(ir.ExternKernel, "process_kernel", with_real_strides):
        yield


def _is_pure(kernel: Any) -> bool:
    """Whether an operation is torch's own, and mutates nothing; others may have side effects."""
    return isinstance(kernel, OpOverload) and kernel.namespace == "aten" and not kernel._schema.is_mutable


def _infer_result(kernel: OpOverload, cache: StrideCache) -> Callable[..., Any]:
    """Returns the operation on fake tensors, with the strides of its results on real tensors."""

    def run(*args: Any, **kwargs: Any) -> Any:
        promised = kernel(*args, **kwargs)
        if is_random_op(kernel, args, kwargs) or not _is_inferable(args, kwargs):
            return promised
        key = f"{kernel} {tree_map_only(Tensor, _call_key, (args, kwargs))}"
        if key not in cache:
            cache[key] = _computed_result(kernel, args, kwargs)
        try:
            return tree_map(_with_strides, promised, cache[key])
        except ValueError:  # the operation fails on zeros
            return promised

    return run


def _is_inferable(args: Any, kwargs: Any) -> bool:
    """Whether the operands are plain values and tensors of known sizes on the CPU, at least one."""
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if not isinstance(leaf, _PLAIN)]
    return bool(leaves) and all(
        isinstance(leaf, Tensor) and leaf.device.type == "cpu" and _has_known_size(leaf) for leaf in leaves
    )


_PLAIN = (type(None), int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _has_known_size(value: Tensor) -> bool:
    return value.layout == torch.strided and all(isinstance(size, int) for size in (*value.shape, *value.stride()))


def _call_key(value: Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), value.stride(), value.dtype


def _computed_result(kernel: OpOverload, args: Any, kwargs: Any) -> Any:
    """Returns the result for zeros, on the meta device; None if the operation fails, as a factorisation may."""
    try:
        with _disable_current_modes(), no_python_dispatcher(), torch.no_grad():
            result = kernel(*tree_map_only(Tensor, _zeros, args), **tree_map_only(Tensor, _zeros, kwargs))
            return tree_map_only(Tensor, _to_meta, result)
    except Exception:
        return None


def _to_meta(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _zeros(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu").zero_()


def _with_strides(promised: Any, real: Any) -> Any:
    """Returns the promised result with the real strides."""
    are_tensors = isinstance(promised, Tensor) and isinstance(real, Tensor) and _has_known_size(promised)
    if not are_tensors or promised.shape != real.shape or significant_strides(promised) == significant_strides(real):
        return promised
    return promised.new_empty_strided(promised.shape, real.stride())


def significant_strides(value: Tensor) -> list[int]:
    """Returns the strides of dimensions with more than one element."""
    return [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1]
