"""Hooks into torch that are installed in all recorded steps; `PhaseHooks` records some steps in detail."""

from __future__ import annotations

import functools
import logging
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hotloop.core.patches import Patches
from hotloop.core.records.profile_terms import Phase
from hotloop.core.torch_private import DisableTorchFunction
from hotloop.distributed.wrappers.ddp import WrapperMarker
from hotloop.profiler.base.phases import RANK_PHASES, HostClock, LightSpan, StepClock, Timeline
from hotloop.profiler.base.transparency import (
    RecursionHeadroom,
    as_replacement,
    hide_from_compiler,
    hide_from_warnings,
    strip_frame,
    unwrap,
)

_CALLS, _REPEATS = 100, 3

OnBegin = Callable[[tuple, dict], Any]
OnEnd = Callable[[Any, tuple, dict, Any, bool], None]


@hide_from_warnings
def with_callbacks(mine: Callable[[], bool], began: OnBegin, ended: OnEnd) -> Callable[[Any], Any]:
    """Returns a decorator that reports a function's begin and end; callers see no difference.

    Tracebacks and warnings look as without the wrapper; calls are not reported while torch compiles.

    Args:
        mine: whether this thread is recorded.
        began: receives the arguments; the result is passed to `ended`.
        ended: receives that result, the arguments, the function's result, and whether there is a result.
    """
    compiling = torch.compiler.is_compiling

    def make(original: Any) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if compiling():
                return original(*args, **kwargs)
            reports = mine()
            token, result, done = began(args, kwargs) if reports else None, None, False
            try:
                result = original(*args, **kwargs)
                done = True
                return result
            except BaseException as error:
                error.__traceback__ = strip_frame(error)
                raise
            finally:
                if reports:
                    ended(token, args, kwargs, result, done)

        return as_replacement(hide_from_compiler(call), original)

    return make


def wrap_in_phase(mine: Callable[[], bool], timeline: Timeline, phase: Phase) -> Callable[[Any], Any]:
    return with_callbacks(mine, lambda args, kwargs: timeline.enter(phase), lambda *ended: timeline.leave())


def wrap_rank_call(mine: Callable[[], bool], timeline: Timeline, phase: Phase) -> Callable[[Any], Any]:
    """Puts a function that sends, receives or waits into a phase, unless an enclosing function has such a phase."""

    def began(args: tuple, kwargs: dict) -> None:
        timeline.enter(timeline.current if timeline.current in RANK_PHASES else phase)

    return with_callbacks(mine, began, lambda *ended: timeline.leave())


def measure_mark_ms(clock: StepClock) -> float:
    """Returns the overhead of one mark at a function's begin or end; measured in 2 ms."""
    if not isinstance(clock, HostClock):
        return 0.0
    timeline = Timeline(clock)
    nothing = partial(int)
    wrap = with_callbacks(lambda: True, lambda args, kwargs: timeline.enter("copy"), lambda *ended: timeline.leave())
    wrapped = wrap(nothing)
    timeline.begin("python")
    spent = [_time_calls_ms(wrapped) - _time_calls_ms(nothing) for _ in range(_REPEATS)]
    return max(0.0, min(spent)) / _CALLS / 2


def _time_calls_ms(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    for _ in range(_CALLS):
        function()
    return (time.perf_counter() - began) * 1e3


def stop_on_error(method: Callable[..., Any]) -> Callable[..., Any]:
    """An error of a listener ends its recording by its `fail`, and never stops the script.

    The script's modes and `__torch_function__` overrides see no tensor operation of the listener.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with DisableTorchFunction():
                return method(self, *args, **kwargs)
        except Exception as error:
            return self.fail(error)

    return call


class TorchHooks:
    """Notifies a session of backwards, updates, batches, checkpoints and changes of the training mode.

    Attributes:
        outermost: reports `backward_done` until `undo`.
    """

    def __init__(self, listener: Any, light_span: LightSpan) -> None:
        self._listener, self._light_span = listener, light_span
        self._patches, self._every_step_patches, self.outermost = Patches(), Patches(), Patches()
        self._loading = with_callbacks(listener.is_training_thread, listener.loading_began, listener.loading_ended)
        should_record = listener.should_record_backward
        self._backward = with_callbacks(should_record, listener.backward_began, listener.backward_ended)
        self._handles: list[Any] = []

    def install(self) -> None:
        listener, patches = self._listener, self._patches
        self.hook_every_step()
        patches.patch(DataLoader, "__iter__", self._loading)
        mine = listener.is_training_thread
        patches.patch(torch, "save", with_callbacks(mine, listener.saving_began, listener.saving_ended))
        threads = with_callbacks(mine, lambda args, kwargs: None, listener.threads_set)
        patches.patch(torch, "set_num_threads", threads)
        patches.patch(nn.Module, "train", with_callbacks(mine, listener.mode_began, listener.mode_ended))
        self._handles = [
            register_optimizer_step_pre_hook(hide_from_compiler(self._update_began)),
            register_optimizer_step_post_hook(hide_from_compiler(self._update_ended)),
        ]
        self.wrap_backward()

    def hook_every_step(self) -> None:
        self._every_step_patches.patch(torch.autograd, "_engine_run_backward", self._backward)
        self._every_step_patches.patch(_BaseDataLoaderIter, "__next__", self._loading)

    def unhook_every_step(self) -> bool:
        """Ends these reports until `hook_every_step`; returns False and does nothing if other code wraps the hooks."""
        untouched = self._every_step_patches.is_untouched
        if untouched:
            self._every_step_patches.undo()
        return untouched

    def _update_began(self, optimizer: Any, args: tuple, kwargs: dict) -> Any:
        if torch.compiler.is_dynamo_compiling() or self._light_span.on:
            return None
        return self._listener.update_began(optimizer, args, kwargs)

    def _update_ended(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        if torch.compiler.is_dynamo_compiling():
            return
        try:
            if self._light_span.ends_light_step(optimizer):
                return
        except Exception as error:
            self._listener.fail(error)
        self._listener.update_ended(optimizer, args, kwargs)

    def wrap_backward(self) -> None:
        """From here on, `backward_done` is called after all wrappers of a backward that exist by now."""
        listener = self._listener
        done = with_callbacks(listener.is_training_thread, lambda args, kwargs: None, listener.backward_done)
        self.outermost.undo()
        self.outermost.patch(torch.autograd, "_engine_run_backward", done)

    def _undo(self) -> None:
        self._light_span.stop()
        for patches in (self.outermost, self._every_step_patches, self._patches):
            patches.undo()

    def remove(self) -> None:
        """Removes all hooks. An optimizer's hook may not call this: torch iterates over the hooks then."""
        self._undo()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def remove_later(self) -> None:
        """Removes all hooks at once except those of optimizers, which are removed at the next backward."""
        self._undo()

        last = with_callbacks(lambda: True, lambda args, kwargs: self.remove(), lambda *ended: None)
        self._patches.patch(torch.autograd, "_engine_run_backward", last)


class CompilePause:
    """Removes hooks that compiled code may capture (`away`) while torch compiles, and restores them (`back`)."""

    def __init__(self, away: Callable[[], None], back: Callable[[], None]) -> None:
        self._suspend, self._resume = away, back
        self._call: Any = None

    def listen(self) -> None:
        """May be called repeatedly: importing the compiler takes seconds; `torch._dynamo.reset()` drops callbacks."""
        handler = _compile_callbacks()
        if handler is not None and self._compile_began not in handler.start_callbacks:
            handler.register_start_callback(self._compile_began)
            handler.register_end_callback(self._compile_ended)

    def remove(self) -> None:
        handler = _compile_callbacks()
        if handler is not None:
            with suppress(ValueError):
                handler.remove_start_callback(self._compile_began)
                handler.remove_end_callback(self._compile_ended)

    def _compile_began(self, trigger: Any) -> None:
        call = vars(nn.Module)["__call__"]
        if unwrap(call) is not call:
            self._call, nn.Module.__call__ = call, unwrap(call)  # type: ignore[method-assign]
        self._suspend()

    def _compile_ended(self, trigger: Any) -> None:
        self._resume()
        if self._call is not None:
            call, self._call = self._call, None
            if nn.Module.__call__ is unwrap(call):  # no other code has replaced it since
                nn.Module.__call__ = call  # type: ignore[method-assign]


def _compile_callbacks() -> Any:
    return getattr(sys.modules.get("torch._dynamo"), "callback_handler", None)


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

    def __init__(self, listener: Any, timeline: Timeline) -> None:
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
    with DisableTorchFunction():
        return tensor.requires_grad


def _is_device_change(name: str, args: tuple, kwargs: dict) -> bool:
    with DisableTorchFunction():
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
