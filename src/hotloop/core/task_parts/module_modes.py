"""Training and evaluation mode of modules, and of optimizers with both modes.

A module that the model factory puts into evaluation mode, such as a frozen batch normalisation, stays in this mode
during training. A switch may change weights: a module may merge weights in `eval()`, and a schedule-free optimizer
replaces weights by their average. hotloop restores such weights bit by bit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy


def modules_in_eval(model: nn.Module) -> frozenset[str]:
    """Returns the names of the modules that stay in evaluation mode during training.

    A model that is in evaluation mode as a whole, such as a library's pretrained model, is trained in training mode.
    """
    modes = {name: module.training for name, module in model.named_modules()}
    return frozenset(name for name, training in modes.items() if not training) if any(modes.values()) else frozenset()


def describe_modes(model: nn.Module) -> str:
    """Returns a line on modules that the model factory returned in evaluation mode; empty without such modules."""
    names = sorted(modules_in_eval(model))
    if names:
        module, more = model.get_submodule(names[0]), f" and {len(names) - 1} more" * (len(names) > 1)
        place = f"{names[0]!r} ({type(module).__name__})" if names[0] else "the model itself"
        return f"{place}{more} in evaluation mode throughout training, as the model factory returned the model"
    if not model.training:
        return (
            "the model factory returned the model in evaluation mode as a whole: all of it is trained in training mode"
        )
    return ""


def set_training(model: nn.Module, in_eval: Collection[str]) -> nn.Module:
    """Switches the model to training mode except for the named modules; returns the model.

    Calls the root's `train()`, which a class may override. The named modules' own `train()` might change weights, so
    the function sets only their flag.
    """
    model.train()
    for name in in_eval:
        model.get_submodule(name).training = False
    return model


def switchable_optimizers(optimizer: torch.optim.Optimizer, wrapped: Sequence[torch.optim.Optimizer] = ()) -> list[Any]:
    """Returns the optimizers with `train()` and `eval()`: `optimizer`, or else those of `wrapped`."""
    if _has_both_modes(optimizer):
        return [optimizer]
    return list(filter(_has_both_modes, wrapped))


def _has_both_modes(optimizer: Any) -> bool:
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


@contextmanager
def evaluation_mode(modules: Sequence[nn.Module], optimizers: Sequence[Any] = ()) -> Iterator[None]:
    """Switches optimizers, then modules, to evaluation mode; restores modes and weights after the context."""
    modes = [(module, module.training) for root in modules for module in root.modules()]
    roots = [root.training for root in modules]
    contents = _SavedContents(modules) if optimizers or any(map(may_rewrite_weights, modules)) else None
    with torch.no_grad():
        for optimizer in optimizers:
            optimizer.eval()
        for root in modules:
            root.eval()
    try:
        yield
    finally:
        with torch.no_grad():
            for root, training in zip(modules, roots, strict=True):
                root.train(training)
            for optimizer in optimizers:
                optimizer.train()
        for module, training in modes:
            module.training = training
        if contents is not None:
            contents.restore()


def may_rewrite_weights(model: nn.Module) -> bool:
    """Returns whether a module overrides `train` or `eval`, and so may change weights at a switch."""
    return any(_has_mode_override(module) for module in model.modules())


def _has_mode_override(module: nn.Module) -> bool:
    kind = type(module)
    if kind.__module__.startswith("torch."):
        return False
    return any(
        name in vars(module) or getattr(kind, name) is not getattr(nn.Module, name) for name in ("train", "eval")
    )


class _SavedContents:
    def __init__(self, modules: Sequence[nn.Module]) -> None:
        owners = [module for root in modules for module in root.modules()]
        self._members = [(owner, dict(owner._parameters), dict(owner._buffers)) for owner in owners]
        tensors = [value for root in modules for value in (*root.parameters(), *root.buffers())]
        built = {id(value): value for value in tensors if not is_lazy(value)}.values()
        self._tensors = [(tensor, tensor.data, tensor.detach().clone()) for tensor in built]

    @torch.no_grad()
    def restore(self) -> None:
        for owner, parameters, buffers in self._members:
            _restore_contents(owner._parameters, parameters)
            _restore_contents(owner._buffers, buffers)
        for tensor, data, numbers in self._tensors:
            if tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape:
                tensor.data = data
            tensor.data.copy_(numbers)


def _restore_contents(now: dict[str, Any], before: dict[str, Any]) -> None:
    if any(now.get(name) is not value for name, value in before.items()):
        now.clear()
        now.update(before)
