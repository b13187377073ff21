"""Switches light mode on and off: during skipped steps and the clean step after them, only step ends are recorded."""

from __future__ import annotations

from typing import Any

from hotloop.profiler.base.call_sites import CallSites
from hotloop.profiler.base.step_detection import TrainingEvent
from hotloop.profiler.hooks.dataloaders import LoaderRecorder
from hotloop.profiler.hooks.torch_hooks import TorchHooks
from hotloop.profiler.session.step_sequence import StepSequence


class LightMode:
    """Begins at the end of a step; ends with the clean step, or with any unusual event."""

    def __init__(self, sequence: StepSequence, hooks: TorchHooks, sites: CallSites) -> None:
        self._sequence, self._hooks, self._sites = sequence, hooks, sites
        self._span, self._is_usual = sequence.light_span, True
        self._loaders: LoaderRecorder

    def begin(self, optimizer: Any, event: TrainingEvent, loaders: LoaderRecorder) -> None:
        usual, self._is_usual = self._is_usual, True
        if not usual:  # events of every step must be recorded in every step
            return
        clock, last = self._sequence.timeline.clock, loaders.begin_light_steps
        if not self._sequence.can_go_light(event) or not self._span.begin(optimizer, self._sites, clock, last):
            return
        self._loaders = loaders
        loaders.begin_light_steps()
        if not self._hooks.unhook_every_step():
            self._span.stop()
            loaders.end_light_steps()

    def note_unusual(self) -> None:
        self._is_usual = False
        self.end()

    def end(self) -> None:
        if self._span.stop():
            self._loaders.end_light_steps()
            self._hooks.hook_every_step()
