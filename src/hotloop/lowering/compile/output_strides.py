"""What torch's compiler leaves to PyTorch: it believes what PyTorch says of where a result lies in memory, which isn't always true.

`replication_pad2d_backward`, say, promises a gradient in order, and gives one whose channels come last where those of the image
do (torch 2.13). A compiled step that looks at it then fails, and a package, which doesn't, computes with other numbers. torch can go by
content itself (`generate_fake_kernels_from_real_mismatches`), but of a whole trace, with all of it in memory.
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

StrideRequests = dict[str, Any]
"""Results of operations, without content, by these and what they were given."""


@contextmanager
def use_real_output_strides() -> Iterator[None]:
    """Meanwhile such operations of a CPU, where they only compute, run on zeros that lie as their operands will, to see where
    their results do."""
    from torch._inductor import ir  # the compiler, which takes seconds to import

    asked: StrideRequests = {}

    def seeing(process: Any) -> Any:
        def processed(cls: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
            return process.__func__(cls, _infer_result(kernel, asked) if _is_pure(kernel) else kernel, *args, **kwargs)

        return classmethod(processed)

    with patch_attribute(ir.ExternKernel, "process_kernel", seeing):
        yield


@contextmanager
def keep_rng_layout() -> Iterator[None]:
    """Meanwhile what draws numbers in the shape of a tensor gets it as it lies in the eager step, in whose order it draws.

    A compiler lays the result of a convolution otherwise, and `randn_like` of that has the same numbers elsewhere.
    """
    from torch._inductor import graph
    from torch._inductor.lowering import constrain_to_fx_strides

    def held(constraint_of: Callable[..., Any]) -> Callable[..., Any]:
        def constraint(operation: Any) -> Any:
            drawn = isinstance(operation, OpOverload) and operation.overloadpacket in _RNG_SOURCE_OPS
            return constrain_to_fx_strides if drawn else constraint_of(operation)

        return constraint

    with patch_attribute(graph, "maybe_layout_constraints", held):
        yield


_RNG_LIKE_OPS = (
    "rand_like",
    "randn_like",
    "randint_like",
    "bernoulli",
    "normal",
    "poisson",
    "binomial",
    "_standard_gamma",
)
_RNG_SOURCE_OPS = {getattr(torch.ops.aten, name) for name in _RNG_LIKE_OPS}


def _is_pure(kernel: Any) -> bool:
    """Whether it is torch's own and writes to nothing; what others do besides isn't known."""
    return isinstance(kernel, OpOverload) and kernel.namespace == "aten" and not kernel._schema.is_mutable


def _infer_result(kernel: OpOverload, asked: StrideRequests) -> Callable[..., Any]:
    """The operation on tensors without content, whose result lies as that of tensors with content does."""

    def run(*args: Any, **kwargs: Any) -> Any:
        said = kernel(*args, **kwargs)
        if is_random_op(kernel, args, kwargs) or not _is_inferable(args, kwargs):
            return said
        given = tree_map_only(Tensor, _call_key, (args, kwargs))
        place = f"{kernel} {given}"
        if place not in asked:
            asked[place] = _computed_result(kernel, args, kwargs)
        try:
            return tree_map(_with_strides, said, asked[place])
        except ValueError:  # it has no result of zeros
            return said

    return run


def _is_inferable(args: Any, kwargs: Any) -> bool:
    """Whether there are tensors among them, all on the CPU and of known sizes, and nothing but tensors and plain values."""
    leaves = [one for one in tree_leaves((args, kwargs)) if not isinstance(one, _PLAIN)]
    return bool(leaves) and all(
        isinstance(one, Tensor) and one.device.type == "cpu" and _has_known_size(one) for one in leaves
    )


_PLAIN = (type(None), int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _has_known_size(value: Tensor) -> bool:
    return value.layout == torch.strided and all(isinstance(one, int) for one in (*value.shape, *value.stride()))


def _call_key(value: Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), value.stride(), value.dtype


def _computed_result(kernel: OpOverload, args: Any, kwargs: Any) -> Any:
    """Of zeros, without its content; None if there is none."""
    try:
        with _disable_current_modes(), no_python_dispatcher(), torch.no_grad():
            result = kernel(*tree_map_only(Tensor, _zeros, args), **tree_map_only(Tensor, _zeros, kwargs))
            return tree_map_only(Tensor, _without_content, result)
    except (
        Exception
    ):  # zeros are not for every operation, such as a factorisation; then torch's word is taken, as without this
        return None


def _without_content(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _zeros(value: Tensor) -> Tensor:
    """With content, and laid out alike."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu").zero_()


def _with_strides(said: Any, there: Any) -> Any:
    """What was said of a result, with the strides of one that is there."""
    both = isinstance(said, Tensor) and isinstance(there, Tensor) and _has_known_size(said)
    if not both or said.shape != there.shape or significant_strides(said) == significant_strides(there):
        return said
    return said.new_empty_strided(said.shape, there.stride())


def significant_strides(value: Tensor) -> list[int]:
    """Of dimensions that have any."""
    return [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1]
