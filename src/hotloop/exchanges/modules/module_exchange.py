"""The module exchange: forward and backward of a network compiled in place, with hotloop's rewrites.

The networks are the modules that the script itself calls in its first training steps.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from hotloop.core.patches import Patches
from hotloop.exchanges.modules.child_limit import ChildLimit
from hotloop.exchanges.modules.module_limits import why_unfit_module
from hotloop.exchanges.modules.module_site import ModuleSite
from hotloop.exchanges.part import Part
from hotloop.profiler.base.tensor_facts import has_gradient
from hotloop.profiler.base.transparency import hide_from_compiler, hide_from_warnings
from hotloop.scripts.child import strip_own_frames

MakePart = Callable[[str, str, Sequence[str]], Part]

_COMPILED = "compiled"

_WATCHED_STEPS = 3
"""Steps in which the networks are found."""

_MIN_TRAINED_S = 10.0
"""Seconds of training before a network is compiled: a run of unknown length likely lasts as long again."""

_MAX_PARTS = 8

_COMPILES = "the script uses torch.compile itself"

_NOT_EXACT = "a compiled module is equal within rounding, and this run allows bitwise exchanges only"


class ModuleExchange:
    """Finds the script's networks, and installs a `ModuleSite` at each.

    Args:
        make_part: creates a part of kind, name and exchanges.
        is_mine: whether calls of this process and thread are exchanged.
        is_enabled: whether used exchanges are on.
        exact: whether only bitwise exchanges are allowed, which a compiled module is not.
        is_waiting: whether no module is compiled yet, such as during the race of the number of threads, which a compiled
            module depends on.
    """

    def __init__(
        self,
        make_part: MakePart,
        is_mine: Callable[[], bool],
        is_enabled: Callable[[], bool],
        *,
        exact: bool = False,
        is_waiting: Callable[[], bool] = lambda: False,
    ) -> None:
        self._make_part, self._is_mine, self._is_enabled, self._exact = make_part, is_mine, is_enabled, exact
        self._is_waiting = is_waiting
        self._sites: dict[int, ModuleSite] = {}
        self._watched_until: int | None = None
        self._calls, self._compilations = Patches(), Patches()
        self._child_limit = ChildLimit()
        self._is_watching = self._is_inside = self._has_compiled = False
        self._began_s: float | None = None
        self._step_s: float | None = None
        self._steps = 0

    def install(self) -> None:
        """Looks for networks from the next update on, so a script without training has no hook in its calls."""
        self._watched_until = None
        self._compilations.patch(torch, "compile", self._noticing())

    def remove(self) -> None:
        self.end()
        self.abandon()

    def abandon(self) -> None:
        """Gives all calls back; the processes of a parent run on."""
        self._is_watching = False
        self._calls.undo()
        self._compilations.undo()
        for site in self._sites.values():
            site.uninstall()

    @property
    def is_busy(self) -> bool:
        """Whether the next steps are needed, to find networks or to try one."""
        return self._watched_until is None or self._is_watching or any(site.is_tried for site in self._sites.values())

    @property
    def is_over(self) -> bool:
        """Whether no network is used or waits for a decision."""
        return not self.is_busy and all(site.is_over for site in self._sites.values())

    def end(self) -> None:
        """Ends the processes that compile or prove."""
        for site in self._sites.values():
            site.end()

    def step_ended(self, steps: int) -> None:
        """Notes the number of the script's steps so far, after an optimizer's update."""
        if self._watched_until is None:
            self._watched_until, self._is_watching = steps + _WATCHED_STEPS, True
            self._calls.patch(nn.Module, "__call__", self._watching())
        if steps == self._steps:
            return
        now, passed = time.perf_counter(), steps - self._steps
        span_s = None if self._step_s is None else now - self._step_s
        self._steps, self._step_s = steps, now
        if self._is_watching and steps >= self._watched_until:
            self._is_watching = False
            self._calls.undo()
        if not self._sites:
            return
        process = next((site.process for site in self._sites.values() if site.process is not None), None)
        self._child_limit.step_ended(process, span_s, passed)
        if not self._is_watching:
            for site in self._sites.values():
                site.step_ended(steps, span_s if passed == 1 else None)

    @hide_from_warnings
    def _watching(self) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            compiling = torch.compiler.is_compiling

            @functools.wraps(original)
            def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
                if compiling() or self._is_inside or not self._is_watching or not self._is_mine():
                    return original(module, *args, **kwargs)
                self._is_inside = True
                try:
                    result = original(module, *args, **kwargs)
                except BaseException as error:
                    error.__traceback__ = strip_own_frames(error)
                    raise
                finally:
                    self._is_inside = False
                self._note(module, result)
                return result

            return hide_from_compiler(call)

        return make

    def _noticing(self) -> Callable[[Any], Any]:
        """A module that is called inside of a function which the script compiles may have no further attribute."""

        def make(original: Any) -> Any:
            @functools.wraps(original)
            def compile(*args: Any, **kwargs: Any) -> Any:
                self._has_compiled = True
                for site in self._sites.values():
                    site.leave(_COMPILES)
                return original(*args, **kwargs)

            return compile

        return make

    def _note(self, module: nn.Module, result: Any) -> None:
        """Makes a part of a network that is trained."""
        if id(module) in self._sites or len(self._sites) >= _MAX_PARTS or not module.training:
            return
        if not torch.is_grad_enabled() or not has_gradient(result):
            return
        numbers = sum(value.numel() for value in module.parameters() if value.requires_grad)
        if not numbers:
            return
        if self._began_s is None:
            self._began_s = time.monotonic()
        part = self._make_part("module", f"{type(module).__name__}, {numbers:,} parameters", [_COMPILED])
        site = ModuleSite(module, part, self._is_mine, self._is_enabled, self._may_begin)
        self._sites[id(module)] = site
        unfit = _NOT_EXACT if self._exact else _COMPILES if self._has_compiled else why_unfit_module(module)
        part.reason = "the script ended before compiling was likely to pay"
        if unfit:
            part.refuse(unfit)

    def _may_begin(self, site: ModuleSite) -> bool:
        is_early = self._began_s is None or time.monotonic() - self._began_s < _MIN_TRAINED_S
        if is_early and not site.part.was_faster and not site.part.proven:
            return False
        if any(other.process is not None for other in self._sites.values()):
            return False
        is_busy = any(other is not site and other.part.stage == "race" for other in self._sites.values())
        return not is_busy and not self._is_waiting()
