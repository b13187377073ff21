"""Turns the numbers that a captured step reads on the host into tensors on the device.

A captured step reads learning rates and the like by `.item()`. A CUDA graph would freeze the value, and can't wait for
the host. So each number stays a tensor, arithmetic on numbers becomes arithmetic on tensors, and operations get an
equivalent overload that takes tensors. Operations without such an overload are refused by name.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.fx import GraphModule, Interpreter

from hotloop.core.torch_private import OpOverload
from hotloop.errors import PlanError, describe_error
from hotloop.lowering.compile.capture import CapturedStep


def lift_scalars(captured: CapturedStep, total: Tensor | None = None, weight: int = 1) -> CapturedStep:
    """Returns the step without `.item()`; its numbers are tensors of shape (), float64, on the device.

    Args:
        total: a sum to which the step adds its loss, `weight` times; becomes the graph's last input.

    Raises:
        PlanError: an operation on a number has no form for tensors.
    """
    mode: Any = captured.examples[0].fake_mode  # type: ignore[attr-defined]
    further = [] if total is None else [mode.from_tensor(total, static_shapes=True)]

    def run(*flat: Tensor) -> Any:
        outputs = ScalarLifter(captured.graph).run(*flat[: len(captured.examples)])
        for extra in flat[len(captured.examples) :]:
            extra.add_(outputs[0], alpha=weight)
        return outputs

    try:
        graph = captured.retraced(run, *further)
    except PlanError:
        raise
    except Exception as error:
        raise _unsupported_error(describe_error(error)) from error
    return replace(captured, graph=graph, examples=[*captured.examples, *further])


class DeviceScalar:
    """A number on the device: arithmetic becomes arithmetic on a tensor of shape (), float64."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self._cast: dict[torch.dtype, Tensor] = {}

    def to(self, dtype: torch.dtype) -> Tensor:
        if dtype not in self._cast:
            self._cast[dtype] = self.value.to(dtype)
        return self._cast[dtype]


def _arithmetic(function: Callable[..., Tensor], *operands: Any) -> DeviceScalar:
    return DeviceScalar(function(*(value.value if isinstance(value, DeviceScalar) else value for value in operands)))


_PYTHON_OPERATORS: dict[Any, Callable[..., Tensor]] = {
    **{op: op for op in (operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.neg)},
    torch.sym_float: lambda value: value,
    torch.sym_sqrt: torch.sqrt,
}
"""Python's operations on numbers, with their equivalents for tensors."""


class ScalarLifter(Interpreter):
    """Interpreter of a captured graph whose numbers are tensors."""

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
    """Returns `add.Tensor` for `aten.add_.Tensor`: in-place and out-of-place operations have the same form."""
    if not isinstance(target, OpOverload):
        return getattr(target, "__name__", str(target))
    return f"{target.overloadpacket.__name__.rstrip('_')}.{target._overloadname}"


def _overload(op: OpOverload, overload: str, name: str | None = None) -> Callable[..., Any]:
    """Returns another overload of the operation, or of the named one; in place if `op` is."""
    current = op.overloadpacket.__name__
    name = current if name is None else name + "_" * current.endswith("_")
    return getattr(getattr(torch.ops.aten, name), overload)


def _as_dtype_of(number: Any, value: Tensor) -> Any:
    return number.to(value.dtype) if isinstance(number, DeviceScalar) else number


def _scalar_tensors(numbers: Any, values: list[Tensor]) -> list[Tensor]:
    """Returns a tensor of shape () for each of `values`; `numbers` is one number for all, or one each."""
    per_value = numbers if isinstance(numbers, list | tuple) else [numbers] * len(values)
    return [
        number.to(value.dtype) if isinstance(number, DeviceScalar) else value.new_full((), number)
        for number, value in zip(per_value, values, strict=True)
    ]


def _scale(value: Any, number: Any) -> Any:
    """Multiplies a tensor by a number, or a list of tensors by one number or one each."""
    if isinstance(value, Tensor):
        return value * _as_dtype_of(number, value)
    if isinstance(number, DeviceScalar):
        return torch._foreach_mul(value, number.to(value[0].dtype))
    return torch._foreach_mul(value, _scalar_tensors(number, value))


# --- equivalents of `op` that take tensors in place of numbers


def _scaled_binary(op: OpOverload, value: Tensor, other: Any, alpha: Any = 1) -> Any:
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
"""Equivalent forms by operation and overload, in place or not."""


def _unsupported_error(why: str) -> PlanError:
    return PlanError(
        f"the step can't become a CUDA graph: {why}",
        expected="operations on tensors that need nothing from the host",
        fix="choose graphs=none, or another optimizer",
    )
