"""The optimizer axis: the implementation of the update: parameter by parameter, over lists, or as one kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from hotloop.core.task_parts.optimizers import member_optimizers
from hotloop.errors import PlanError
from hotloop.lowering.context import LoweringContext
from hotloop.plan import Plan
from hotloop.task import first_hooked_parameter

_FLAGS = {
    "forloop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}


def apply_optimizer(parts: LoweringContext) -> LoweringContext:
    """Switches the Task's optimizer to another implementation of the same update."""
    if parts.plan.optimizer == "default":
        return parts
    build, flags = parts.build_optimizer, _FLAGS[parts.plan.optimizer]

    def switched(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = build(model)
        for member in member_optimizers(optimizer):
            for group in member.param_groups:
                group.update({key: value for key, value in flags.items() if key in group})
            if flags["fused"]:
                _guard_fused(member, parts)
        return optimizer

    return replace(parts, build_optimizer=switched)


def _guard_fused(optimizer: torch.optim.Optimizer, parts: LoweringContext) -> None:
    """Avoids torch's fused kernels in steps that they don't support; see `_Fallback` and `lay_out_gradients`."""
    falls_back = isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad)
    # As the constructor would set it. If False, fp16's scaler unscales by itself, as the fallback's update needs.
    optimizer._step_supports_amp_scaling = not falls_back  # type: ignore[attr-defined]
    if falls_back:
        _count_on_device(optimizer)
        fallback = _Fallback(optimizer, parts.say)
        optimizer.register_step_pre_hook(fallback.before)
        optimizer.register_step_post_hook(fallback.after)
    if parts.plan.compile == "forward" or parts.plan.parallel != "none":
        optimizer.register_step_pre_hook(_match_strides)


def _count_on_device(optimizer: torch.optim.Optimizer) -> None:
    """Moves step counts that a constructor created, as Adagrad's does, to the device of the fused kernel."""
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(parameter.device)


class _Fallback:
    """Switches to the baseline's update, parameter by parameter, for steps that fused SGD or Adagrad don't support.

    These steps have sparse gradients, or only some parameters with momentum, as when a branch gives a parameter its
    first gradient late.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, say: Callable[[str], None]) -> None:
        self._has_momentum = isinstance(optimizer, torch.optim.SGD)
        self._say, self._reported, self._is_active = say, set[str](), False

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        why = self._why_unfit(optimizer)
        if why:
            self._switch(optimizer, fused=False)
        if why and why not in self._reported:
            self._reported.add(why)
            self._say(f"optimizer=fused: {why}, so such steps update parameter by parameter")

    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._is_active:
            self._switch(optimizer, fused=True)

    def _switch(self, optimizer: torch.optim.Optimizer, *, fused: bool) -> None:
        self._is_active = not fused
        for group in optimizer.param_groups:
            group["fused"] = fused

    def _why_unfit(self, optimizer: torch.optim.Optimizer) -> str:
        """Returns why this step can't be fused; empty if it can."""
        values = [value for group in optimizer.param_groups for value in group["params"]]
        if any(value.grad is not None and value.grad.is_sparse for value in values):
            return "there are sparse gradients"
        if not self._has_momentum or len(optimizer.state) == len(values):
            return ""
        is_mixed = any(any(flags) and not all(flags) for flags in _momentum_flags(optimizer))
        return "some parameters get their first gradient later than others" if is_mixed else ""


def _momentum_flags(optimizer: torch.optim.Optimizer) -> list[list[bool]]:
    """Returns for each group with momentum whether each parameter with a gradient has momentum already."""
    return [
        [
            optimizer.state.get(value, {}).get("momentum_buffer") is not None
            for value in group["params"]
            if value.grad is not None
        ]
        for group in optimizer.param_groups
        if group["momentum"] != 0
    ]


def _match_strides(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    lay_out_gradients(optimizer)


def lay_out_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Gives each gradient that a fused kernel reads the strides of its parameter: the kernel iterates over memory.

    Autograd's accumulation does the same; gradients from a captured step or from other ranks may have other strides.
    """
    for group in optimizer.param_groups:
        for value in group["params"] if group.get("fused") else ():
            gradient = value.grad
            if gradient is not None and not gradient.is_sparse and gradient.stride() != value.stride():
                value.grad = torch.empty_like(value, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


SUBNORMAL_INTERVAL = 128
"""Steps between two sweeps; a sweep takes about as long as reading and writing the optimizer's state once."""

_LIKE_FP32 = (torch.float32, torch.float64, torch.bfloat16)
"""Dtypes with numbers down to 1.2e-38 or below; subnormal numbers of fp16 are too large to drop."""


def zero_subnormals(values: Iterable[Tensor]) -> None:
    """Sets subnormal numbers to zero in place; 0-dim tensors, such as step counts, stay the same."""
    for value in values:
        if value.dtype in _LIKE_FP32 and value.ndim and _owns_memory(value):
            info = torch.finfo(value.dtype)
            value.copy_(torch.nn.functional.hardshrink(value, info.tiny * (1 - info.eps)))


def _owns_memory(value: Tensor) -> bool:
    """Whether each element has memory of its own, which can be written."""
    expanded = any(size > 1 and not step for size, step in zip(value.shape, value.stride(), strict=True))
    return not (expanded or value.is_inference())


@torch.no_grad()
def flush_subnormals(optimizer: Optimizer, step: int) -> None:
    """Sets subnormal numbers of an optimizer's state to zero every `SUBNORMAL_INTERVAL` steps; `step` just ended."""
    if (step + 1) % SUBNORMAL_INTERVAL == 0:
        values = (value for state in optimizer.state.values() if isinstance(state, dict) for value in state.values())
        zero_subnormals(value for value in values if isinstance(value, Tensor) and value.layout == torch.strided)


_SHARED_UPDATE_MODES = ("data", "sharded", "towers", "tensor", "stages")
"""Values of `parallel` with one gradient for all ranks."""

_HOOK_ATTRIBUTES = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def describe_update_hook(optimizer: torch.optim.Optimizer) -> str | None:
    """Returns what an update calls besides the class's `step`, as `a hook around SGD.step`; None if nothing."""
    name = f"{type(optimizer).__name__}.step"
    hooks = chain(
        *(getattr(optimizer, name, {}).values() for name in _HOOK_ATTRIBUTES),  # a wrapper may lack them
        torch_optimizer._global_optimizer_pre_hooks.values(),
        torch_optimizer._global_optimizer_post_hooks.values(),
    )
    if any(not _is_internal_hook(hook) for hook in hooks):
        return f"a hook around {name}"
    if "step" in vars(optimizer) and bare_step(optimizer.step) is not bare_step(type(optimizer).step):
        return f"a function in the place of {name}"
    return None


def check_whole_gradients(model: nn.Module, plan: Plan) -> None:
    """Refuses hooks on gradients that are computed in parts: a hook would get each part by itself, or none.

    Raises:
        PlanError: a parameter has such a hook.
    """
    if plan.parallel not in _SHARED_UPDATE_MODES and plan.accumulation == 1:
        return
    if (name := first_hooked_parameter(model)) is not None:
        axis = f"accumulation={plan.accumulation}" if plan.accumulation > 1 else f"parallel={plan.parallel}"
        raise PlanError(
            f"{axis}, and the parameter {name!r} has a hook on its gradient, which would not get the gradient "
            "of the whole batch",
            expected="parameters without hooks of their own",
            fix=f"remove the hook, or leave {axis} out",
        )


def bare_step(step: Any) -> Any:
    """Returns the function of a `step` without torch's wrappers: hooks, a schedule's count, `no_grad`."""
    function = inspect.unwrap(step, stop=lambda wrapper: not _is_torch_function(wrapper))
    return getattr(function, "__func__", function)


def _is_torch_function(function: Any) -> bool:
    """Whether torch's source defines the function; a wrapper's name is that of the wrapped function."""
    return str(getattr(function, "__globals__", {}).get("__name__", "")).startswith("torch.")


def _is_internal_hook(hook: Any) -> bool:
    """Whether hotloop registered the hook, or torch for its profiler."""
    return str(getattr(hook, "__module__", "")).startswith(("hotloop.", "torch.profiler"))
