"""The step in float64, the reference for other ways to run it.

It uses fp32's random numbers. A dispatch mode checks that each result that depends on parameters or inputs stays
float64.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.core.random.rng import preserve_generators
from hotloop.core.state import State
from hotloop.core.torch_private import ReadOnlyDispatchMode, tree_leaves, tree_map_only
from hotloop.data.batch_tree import map_tensors
from hotloop.data.feeds.feed import Feed
from hotloop.lowering.compile.compiled_rng import is_random_op
from hotloop.lowering.context import LoweringContext, move_to_device
from hotloop.lowering.eager_step import EagerStep
from hotloop.lowering.grouped_mm import float64_operation
from hotloop.lowering.program import Program
from hotloop.plan import Plan
from hotloop.task import StepResult, Task

_FACTORIES = ("rand", "randn", "normal")
"""Random operations without a tensor argument, of the default dtype."""

_WIDE = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}
_SINGLE_DTYPES = (torch.float32, torch.complex64)
"""Dtypes that a Task names when it means the dtype of its numbers."""

_COPYING_OPS = (torch.ops.aten.lift_fresh.default,)
"""Returns the tensor of `torch.tensor(...)` unchanged."""

_CUT_OFF_OPS = tuple(
    getattr(torch.ops.aten, name)
    for name in ("floor", "ceil", "round", "trunc", "frac", "sign", "floor_divide", "remainder", "fmod")
)
"""Operations that jump where rounding moves a number across an integer."""

_DRAWING_OPS = ("rrelu", "_scaled_dot_product", "_fused", "_cudnn", "miopen", "mkldnn")
"""Operations that compute with the random numbers that they draw."""

_NARROW = {torch.float64: torch.float32, torch.complex128: torch.complex64}


def lower_in_float64(task: Task, device: torch.device) -> Program:
    """Lowers the Task's step in float64.

    Raises:
        TaskError, RuntimeError: model or loss can't be converted to float64.
    """
    with preserve_generators():
        parts = move_to_device(LoweringContext.from_task(task, Plan(device=str(device))), device)
        for module in (parts.model, parts.task.loss):
            if isinstance(module, nn.Module):
                module._apply(_to_wide)  # module.double() leaves complex numbers as they are
        return _Float64Program(parts, Float64Step(parts), _NoFeed())


class _NoFeed(Feed):
    batches = None
    reseeds = True

    def epoch(self, epoch: int, start: int = 0) -> Iterator[tuple[Any, int]]:
        raise NotImplementedError

    def close(self) -> None:
        pass


class _Float64Program(Program):
    def restore(self, state: State) -> None:
        super().restore(_state_in_float64(state))


class _WidenedTensors(Mapping[str, Any]):
    """Converts one tensor at a time to float64: all at once take twice the State's memory."""

    def __init__(self, tensors: Mapping[str, Any], but: str = "") -> None:
        self._tensors, self._but = tensors, but

    def __getitem__(self, name: str) -> Any:
        value = self._tensors[name]
        if not isinstance(value, dict):
            return _widen_tree(value)
        return {key: one if key == self._but else _widen_tree(one) for key, one in value.items()}

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _state_in_float64(state: State) -> State:
    """Returns a State with all computed numbers in float64; an optimizer's step counts stay as they are."""
    optimizer = dict(state.optimizer)
    if optimizer:
        optimizer["state"] = _WidenedTensors(optimizer["state"], but="step")
    wide: Any = {part: _WidenedTensors(getattr(state, part)) for part in ("parameters", "buffers", "average", "loss")}
    return replace(state, optimizer=optimizer, **wide)


def _to_wide(value: Tensor) -> Tensor:
    return value.to(_WIDE.get(value.dtype, value.dtype))


def _to_narrow(value: Tensor) -> Tensor:
    return value.to(_NARROW.get(value.dtype, value.dtype))


def _to_wide_single(value: Tensor) -> Tensor:
    return _to_wide(value) if value.dtype in _SINGLE_DTYPES else value


def _request_wide(kwargs: Any) -> Any:
    """Replaces a requested fp32, as for logits or in a norm, by float64: in fp32 such a cast does nothing."""
    return {**kwargs, "dtype": _WIDE[kwargs["dtype"]]} if kwargs.get("dtype") in _SINGLE_DTYPES else kwargs


def _widen_single(tree: Any) -> Any:
    return tree_map_only(Tensor, _to_wide_single, tree)


def _replace_tensors(unchanged: Sequence[Tensor], change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    return tree_map_only(Tensor, lambda value: value if any(value is one for one in unchanged) else change(value), tree)


def _widen_tree(tree: Any) -> Any:
    return map_tensors(_to_wide, tree)


class Float64Step(EagerStep):
    """One training step in float64.

    Attributes:
        watch: the check of its operations.
    """

    def __init__(self, parts: LoweringContext) -> None:
        super().__init__(parts)
        self.watch = Float64Check(parts.model)

    def _compute(self, batch: Any) -> StepResult:
        exact = _widen_tree(batch)  # outside the check, which would take the batch for constants
        with self.watch.check_step():
            return super()._compute(exact)

    def _backward_of(self, loss: Tensor) -> None:
        with self.watch.check_step():  # activation checkpointing draws again in backward
            super()._backward_of(loss)

    def _update(self) -> None:
        with self.watch.check_update(self.optimizer):
            super()._update()

    def _closure_step(self, batch: Any, samples: int, step: int) -> StepResult:
        with self.watch.check_update(self.optimizer):
            return super()._closure_step(batch, samples, step)


class Float64Check(ReadOnlyDispatchMode):
    """Checks that each operation of a step computes in float64.

    Attributes:
        narrowed: the module or the optimizer that first returned fewer bits from float64, and the operation.
        draws: whether model or loss drew random numbers.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.narrowed: str | None = None
        self.draws = False
        self._model = model
        self._modules: list[str] = []
        self._updating = False
        self._constants: dict[int, weakref.ref[Tensor]] = {}

    @contextmanager
    def check_step(self) -> Iterator[None]:
        """Checks model and loss, with float64 as the default dtype."""
        before = torch.get_default_dtype()
        with ExitStack() as stack:
            stack.enter_context(self._observe("the loss, or what surrounds the model,", updating=False))
            for name, module in self._model.named_modules():
                if isinstance(module, torch.jit.ScriptModule):
                    continue
                stack.callback(module.register_forward_pre_hook(self._enter(name, module)).remove)
                stack.callback(module.register_forward_hook(self._leave, always_call=True).remove)
            torch.set_default_dtype(torch.float64)
            stack.callback(torch.set_default_dtype, before)
            yield

    @contextmanager
    def check_update(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Checks the optimizer, whose step counts keep their default dtype; a closure may run model and loss."""
        with self._observe(f"the optimizer ({type(optimizer).__name__})", updating=True):
            yield

    @contextmanager
    def _observe(self, where: str, *, updating: bool) -> Iterator[None]:
        with nullcontext() if self._modules else self:
            before, depth = self._updating, len(self._modules)
            self._modules.append(where)
            self._updating = updating
            try:
                yield
            finally:
                del self._modules[depth:]
                self._updating = before
                if not depth:
                    self._constants = {key: known for key, known in self._constants.items() if known() is not None}

    def _enter(self, name: str, module: nn.Module) -> Callable:
        where = f"{name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        return lambda *_: self._modules.append(where)

    def _leave(self, *_: Any) -> None:
        if len(self._modules) > 1:  # another hook may have failed before `_enter`
            self._modules.pop()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        if is_random_op(function, args, kwargs):
            self.draws = self.draws or not self._updating
            if not name.startswith(_DRAWING_OPS):
                return _draw_in_float32(function, args, kwargs)
            self._note(f"draws inside of {name}, which float64 can't repeat")
        follows = function not in _COPYING_OPS and self._depends_on_batch(args)
        if self._updating:
            result = function(*args, **kwargs)
        elif function._schema.is_mutable:
            result = self._write(function, args, kwargs, follows)
        elif follows:
            kwargs = _request_wide(kwargs)
            wide = _widen_single(args) if _first_dtype(_SINGLE_DTYPES, args) else args
            result = float64_operation(function, wide)(*wide, **kwargs)
        else:
            return self._constant(function, args, kwargs)
        if follows and (dtype := _first_dtype(_WIDE, result)) is not None:
            self._note(f"turns float64 into {str(dtype).removeprefix('torch.')} ({name})")
        return result

    def _depends_on_batch(self, tree: Any) -> bool:
        """Checks whether a float64 number among them comes from parameters, inputs or draws."""
        if isinstance(tree, Tensor):
            return tree.dtype in _NARROW and not self._is_constant(tree)
        return isinstance(tree, list | tuple) and any(self._depends_on_batch(one) for one in tree)

    def _is_constant(self, value: Tensor) -> bool:
        known = self._constants.get(id(value)) if self._constants else None
        return known is not None and known() is value

    def _constant(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Computes a result of integers and constants alone, in float64 where the Task requests fp32.

        Comparisons and roundings to integers run in fp32: float64 might give other integers.
        """
        if function.is_view and function not in _COPYING_OPS:  # a float64 copy would be no view
            return self._record_constants(function(*args, **kwargs))
        if _first_dtype(_SINGLE_DTYPES, args):
            args = _widen_single(args)
        result = function(*args, **kwargs)
        cuts_off = function.overloadpacket in _CUT_OFF_OPS or kwargs.get("rounding_mode") or _has_integers(result)
        if cuts_off and _first_dtype(_NARROW, args) is not None:
            result = function(*tree_map_only(Tensor, _to_narrow, args), **kwargs)
        return self._record_constants(_widen_single(result))

    def _record_constants(self, result: Any) -> Any:
        for value in result if isinstance(result, list | tuple) else (result,):
            if isinstance(value, Tensor) and value.dtype in _NARROW:
                self._constants[id(value)] = weakref.ref(value)
        return result

    def _write(self, function: Any, args: Any, kwargs: Any, follows: bool) -> Any:
        """Runs an in-place operation; constants take the target's dtype, and a target that gets other numbers is no
        constant.
        """
        targets = _written_tensors(function, args, kwargs)
        if not follows and _first_dtype(_SINGLE_DTYPES, targets) is not None:
            args = _replace_tensors(targets, _to_narrow, args)
        elif _first_dtype(_NARROW, targets) is not None:
            args = _replace_tensors(targets, _to_wide_single, args)
        result = function(*args, **kwargs)
        if follows and self._constants:
            self._forget(targets)
        return result

    def _forget(self, targets: Sequence[Tensor]) -> None:
        places = {value.untyped_storage().data_ptr() for value in targets if value.layout == torch.strided}
        for key, known in list(self._constants.items()):
            value = known()
            if value is None or value.layout != torch.strided or value.untyped_storage().data_ptr() in places:
                del self._constants[key]

    def _note(self, what: str) -> None:
        self.narrowed = self.narrowed or f"{self._modules[-1]} {what}"


def _written_tensors(function: Any, args: Any, kwargs: Any) -> list[Tensor]:
    arguments = function._schema.arguments
    written = {argument.name for argument in arguments if argument.alias_info and argument.alias_info.is_write}
    values = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    return [value for name in written for value in tree_leaves(values.get(name)) if isinstance(value, Tensor)]


def _has_integers(result: Any) -> bool:
    tensors = (value for value in tree_leaves(result) if isinstance(value, Tensor))
    return any(not (value.is_floating_point() or value.is_complex()) for value in tensors)


def _first_dtype(dtypes: Collection[torch.dtype], tree: Any) -> torch.dtype | None:
    """Returns the first of these dtypes in the tree; faster than `tree_leaves`: a step has thousands of operations."""
    if isinstance(tree, Tensor):
        return tree.dtype if tree.dtype in dtypes else None
    if isinstance(tree, list | tuple):
        for value in tree:
            if (dtype := _first_dtype(dtypes, value)) is not None:
                return dtype
    return None


def _draw_in_float32(function: Any, args: Any, kwargs: Any) -> Any:
    """Draws the random numbers of fp32, as float64."""
    if function is torch.ops.aten.native_dropout.default:
        x, p, training = args
        kept = torch.ones_like(x, dtype=torch.float32)
        scaled, mask = function(kept, p, training)
        return x * scaled, mask
    dtype, takes_dtype = kwargs.get("dtype"), any(argument.name == "dtype" for argument in function._schema.arguments)
    if dtype in _NARROW:
        kwargs = {**kwargs, "dtype": _NARROW[dtype]}
    elif dtype is None and takes_dtype and function.overloadpacket.__name__ in _FACTORIES:
        kwargs = {**kwargs, "dtype": torch.float32}
    narrow = tree_map_only(Tensor, _to_narrow, args)
    result = function(*narrow, **kwargs)
    if function._schema.is_mutable:
        args[0].copy_(narrow[0])
        return args[0]
    return tree_map_only(Tensor, _to_wide, result)
