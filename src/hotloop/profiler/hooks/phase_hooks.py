"""Puts the operations of a step into the phases of its timeline."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from hotloop.core.patches import Patches
from hotloop.core.records.profile_terms import Phase
from hotloop.distributed.wrappers.ddp import WrapperMarker
from hotloop.profiler.base.phases import Timeline
from hotloop.profiler.base.transparency import RecursionHeadroom
from hotloop.profiler.hooks.torch_hooks import TorchListener, with_callbacks, wrap_in_phase, wrap_rank_call

_SYNC_METHODS = ("item", "tolist", "__float__", "__int__", "__bool__", "__index__")
_WARNING_METHODS = ("__float__", "__int__", "__index__", "__bool__")
_COPY_METHODS = ("to", "cpu", "cuda", "copy_")
_UPDATE_FUNCTIONS = (
    ("torch.optim.optimizer", "Optimizer", "zero_grad"),
    ("torch.optim.lr_scheduler", "LRScheduler", "step"),
    ("torch.optim.lr_scheduler", "ReduceLROnPlateau", "step"),
    ("torch.optim.swa_utils", "AveragedModel", "update_parameters"),
    ("torch.amp.grad_scaler", "GradScaler", "unscale_ step update"),
    ("torch.nn.utils.clip_grad", "", "_get_total_norm _clip_grads_with_norm_"),
)
"""Module, class, functions."""

_WRITER_METHODS = "add_scalar add_scalars add_image add_images add_figure add_histogram flush"
_LOGGING_FUNCTIONS = (
    ("torch._tensor_str", "", "_str"),
    ("matplotlib.figure", "Figure", "savefig draw"),
    ("PIL.Image", "Image", "save"),
    ("torch.utils.tensorboard.writer", "SummaryWriter", _WRITER_METHODS),
    ("tqdm.std", "tqdm", "update refresh set_postfix set_description"),
)
_LOSS_FUNCTIONS = (
    ("torch", "", "binary_cross_entropy_with_logits cosine_embedding_loss ctc_loss hinge_embedding_loss kl_div"),
    ("torch", "", "margin_ranking_loss poisson_nll_loss triplet_margin_loss"),
    ("torch._C._nn", "", "binary_cross_entropy cross_entropy_loss huber_loss l1_loss mse_loss nll_loss_nd"),
    ("torch._C._nn", "", "smooth_l1_loss soft_margin_loss"),
)
"""Called by `torch.nn.functional`, whose functions stay: compiled code has guards on them, models pickle them."""

_COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "barrier")


class PhaseHooks:
    """Puts operations into the phases of a timeline, between `install` and `remove`."""

    def __init__(self, listener: TorchListener, timeline: Timeline) -> None:
        self._listener, self._timeline = listener, timeline
        self._base_patches, self._suspendable_patches, self._headroom = Patches(), Patches(), RecursionHeadroom()
        self._on = False

    def install(self) -> None:
        listener, patches = self._listener, self._base_patches
        self._on = True
        self._headroom.make()
        patches.patch(nn.Module, "__call__", self._hook_forward())
        no_grad = with_callbacks(listener.is_training_thread, lambda args, kwargs: None, listener.no_grad_ended)
        patches.patch(torch.no_grad, "__exit__", no_grad)
        patches.patch(logging.Logger, "handle", self._phase_wrapper("logging"))
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, TypeError):  # no stream, or a custom stream
                patches.patch(stream, "write", self._phase_wrapper("logging"))
        self.resume()

    def remove(self) -> None:
        self._on = False
        self._suspendable_patches.undo()
        self._base_patches.undo()
        self._headroom.give_back()

    def suspend(self) -> None:
        """Removes the hooks that compiled code may capture."""
        self._suspendable_patches.undo()

    def resume(self) -> None:
        if not self._on:
            return
        patches = self._suspendable_patches

        for name in _SYNC_METHODS:
            wrap = self._tensor_method(self._phase_wrapper("synchronisation"), warns=name in _WARNING_METHODS)
            patches.patch(Tensor, name, wrap)
        for name in _COPY_METHODS:
            patches.patch(Tensor, name, self._tensor_method(self._copy_wrapper(name)))
        self._hook_functions(_LOSS_FUNCTIONS, "loss")
        self._hook_functions(_UPDATE_FUNCTIONS, "update")
        self._hook_functions(_LOGGING_FUNCTIONS, "logging")
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            for name in _COLLECTIVES:
                mine = self._listener.is_training_thread
                patches.patch(torch.distributed, name, wrap_rank_call(mine, self._timeline, "communication"))
        if torch.accelerator.is_available():
            patches.patch(torch.accelerator, "synchronize", self._phase_wrapper("synchronisation"))
            if torch.cuda.is_available():
                patches.patch(torch.cuda, "synchronize", self._phase_wrapper("synchronisation"))

    def _hook_functions(self, table: Iterable[tuple[str, str, str]], phase: Phase) -> None:
        """Hooks the functions of imported modules: a script can't call others."""
        for module, owner, names in table:
            holder = sys.modules.get(module)
            holder = getattr(holder, owner, None) if owner else holder
            for name in names.split():
                if hasattr(holder, name):
                    self._suspendable_patches.patch(holder, name, self._phase_wrapper(phase))

    def _hook_forward(self) -> Callable[[Any], Any]:
        """The wrapper of a distributed model runs forward too, and computes the loss afterwards."""
        listener, timeline = self._listener, self._timeline

        def began(args: tuple, kwargs: dict) -> Any:
            is_wrapper = isinstance(args[0], WrapperMarker)
            return timeline.enter("forward") if is_wrapper else listener.forward_began(args, kwargs)

        def ended(token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
            if not isinstance(args[0], WrapperMarker):
                listener.forward_ended(token, args, kwargs, result, done)
                return
            timeline.leave()
            timeline.turn("loss")

        return with_callbacks(listener.is_training_thread, began, ended)

    def _phase_wrapper(self, phase: Phase) -> Callable[[Any], Any]:
        return wrap_in_phase(self._listener.is_training_thread, self._timeline, phase)

    def _tensor_method(self, wrap: Callable[[Any], Any], *, warns: bool = False) -> Callable[[Any], Any]:
        return lambda original: _TensorMethod(original, wrap(original), warns=warns)

    def _copy_wrapper(self, name: str) -> Callable[[Any], Any]:
        """Records copies between devices; conversions of the dtype alone are no copies."""
        timeline = self._timeline

        def began(args: tuple, kwargs: dict) -> bool:
            copies = _is_device_change(name, args, kwargs)
            if copies:
                timeline.enter("copy")
            return copies

        def ended(copies: bool, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
            if copies:
                timeline.leave()

        return with_callbacks(self._listener.is_training_thread, began, ended)


class _TensorMethod:
    """A tensor's method, recorded if called on a tensor; read from the class, the original is returned.

    `__torch_function__` receives the class's method, and compares it with the method at torch's import.

    Args:
        warns: whether torch warns once about a call on a differentiable tensor. The warning names the innermost Python
            line, which must be the user's. So the first such call is not recorded.
    """

    warned = False

    def __init__(self, original: Any, recorded: Any, *, warns: bool) -> None:
        self._original, self._recorded, self._warns = original, recorded, warns

    def __get__(self, tensor: Tensor | None, owner: Any = None) -> Any:
        if tensor is None:
            return self._original
        if self._warns and (torch.is_warn_always_enabled() or not _TensorMethod.warned) and _is_differentiated(tensor):
            _TensorMethod.warned = True
            return self._original.__get__(tensor, owner)
        return self._recorded.__get__(tensor, owner)


def _is_differentiated(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunction():
        return tensor.requires_grad


def _is_device_change(name: str, args: tuple, kwargs: dict) -> bool:
    with torch._C.DisableTorchFunction():
        here = args[0].device
        if name in ("cpu", "cuda"):
            return here.type != name or bool(args[1:] or kwargs)
        return any(_is_other_device(value, here) for value in (*args[1:], *kwargs.values()))


def _is_other_device(value: Any, here: torch.device) -> bool:
    if isinstance(value, Tensor):
        return value.device != here
    if isinstance(value, str | torch.device):
        kind, _, number = str(value).partition(":")
        return kind != here.type or number not in ("", str(here.index))
    return isinstance(value, int) and not isinstance(value, bool) and value != here.index
