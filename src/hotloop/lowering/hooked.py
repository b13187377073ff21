"""What hangs on parameters and on an optimizer's `step`, and runs only where autograd and torch call it."""

from __future__ import annotations

import inspect
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as of_torch

from hotloop.errors import PlanError
from hotloop.plan import Plan
from hotloop.task import hooked_parameter

_SHARING = ("data", "sharded", "towers", "tensor", "stages")
"""Values of `parallel` under which ranks come to one gradient together."""


_HELD = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def hooked_optimizer(optimizer: torch.optim.Optimizer) -> str | None:
    """What an update calls beside the `step` of the optimizer's class, as `a hook around SGD.step`; None if nothing."""
    name = f"{type(optimizer).__name__}.step"
    hooks = chain(
        *(getattr(optimizer, name, {}).values() for name in _HELD),  # a wrapper may never have got them
        of_torch._global_optimizer_pre_hooks.values(),
        of_torch._global_optimizer_post_hooks.values(),
    )
    if any(not _own(hook) for hook in hooks):
        return f"a hook around {name}"
    if "step" in vars(optimizer) and bare_step(optimizer.step) is not bare_step(type(optimizer).step):
        return f"a function in the place of {name}"
    return None


def check_whole_gradients(model: nn.Module, plan: Plan) -> None:
    """Refuses hooks on gradients where these come in parts: a hook would see each part by itself, or none.

    Raises:
        PlanError: a parameter has such a hook.
    """
    if plan.parallel not in _SHARING and plan.accumulation == 1:
        return
    if (name := hooked_parameter(model)) is not None:
        axis = f"accumulation={plan.accumulation}" if plan.accumulation > 1 else f"parallel={plan.parallel}"
        raise PlanError(
            f"{axis}, and the parameter {name!r} has a hook on its gradient, which would not get that of the whole batch",
            expected="parameters without hooks of their own",
            fix=f"take the hook off, or leave {axis} out",
        )


def bare_step(step: Any) -> Any:
    """The function that a `step` is without what torch puts around it: its hooks, a schedule's count, `no_grad`."""
    found = inspect.unwrap(step, stop=lambda one: not _from_torch(one))
    return getattr(found, "__func__", found)


def _from_torch(function: Any) -> bool:
    """By where it was written: a wrapper takes the name of what it wraps."""
    return str(getattr(function, "__globals__", {}).get("__name__", "")).startswith("torch.")


def _own(hook: Any) -> bool:
    """Whether hotloop hung it up itself, or torch to count steps for its profiler."""
    return str(getattr(hook, "__module__", "")).startswith(("hotloop.", "torch.profiler"))
