"""Has torch tell nothing but the ends of steps, while steps go by and in the clean one after them."""

from __future__ import annotations

from typing import Any

from hotloop.profiler.base.call_sites import CallSites
from hotloop.profiler.base.step_detection import TrainingEvent
from hotloop.profiler.hooks.dataloaders import LoaderRecorder
from hotloop.profiler.hooks.torch_hooks import TorchHooks
from hotloop.profiler.session.step_sequence import StepSequence


class LightMode:
    """Begins at the end of a step, and ends with the clean one or with anything that doesn't happen in every step."""

    def __init__(self, course: StepSequence, always: TorchHooks, sites: CallSites) -> None:
        self._sequence, self._hooks, self._sites = course, always, sites
        self._span, self._is_usual = course.light_span, True
        self._loaders: LoaderRecorder

    def begin(self, optimizer: Any, event: TrainingEvent, loaders: LoaderRecorder) -> None:
        """An optimizer's update is done, and with it perhaps a step after which others go by."""
        usual, self._is_usual = self._is_usual, True
        if not usual:  # what is done in each step must be heard in each
            return
        clock = self._sequence.timeline.clock
        if not self._sequence.can_go_light(event) or not self._span.begin(
            optimizer, self._sites, clock, loaders.begin_light_steps
        ):
            return
        self._loaders = loaders
        loaders.begin_light_steps()
        if not self._hooks.unhook_every_step():
            self._span.stop()
            loaders.end_light_steps()

    def note_unusual(self) -> None:
        """Something happens that is to be heard, and what follows from it."""
        self._is_usual = False
        self.end()

    def end(self) -> None:
        """From here on all is heard, if it isn't."""
        if self._span.stop():
            self._loaders.end_light_steps()
            self._hooks.hook_every_step()
