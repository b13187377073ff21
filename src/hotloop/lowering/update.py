"""The optimizer axis: how the update is written, parameter by parameter, over lists of them, or as one kernel."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from hotloop.lowering.ingredients import Ingredients

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
        for group in optimizer.param_groups:
            group.update({key: value for key, value in flags.items() if key in group})
        if flags["fused"]:
            optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # as its constructor would set it
        return optimizer

    return replace(parts, build_optimizer=switched)
