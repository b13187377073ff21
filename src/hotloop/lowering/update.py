"""The optimizer axis: how the update is written, parameter by parameter, over lists of them, or as one kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.lowering.ingredients import Ingredients
from hotloop.named_optimizers import members_of

_FLAGS = {
    "forloop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}


def with_implementation(parts: Ingredients) -> Ingredients:
    """The optimizer of the Task's factory, switched to an implementation of its update; what it computes stays."""
    if parts.plan.optimizer == "default":
        return parts
    build, flags = parts.build_optimizer, _FLAGS[parts.plan.optimizer]

    def switched(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = build(model)
        for member in members_of(optimizer):
            for group in member.param_groups:
                group.update({key: value for key, value in flags.items() if key in group})
            if flags["fused"]:
                _mend_fused(member, parts)
        return optimizer

    return replace(parts, build_optimizer=switched)


def _mend_fused(optimizer: torch.optim.Optimizer, parts: Ingredients) -> None:
    """Keeps torch's fused kernels from what they can't take, step by step; see `_Fallback` and `lay_out_gradients`."""
    falls_back = isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad)
    # As its constructor would set it. Without it the scaler of fp16 unscales by itself, as the form to fall back to needs.
    optimizer._step_supports_amp_scaling = not falls_back  # type: ignore[attr-defined]
    if falls_back:
        _count_on_device(optimizer)
        fallback = _Fallback(optimizer, parts.say)
        optimizer.register_step_pre_hook(fallback.before)
        optimizer.register_step_post_hook(fallback.after)
    if parts.plan.compile == "forward" or parts.plan.parallel != "none":
        optimizer.register_step_pre_hook(_laid_out)


def _count_on_device(optimizer: torch.optim.Optimizer) -> None:
    """Moves counts of steps that a constructor made, as Adagrad's does, to where a fused kernel reads them."""
    for parameter, state in optimizer.state.items():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(parameter.device)


class _Fallback:
    """Steps that the fused form of SGD or Adagrad can't take go parameter by parameter.

    It can't take sparse gradients, nor parameters of which some have momentum and some not yet, as where a branch
    gives a parameter its first gradient late. The parameter-by-parameter form is the baseline's.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, say: Callable[[str], None]) -> None:
        self._momentum = isinstance(optimizer, torch.optim.SGD)
        self._say, self._said, self._fell = say, set[str](), False

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        why = self._unfit(optimizer)
        if why:
            self._switch(optimizer, fused=False)
        if why and why not in self._said:
            self._said.add(why)
            self._say(f"optimizer=fused: {why}, so such steps update parameter by parameter")

    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self._fell:
            self._switch(optimizer, fused=True)

    def _switch(self, optimizer: torch.optim.Optimizer, *, fused: bool) -> None:
        self._fell = not fused
        for group in optimizer.param_groups:
            group["fused"] = fused

    def _unfit(self, optimizer: torch.optim.Optimizer) -> str:
        """Why this step can't be fused; empty if it can."""
        values = [value for group in optimizer.param_groups for value in group["params"]]
        if any(value.grad is not None and value.grad.is_sparse for value in values):
            return "there are sparse gradients"
        if self._momentum and len(optimizer.state) != len(values) and any(map(_mixed, _groups(optimizer))):
            return "some parameters get their first gradient later than others"
        return ""


def _groups(optimizer: torch.optim.Optimizer) -> list[list[bool]]:
    """Of each group with momentum, whether each parameter with a gradient has momentum already."""
    return [
        [
            optimizer.state.get(value, {}).get("momentum_buffer") is not None
            for value in group["params"]
            if value.grad is not None
        ]
        for group in optimizer.param_groups
        if group["momentum"] != 0
    ]


def _mixed(have: list[bool]) -> bool:
    return any(have) and not all(have)


def _laid_out(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    lay_out_gradients(optimizer)


def lay_out_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Gives each gradient that a fused kernel reads the strides of its parameter, since it walks both in the order of memory.

    Autograd lays out what it accumulates so; gradients from a captured step or from other ranks come as they are.
    """
    for group in optimizer.param_groups:
        for value in group["params"] if group.get("fused") else ():
            gradient = value.grad
            if gradient is not None and not gradient.is_sparse and gradient.stride() != value.stride():
                value.grad = torch.empty_like(value, dtype=gradient.dtype, requires_grad=False).copy_(gradient)


def gapless(value: Tensor) -> bool:
    """Whether a tensor's elements fill one stretch of memory, each once, in whichever order: what fused kernels take."""
    filled = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(value.stride(), value.shape, strict=True) if size != 1
    ):
        if stride != filled:
            return value.numel() == 0
        filled *= size
    return True
