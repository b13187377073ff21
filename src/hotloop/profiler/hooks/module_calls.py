"""Hooks on all module calls and backward passes during a step.

Modules that make samples, such as transforms, are not reported. `nn.Module.__call__` is replaced: torch's global module
hooks change the call path, for which compiled modules recompile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

from hotloop.core.patches import Patches
from hotloop.distributed.wrappers.ddp import WrapperMarker
from hotloop.profiler.base.transparency import RecursionHeadroom, hide_from_compiler, hide_from_warnings, strip_frame
from hotloop.profiler.hooks.torch_hooks import with_callbacks


class ModuleListener(Protocol):
    """Is notified of the training thread's module calls; in a backward pass, of those of torch's threads too."""

    def enter(self, module: nn.Module, args: tuple) -> Any:
        """A module's forward begins; the result is passed to `leave`."""

    def leave(self, before: Any) -> None:
        """The forward has ended, also by an error."""

    def backward(self, roots: Any) -> AbstractContextManager[None]:
        """A pass of the autograd engine below some tensors; passes may be nested."""


@hide_from_compiler
class ModuleCallHooks:
    """Opened by the training thread, and removed by `close`; `depth` counts nested passes of the autograd engine."""

    def __init__(self, listener: ModuleListener) -> None:
        self.depth, self._listener = 0, listener
        self._open = self._loading = False
        self._thread = 0
        self._patches, self._headroom = Patches(), RecursionHeadroom()

    def open(self) -> None:
        self.depth, self._thread, self._loading = 0, threading.get_ident(), False
        self._headroom.make()
        self._patches.patch(nn.Module, "__call__", self._call)
        self._patches.patch(torch.autograd, "_engine_run_backward", self._run)
        loading = with_callbacks(self._is_loading_begun, self._note_loading, self._note_loaded)
        self._patches.patch(_BaseDataLoaderIter, "__next__", loading)
        self._open = True

    def close(self) -> None:
        """Restores the originals, unless other code has replaced the hooks since."""
        self._open = False
        self._patches.undo()
        self._headroom.give_back()

    def _is_loading_begun(self) -> bool:
        """A loader may draw from another loader; only the outer one counts."""
        return self._open and not self._loading and threading.get_ident() == self._thread

    def _note_loading(self, args: tuple, kwargs: dict) -> None:
        self._loading = True

    def _note_loaded(self, *ended: Any) -> None:
        self._loading = False

    @hide_from_warnings
    def _call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        compiling, ident = torch.compiler.is_compiling, threading.get_ident
        enter, leave = self._listener.enter, self._listener.leave

        @wraps(original)
        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if compiling():
                return original(module, *args, **kwargs)
            is_other_thread = ident() != self._thread and not self.depth
            reports = self._open and not (is_other_thread or self._loading or isinstance(module, WrapperMarker))
            before = enter(module, args) if reports else None
            try:
                return original(module, *args, **kwargs)
            except BaseException as error:
                error.__traceback__ = strip_frame(error)
                raise
            finally:
                if reports:
                    leave(before)

        return hide_from_compiler(call)

    @hide_from_warnings
    def _run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            reports = self._open and not torch.compiler.is_compiling()
            try:
                with self._listener.backward(t_outputs) if reports else nullcontext():
                    self.depth += reports
                    try:
                        return original(t_outputs, *args, **kwargs)
                    finally:
                        self.depth -= reports
            except BaseException as error:
                error.__traceback__ = strip_frame(error)
                raise

        return hide_from_compiler(call)
