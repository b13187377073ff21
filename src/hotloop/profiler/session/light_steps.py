"""Has torch tell nothing but the ends of steps, while steps go by and in the clean one after them."""

from __future__ import annotations

from typing import Any

from hotloop.profiler.base.call_sites import Sites
from hotloop.profiler.base.step_detection import Event
from hotloop.profiler.hooks.dataloaders import Loaders
from hotloop.profiler.hooks.torch_hooks import Always
from hotloop.profiler.session.step_sequence import Course


class Sparing:
    """Begins at the end of a step, and ends with the clean one or with anything that doesn't happen in every step."""

    def __init__(self, course: Course, always: Always, sites: Sites) -> None:
        self._course, self._always, self._sites = course, always, sites
        self._stretch, self._usual = course.stretch, True
        self._loaders: Loaders

    def begin(self, optimizer: Any, event: Event, loaders: Loaders) -> None:
        """An optimizer's update is done, and with it perhaps a step after which others go by."""
        usual, self._usual = self._usual, True
        if not usual:  # what is done in each step must be heard in each
            return
        clock = self._course.timeline.clock
        if not self._course.spares(event) or not self._stretch.begin(optimizer, self._sites, clock, loaders.look):
            return
        self._loaders = loaders
        loaders.look()
        if not self._always.spare():
            self._stretch.stop()
            loaders.catch_up()

    def unusual(self) -> None:
        """Something happens that is to be heard, and what follows from it."""
        self._usual = False
        self.end()

    def end(self) -> None:
        """From here on all is heard, if it isn't."""
        if self._stretch.stop():
            self._loaders.catch_up()
            self._always.hear()
