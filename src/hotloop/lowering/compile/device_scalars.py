"""Turns the numbers that a captured step reads on the host into tensors on the device.

A captured step asks for learning rates and the like by `.item()`. A CUDA graph would hold fast what it was told when it
was recorded, and can't wait for the host. So each such number stays a tensor, arithmetic on it becomes that of
tensors, and an operation that takes it as a plain number gets it by an equal form that takes tensors. What has no such
form is refused by its name.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Interpreter

from hotloop.errors import PlanError, describe_error
from hotloop.lowering.compile.capture import CapturedStep


def lift_scalars(captured: CapturedStep, total: Tensor | None = None, weight: int = 1) -> CapturedStep:
    """The same step without `.item()`; its numbers are tensors of shape (), float64, on the device.

    Args:
        total: what the step adds its loss to, `weight` times; the last that the graph takes, if it does.

    Raises:
        PlanError: it does something with a number that has no form for tensors.
    """
    mode: Any = captured.examples[0].fake_mode  # type: ignore[attr-defined]
    further = [] if total is None else [mode.from_tensor(total, static_shapes=True)]

    def run(*flat: Tensor) -> Any:
        found = ScalarLifter(captured.graph).run(*flat[: len(captured.examples)])
        for one in flat[len(captured.examples) :]:
            one.add_(found[0], alpha=weight)
        return found

    try:
        graph = captured.retraced(run, *further)
    except PlanError:
        raise
    except Exception as error:
        raise _unsupported_error(describe_error(error)) from error
    return replace(captured, graph=graph, examples=[*captured.examples, *further])


class DeviceScalar:
    """A number that only the device knows: arithmetic on it is arithmetic on a tensor of shape (), float64."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self._cast: dict[torch.dtype, Tensor] = {}

    def to(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._cast:
            self._cast[dtype] = self.value.to(dtype)
        return self._cast[dtype]


def _arithmetic(function: Callable[..., Tensor], *operands: Any) -> DeviceScalar:
    return DeviceScalar(function(*(one.value if isinstance(one, DeviceScalar) else one for one in operands)))


_PYTHON_OPERATORS: dict[Any, Callable[..., Tensor]] = {
    operator.add: operator.add,
    operator.sub: operator.sub,
    operator.mul: operator.mul,
    operator.truediv: operator.truediv,
    operator.pow: operator.pow,
    operator.neg: operator.neg,
    torch.sym_float: lambda value: value,
    torch.sym_sqrt: torch.sqrt,
}
"""What Python does with numbers, and what that is for tensors."""


class ScalarLifter(Interpreter):
    """Runs a captured graph with its numbers as tensors."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # errors stay one line

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is torch.ops.aten._local_scalar_dense.default:
            return DeviceScalar(args[0].to(torch.float64))
        if not any(isinstance(leaf, DeviceScalar) for leaf in pytree.tree_leaves((args, kwargs))):
            return super().call_function(target, args, kwargs)
        if target in _PYTHON_OPERATORS:
            return _arithmetic(_PYTHON_OPERATORS[target], *args)
        form = _OVERLOADS.get(_base_name(target)) if isinstance(target, OpOverload) else None
        if form is None:
            raise _unsupported_error(f"{_base_name(target)} takes a number that changes from step to step")
        return form(target, *args, **kwargs)


def _base_name(target: Any) -> str:
    """`add.Tensor` of `aten.add_.Tensor`: an operation in place has the form of the one that isn't."""
    if not isinstance(target, OpOverload):
        return getattr(target, "__name__", str(target))
    return f"{target.overloadpacket.__name__.rstrip('_')}.{target._overloadname}"


def _overload(op: OpOverload, overload: str, name: str | None = None) -> Callable[..., Any]:
    """Another overload of an operation, or of the operation of that name; in place if `op` is."""
    own = op.overloadpacket.__name__
    name = own if name is None else name + "_" * own.endswith("_")
    return getattr(getattr(torch.ops.aten, name), overload)


def _as_dtype_of(number: Any, value: Tensor) -> Any:
    """A number as a tensor of the dtype of `value`, which it meets."""
    return number.to(value.dtype) if isinstance(number, DeviceScalar) else number


def _scalar_tensors(numbers: Any, values: list[Tensor]) -> list[Tensor]:
    """A tensor of shape () for each of `values`; `numbers` are as many, or one for all."""
    every = numbers if isinstance(numbers, list | tuple) else [numbers] * len(values)
    return [
        one.to(value.dtype) if isinstance(one, DeviceScalar) else value.new_full((), one)
        for one, value in zip(every, values, strict=True)
    ]


def _scale(value: Any, number: Any) -> Any:
    """A tensor times a number; or a list of them, times one number or one each."""
    if isinstance(value, Tensor):
        return value * _as_dtype_of(number, value)
    if isinstance(number, DeviceScalar):
        return torch._foreach_mul(value, number.to(value[0].dtype))
    return torch._foreach_mul(value, _scalar_tensors(number, value))


# --- forms: each does what `op` does, with tensors where that has numbers


def _scaled_binary(op: OpOverload, value: Tensor, other: Any, alpha: Any = 1) -> Any:
    """`value + alpha * other` and the like."""
    if isinstance(alpha, DeviceScalar):
        other = _scale(other, alpha) if isinstance(other, Tensor) else _arithmetic(operator.mul, other, alpha)
        alpha = 1
    return _overload(op, "Tensor")(value, _as_dtype_of(other, value), **({} if alpha == 1 else {"alpha": alpha}))


def _reversed_subtract(op: OpOverload, value: Tensor, other: Any, alpha: Any = 1) -> Tensor:
    return _as_dtype_of(other, value) - _scale(value, alpha)


def _power_of(op: OpOverload, base: Any, exponent: Tensor) -> Any:
    return torch.pow(_as_dtype_of(base, exponent), exponent)


def _to_power(op: OpOverload, base: Tensor, exponent: Any) -> Any:
    in_place = op.overloadpacket.__name__.endswith("_")
    return (base.pow_ if in_place else base.pow)(_as_dtype_of(exponent, base))


def _product(op: OpOverload, start: Tensor, one: Tensor, other: Tensor, *, value: Any) -> Any:
    return op(start, _scale(one, value), other)


def _lerp(op: OpOverload, value: Tensor, end: Tensor, weight: Any) -> Any:
    return _overload(op, "Tensor")(value, end, _as_dtype_of(weight, value))


def _foreach_binary(op: OpOverload, values: list[Tensor], others: list[Tensor], *, alpha: Any) -> Any:
    return op(values, _scale(others, alpha))


def _foreach_scalar(op: OpOverload, values: list[Tensor], number: Any) -> Any:
    return _overload(op, "Tensor")(values, _as_dtype_of(number, values[0]))


def _foreach_subtract(op: OpOverload, values: list[Tensor], number: Any) -> Any:
    return _overload(op, "Tensor", "_foreach_add")(values, _as_dtype_of(_arithmetic(operator.neg, number), values[0]))


def _foreach_scalars(op: OpOverload, values: list[Tensor], numbers: Any) -> Any:
    return _overload(op, "List")(values, _scalar_tensors(numbers, values))


def _foreach_powers(op: OpOverload, base: Any, exponents: list[Tensor]) -> Any:
    return torch._foreach_pow(_scalar_tensors(base, exponents), exponents)


def _foreach_products(
    op: OpOverload, values: list[Tensor], ones: list[Tensor], others: list[Tensor], numbers: Any
) -> Any:
    return _overload(op, "Scalar")(values, _scale(ones, numbers), others)


def _foreach_lerp(op: OpOverload, values: list[Tensor], ends: list[Tensor], weight: Any) -> Any:
    return _overload(op, "List", "_foreach_add")(values, _scale(torch._foreach_sub(ends, values), weight))


_OVERLOADS: dict[str, Callable[..., Any]] = {
    **{
        f"{name}.{overload}": _scaled_binary
        for name in ("add", "sub", "mul", "div")
        for overload in ("Tensor", "Scalar")
    },
    "rsub.Scalar": _reversed_subtract,
    "pow.Scalar": _power_of,
    "pow.Tensor_Scalar": _to_power,
    "lerp.Scalar": _lerp,
    "addcmul.default": _product,
    "addcdiv.default": _product,
    "_foreach_add.List": _foreach_binary,
    "_foreach_sub.List": _foreach_binary,
    **{f"_foreach_{name}.Scalar": _foreach_scalar for name in ("add", "mul", "div")},
    "_foreach_sub.Scalar": _foreach_subtract,
    "_foreach_pow.Scalar": _foreach_scalars,
    **{f"_foreach_{name}.ScalarList": _foreach_scalars for name in ("add", "sub", "mul", "div", "pow")},
    "_foreach_pow.ScalarAndTensor": _foreach_powers,
    **{
        f"_foreach_{name}.{how}": _foreach_products
        for name in ("addcmul", "addcdiv")
        for how in ("Scalar", "ScalarList")
    },
    "_foreach_lerp.Scalar": _foreach_lerp,
}
"""By operation and overload, whether in place or not."""


def _unsupported_error(why: str) -> PlanError:
    return PlanError(
        f"the step can't become a CUDA graph: {why}",
        expected="operations on tensors that need nothing from the host",
        fix="choose graphs=none, or another optimizer",
    )
