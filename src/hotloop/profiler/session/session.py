"""Watches a thread that trains: hears what happens, puts it into phases, and notes how the loop uses torch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.autograd.evaluation_pauses import Pauses
from hotloop.profiler.autograd.patterns import Graphs
from hotloop.profiler.base.call_sites import Sites
from hotloop.profiler.base.schedule import CLOSE, Kind, Observer
from hotloop.profiler.base.step_detection import Event
from hotloop.profiler.base.step_facts import Facts
from hotloop.profiler.hooks.dataloaders import Loaders
from hotloop.profiler.hooks.forward_calls import Calls, given
from hotloop.profiler.hooks.optimizer_hooks import Closures, Optimizers
from hotloop.profiler.hooks.phase_hooks import Closely
from hotloop.profiler.hooks.torch_hooks import Always, Compiling, Listener, mark_ms, safe
from hotloop.profiler.session.light_steps import Sparing
from hotloop.profiler.session.optimizer_facts import amend_batch, gathered, note_batch
from hotloop.profiler.session.step_sequence import Course
from hotloop.profiler.trace.inductor_kernels import Compilations

_PUBLISHED_S = 1.0
"""Between two times that all facts so far are written down, for a process that may end without a word."""


class Watch(Listener):
    """Told of what happens, it makes facts of it.

    Args:
        steps: to measure, see `Course` and `schedule`.
        publish: is called now and then with all facts so far, and when watching ends.
        observers: makes those that watch closely, once the step is known.
        found: whether steps are found in what happens; else `boundary` is called after each.
        in_step: whether others take the same steps, so that no clock of this process may decide which are watched how.
        compilations: what is compiled, noted from the beginning.
        trains: is called before the first backward or update.

    Attributes:
        facts, calls: what was seen; what the loop calls.
        timeline: of the step that is on.
        closed: whether watching is over.
    """

    def __init__(
        self,
        steps: int | None,
        sites: Sites,
        publish: Callable[[Facts], None],
        observers: Callable[[Watch], list[Observer]],
        *,
        found: bool = True,
        in_step: bool = False,
        compilations: Compilations | None = None,
        trains: Callable[[], None] = lambda: None,
    ) -> None:
        self.closed, self.sites, self.compilations = False, sites, compilations or Compilations()
        self._course = Course(steps, self, lambda: observers(self), found=found, in_step=in_step)
        self.facts, self.timeline = self._course.facts, self._course.timeline
        self._publish, self._begins, self._hears = publish, trains, True
        self._always, self._closely = Always(self, self._course.stretch), Closely(self, self.timeline)
        self._sparing, self.calls = Sparing(self._course, self._always, sites), Calls(self.timeline)
        self._compiling = Compiling(self._closely.away, self._closely.back)
        self._loaders, self._optimizers = Loaders(sites), Optimizers(sites)
        self._graphs = Graphs(sites, self.fail, self._optimizers.parameters, self.mine)
        self._pauses = Pauses(self._graphs, lambda: self._course.step)
        self._closures = Closures(self.mine, self.timeline, self._making, self._optimizers.evaluated)
        self._thread: int | None = None
        self._backwards, self._forwards, self._close, self._busy = 0, 0, False, False
        self._published = float("inf") if in_step else time.monotonic()  # work of one holds up others

    def install(self) -> None:
        """Begins listening."""
        self._always.install()
        self._publish(self.facts)

    @safe
    def boundary(self) -> None:
        """A step ends here, and the next begins."""
        if not self.closed:
            with self._own_work():
                self._course.boundary()
                self._after_boundary()

    def abandon(self) -> None:
        """In a forked child: nothing is watched, and nothing remains."""
        if self.closed:
            return
        self.closed = True
        self._take_away(self._course.abandon)
        self._always.remove()

    @safe
    def close(self, why: str = "") -> None:
        """Ends watching; hooks of optimizers go at the next backward, since this may be called from one."""
        if self.closed:
            return
        self.closed = True
        self._pauses.trains()  # it counts as long as its step is on
        self._course.end_whole()
        self._course.make_do()
        self._take_away(self._course.end_close_watch)
        self._always.remove_later()
        self.facts.closed = why
        facts = self._collect(wait=True)
        self._course.close()
        self._publish(facts)

    def note_compilations(self) -> None:
        """Something may be compiled from here on."""
        if not self.closed:
            self.compilations.install()

    def remove(self) -> None:
        """Takes all away at once; not from inside an optimizer's step."""
        self._always.remove()

    def fail(self, error: Exception) -> None:
        """An error of our own: what was seen so far is kept, and the script goes on."""
        self.facts.failed(error)
        self.closed = True
        last = (
            partial(self._take_away, self._course.end_close_watch),
            self._course.close,
            self._always.remove_later,
            partial(self._publish, self.facts),
        )
        for one in last:
            with suppress(Exception):  # what failed may fail again
                one()

    def _take_away(self, end_step: Callable[[], None]) -> None:
        """Takes away whatever is put for some steps alone: what was put last goes first, whatever fails at that."""
        with ExitStack() as ways:
            if self.closed:
                ways.callback(self.compilations.remove)
            for way in (self._loaders.remove, self._closely.remove, end_step, self._graphs.remove):
                ways.callback(way)
            ways.callback(self._compiling.remove)

    def _after_boundary(self) -> None:
        if self._course.over:
            self.close("enough was seen" if not self._course.measured() else "enough steps were seen")
        elif self._course.is_lost():  # it may well be the script's last
            self._close = self._graphs.on = False
            self._take_away(self._course.relieve)

    def _collect(self, *, wait: bool = False) -> Facts:
        """All facts so far."""
        return gathered(self._course, self._loaders, self._optimizers, self._graphs, self._pauses, wait=wait)

    def begin(self, kind: Kind) -> Phase:
        self._graphs.on, self._optimizers.on = kind == "habits", kind == "instrumented"
        self._forwards, self._close = 0, kind in CLOSE
        self.calls.begin()
        self._compiling.listen()
        self._loaders.begin(timed=kind == "habits", counted=self._close)
        if self._close:
            self._course.mark_ms = self._course.mark_ms or mark_ms(self.timeline.clock)
            self._closely.install()
        if self.facts.by_hand:
            return "update"
        return "python" if self._loaders.used else self._making()

    def ready(self) -> None:
        """All that watch it closely have begun."""
        wanted = self._course.wants_backwards()
        self._hears = self._close or wanted or self.facts.updates_inside > 0
        if wanted:
            self._always.wrap_backward()

    def flags(self) -> list[str]:
        """What has happened in the step that doesn't in every one."""
        self._always.unwrap_backward()
        self._pauses.trains()
        return self._loaders.drawn()

    def again(self) -> None:
        """The step begins anew."""
        self._pauses.trains()
        self._loaders.forget()

    def end(self, *, usual: bool = True) -> None:
        """A step has ended."""
        self._graphs.end_evaluation()
        self._closely.remove()
        self._loaders.end()
        self.calls.end(self._course.step)
        if self._close and not self._course.is_early:
            self.facts.functional = not self.calls.number
            if usual and not self.calls.tells_samples:
                self._loaders.rows = None
        self._graphs.step_done(usual=usual)
        amend_batch(self.facts, self._loaders, self._graphs.trained_on)

    def anew(self) -> None:
        """The script trains in another loop."""
        self.facts.batch, self.facts.notes, self.facts.trace = [], [], None
        self._optimizers.forget()
        self._loaders = Loaders(self.sites)
        self._graphs.remove()
        self._graphs = Graphs(self.sites, self.fail, self._optimizers.parameters, self.mine)
        self._pauses = Pauses(self._graphs, lambda: self._course.step)

    def between(self) -> None:
        """A step has ended: what was seen is published now and then, outside of any step."""
        if time.monotonic() - self._published > _PUBLISHED_S and self._course.measured():
            self._publish(self._collect())
            self._published = time.monotonic()

    def _event(self, event: Event, at: Any) -> None:
        with self._own_work():
            self._course.happened(event, at)
            self._after_boundary()

    @contextmanager
    def _own_work(self) -> Iterator[None]:
        """What is done in here is the watch's own, and not watched."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def _making(self) -> Phase:
        """What comes before the forward: making the batch, unless there are no modules to show where a forward begins."""
        return "forward" if self.facts.functional else "batch"

    def mine(self) -> bool:
        """Whether this is the thread that trains, and not in something of the watch's own."""
        return not (self.closed or self._busy) and self._thread in (None, threading.get_ident())

    def hears_backwards(self) -> bool:
        """In a step of which the end alone is noted, a backward that doesn't end it tells nothing."""
        return (self._hears or self._pauses.evaluating) and self.mine()

    def _trains(self) -> None:
        """From the first backward or update on, its thread is the one that's watched."""
        if self._thread is None:
            self._thread = threading.get_ident()
            self._course.trains()
            self._begins()
        self._pauses.trains()

    @safe
    def backward_began(self, args: tuple, kwargs: dict) -> Any:
        self._trains()
        self._backwards += 1
        self._after_boundary()
        self.timeline.enter("backward")
        if self._backwards == 1 and not self._optimizers.inside:
            self.calls.backward()
        if self._graphs.on and self._backwards == 1:
            self._graphs.backward(args, self.sites.caller(4), self.facts.updates)
            self._graphs.look_around(self.facts.anchor)
        return time.perf_counter()

    @safe
    def backward_ended(self, token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
        self._backwards = max(0, self._backwards - 1)
        self.timeline.leave()
        if self._backwards or self.closed or token is None:
            return
        self._optimizers.nested(time.perf_counter() - token)
        self._graphs.backward_over()
        updates_now = self.facts.by_hand or self._optimizers.inside
        creates_graph = len(args) > 3 and bool(args[3])
        self.timeline.turn("loss" if creates_graph else "update" if updates_now else "python")
        if self._course.step is None:  # before the first one is timed
            self.facts.device = self.timeline.follow(args[0])

    @safe
    def backward_over(self, token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
        if done and not self._backwards and not self._optimizers.inside and self._course.wants_backwards():
            at = self.timeline.instant()
            self._event(Event("backward", self.sites.caller(4)), at)

    @safe
    def update_began(self, optimizer: Any, args: tuple, kwargs: dict) -> Any:
        if not self.mine():
            return None
        self._trains()
        self.timeline.enter("update")
        self._optimizers.began(optimizer)
        return self._closures.heard(args, kwargs) if self._close else None

    @safe
    def update_ended(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        inside = self._backwards > 0
        if not self.mine():
            self.facts.updates_inside += inside and self.facts.device != "cpu"  # it has a thread for its backwards
            return
        self.timeline.leave()
        at = self._course.stretch.ended or self.timeline.instant()  # what is done from here on is the watch's own
        self._sparing.end()
        self._graphs.updated(optimizer)
        outermost = self._optimizers.ended(optimizer)
        self.facts.updates_inside += inside
        if outermost and not inside:
            where = self.sites.caller(5)
            event = Event("update", where, self._optimizers.number(optimizer, where))
            self._event(event, at)
            if not (self._hears or self._optimizers.nests):
                self._sparing.begin(optimizer, event, self._loaders)

    @safe
    def loading_began(self, args: tuple, kwargs: dict) -> Any:
        self.timeline.load()
        return time.perf_counter()

    @safe
    def loading_ended(self, token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
        self.timeline.leave()
        spent = time.perf_counter() - (token or 0.0)
        if isinstance(args[0], DataLoader) and not (done and self._loaders.opened_again(result, spent)):
            self._sparing.unusual()
        evaluates = self._pauses.evaluating or not torch.is_grad_enabled()
        if done and self._loaders.drew(args[0], result, spent, evaluates=evaluates) and self.timeline.on:
            self.calls.drawn = True
            self.timeline.turn(self._making())

    @safe
    def saving_began(self, args: tuple, kwargs: dict) -> Any:
        self._sparing.unusual()
        self.timeline.enter("logging")
        return time.perf_counter()

    @safe
    def saving_ended(self, token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
        self.timeline.leave()
        self._pauses.saved(self.sites.caller(), token)

    @safe
    def threads_set(self, token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
        self.facts.threads_set_at = self.sites.calls_itself() or self.facts.threads_set_at

    @safe
    def mode_began(self, args: tuple, kwargs: dict) -> Any:
        self._pauses.mode_began()

    @safe
    def mode_ended(self, token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
        self._pauses.mode_ended(training=kwargs.get("mode", args[1] if len(args) > 1 else True))
        if self._pauses.evaluating:
            self._sparing.unusual()

    @safe
    def no_grad_ended(self, token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
        """An update that is written out by hand is over when gradients count again."""
        if self.facts.by_hand and self.timeline.depth == 1 and self.timeline.current == "update":
            self.timeline.turn(self._making())

    @safe
    def forward_began(self, args: tuple, kwargs: dict) -> Any:
        self._forwards += 1
        if self._forwards > 1 or self.timeline.loading:
            return None
        self._after_boundary()
        self.calls.began(args, kwargs, self._making(), again=self._backwards > 0)
        return time.perf_counter()

    @safe
    def forward_ended(self, token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
        self._forwards = max(0, self._forwards - 1)
        if self._forwards or token is None:
            return
        self.timeline.leave()
        spent = time.perf_counter() - token
        self._optimizers.nested(spent)
        if self._backwards and not self._optimizers.inside:
            self._graphs.recomputed(spent, self.sites.caller(4))
        called = None if self._backwards else self.calls.ended(args, kwargs, result)
        if called is not None and done and self._graphs.on:
            lines = self.sites.callers(4)
            self._graphs.forward(args, kwargs, result, spent, lines, called)
        if called is not None and called.graded and self.timeline.on:
            note_batch(self.facts, self._loaders, called)

    @safe
    def step_computes(self, batch: Any) -> None:
        """A step that asks nothing of torch begins to compute; its parts are told to the timeline by those who know."""
        self._trains()
        self.calls.called(0)
        self.facts.trained += 1
        inputs = batch[0] if isinstance(batch, tuple | list) and batch else batch
        if self.timeline.on:
            note_batch(self.facts, self._loaders, given([inputs] if isinstance(inputs, Tensor) else []))
