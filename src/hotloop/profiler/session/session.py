"""The profiler session of a training thread: turns torch's events into phases, steps and slow patterns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.autograd.evaluation_pauses import EvaluationPauses
from hotloop.profiler.autograd.patterns import AutogradPatterns
from hotloop.profiler.base.call_sites import CallSites
from hotloop.profiler.base.schedule import CLOSE, Kind, Observer
from hotloop.profiler.base.step_detection import TrainingEvent
from hotloop.profiler.base.step_facts import ProfileFacts
from hotloop.profiler.hooks.dataloaders import LoaderRecorder
from hotloop.profiler.hooks.forward_calls import ForwardCalls
from hotloop.profiler.hooks.optimizer_hooks import ClosurePhases, OptimizerRecorder
from hotloop.profiler.hooks.phase_hooks import PhaseHooks
from hotloop.profiler.hooks.torch_hooks import CompilePause, TorchHooks, TorchListener, measure_mark_ms, stop_on_error
from hotloop.profiler.session.light_steps import LightMode
from hotloop.profiler.session.optimizer_facts import amend_batch, gather_facts, note_batch
from hotloop.profiler.session.step_sequence import StepSequence
from hotloop.profiler.trace.inductor_kernels import CompilationRecorder

_PUBLISH_EVERY_S = 1.0
"""Interval of publishing all facts, for a process that may be killed."""


class ProfilerSession(TorchListener):
    """Receives events, and records facts.

    Args:
        steps, found, in_step: see `StepSequence`.
        publish: receives all facts so far about every second, and at the end.
        observers: makes the observers once the step is known.
        compilations: records of compilations, if started earlier.
        trains: is called before the first backward or update.

    Attributes:
        facts, calls: the recorded facts; the module calls of the loop.
        timeline: of the current step.
        closed: whether recording has ended.
    """

    def __init__(
        self,
        steps: int | None,
        sites: CallSites,
        publish: Callable[[ProfileFacts], None],
        observers: Callable[[ProfilerSession], list[Observer]],
        *,
        found: bool = True,
        in_step: bool = False,
        compilations: CompilationRecorder | None = None,
        trains: Callable[[], None] = lambda: None,
    ) -> None:
        self.closed, self.sites, self.compilations = False, sites, compilations or CompilationRecorder()
        self._sequence = StepSequence(steps, self, lambda: observers(self), found=found, in_step=in_step)
        self.facts, self.timeline = self._sequence.facts, self._sequence.timeline
        self._publish, self._on_training, self._records_all_backwards = publish, trains, True
        self._hooks, self._phase_hooks = TorchHooks(self, self._sequence.light_span), PhaseHooks(self, self.timeline)
        self._light_mode, self.calls = LightMode(self._sequence, self._hooks, sites), ForwardCalls(self.timeline)
        self._compile_pause = CompilePause(self._phase_hooks.suspend, self._phase_hooks.resume)
        self._loaders, self._optimizers = LoaderRecorder(sites), OptimizerRecorder(sites)
        self._patterns = AutogradPatterns(sites, self.fail, self._optimizers.parameters, self.is_training_thread)
        self._pauses = EvaluationPauses(self._patterns, lambda: self._sequence.step)
        self._closures = ClosurePhases(
            self.is_training_thread, self.timeline, self._batch_phase, self._optimizers.closure_called
        )
        self._thread: int | None = None
        self._backwards, self._forwards, self._is_detailed, self._is_busy = 0, 0, False, False
        self._published_at = float("inf") if in_step else time.monotonic()  # work of one rank delays the others

    def install(self) -> None:
        self._hooks.install()
        self._publish(self.facts)

    @stop_on_error
    def boundary(self) -> None:
        if not self.closed:
            with self._without_recording():
                self._sequence.boundary()
                self._after_boundary()

    def abandon(self) -> None:
        """In a forked child: ends recording and removes all hooks."""
        if self.closed:
            return
        self.closed = True
        self._remove_step_hooks(self._sequence.abandon)
        self._hooks.remove()

    @stop_on_error
    def close(self, why: str = "") -> None:
        """Ends recording; optimizer hooks are removed at the next backward, since one of them may call this."""
        if self.closed:
            return
        self.closed = True
        self._pauses.end_evaluation()  # before the step ends
        self._sequence.end_whole_step()
        self._sequence.use_early_steps()
        self._remove_step_hooks(self._sequence.end_observers)
        self._hooks.remove_later()
        self.facts.closed = why
        facts = self._collect(wait=True)
        self._sequence.close()
        self._publish(facts)

    def note_compilations(self) -> None:
        if not self.closed:
            self.compilations.install()

    def remove(self) -> None:
        """Removes all hooks at once; may not be called inside an optimizer's step."""
        self._hooks.remove()

    def fail(self, error: Exception) -> None:
        """Ends recording by an internal error; facts so far are published, and the script goes on."""
        self.facts.record_failure(error)
        self.closed = True
        for action in (
            partial(self._remove_step_hooks, self._sequence.end_observers),
            self._sequence.close,
            self._hooks.remove_later,
            partial(self._publish, self.facts),
        ):
            with suppress(Exception):  # the same error may recur
                action()

    def _remove_step_hooks(self, end_step: Callable[[], None]) -> None:
        """Removes the hooks of the step in reverse order of installation, even if one removal raises."""
        with ExitStack() as stack:
            if self.closed:
                stack.callback(self.compilations.remove)
            for remove in (self._loaders.remove, self._phase_hooks.remove, end_step, self._patterns.remove):
                stack.callback(remove)
            stack.callback(self._compile_pause.remove)

    def _after_boundary(self) -> None:
        if self._sequence.is_over:
            self.close("enough was recorded" if not self._sequence.n_measured() else "enough steps were recorded")
        elif self._sequence.is_step_abandoned():  # perhaps the script's last step
            self._is_detailed = self._patterns.on = False
            self._remove_step_hooks(self._sequence.stop_detailed_step)

    def _collect(self, *, wait: bool = False) -> ProfileFacts:
        return gather_facts(self._sequence, self._loaders, self._optimizers, self._patterns, self._pauses, wait=wait)

    def begin(self, kind: Kind) -> Phase:
        self._patterns.on, self._optimizers.on = kind == "habits", kind == "instrumented"
        self._forwards, self._is_detailed = 0, kind in CLOSE
        self.calls.begin()
        self._compile_pause.listen()
        self._loaders.begin(timed=kind == "habits", counted=self._is_detailed)
        if self._is_detailed:
            self._sequence.mark_ms = self._sequence.mark_ms or measure_mark_ms(self.timeline.clock)
            self._phase_hooks.install()
        if self.facts.by_hand:
            return "update"
        return "python" if self._loaders.used else self._batch_phase()

    def observers_ready(self) -> None:
        may_end_step = self._sequence.can_end_at_backward()
        self._records_all_backwards = self._is_detailed or may_end_step or self.facts.updates_inside > 0
        if may_end_step:
            self._hooks.wrap_backward()

    def flags(self) -> list[str]:
        self._hooks.unwrap_backward()
        self._pauses.end_evaluation()
        return self._loaders.drawn_loaders()

    def restart_step(self) -> None:
        self._pauses.end_evaluation()
        self._loaders.forget_step()

    def end(self, *, usual: bool = True) -> None:
        self._patterns.end_evaluation()
        self._phase_hooks.remove()
        self._loaders.end()
        self.calls.end(self._sequence.step)
        if self._is_detailed and not self._sequence.is_early:
            self.facts.functional = not self.calls.number
            if usual and not self.calls.has_sample_count:
                self._loaders.rows = None
        self._patterns.step_done(usual=usual)
        amend_batch(self.facts, self._loaders, self._patterns.trained_on)

    def restart(self) -> None:
        self.facts.batch, self.facts.notes, self.facts.trace = [], [], None
        self._optimizers.forget()
        self._loaders = LoaderRecorder(self.sites)
        self._patterns.remove()
        self._patterns = AutogradPatterns(self.sites, self.fail, self._optimizers.parameters, self.is_training_thread)
        self._pauses = EvaluationPauses(self._patterns, lambda: self._sequence.step)

    def between_steps(self) -> None:
        if time.monotonic() - self._published_at > _PUBLISH_EVERY_S and self._sequence.n_measured():
            self._publish(self._collect())
            self._published_at = time.monotonic()

    def _add_event(self, event: TrainingEvent, at: Any) -> None:
        with self._without_recording():
            self._sequence.add_event(event, at)
            self._after_boundary()

    @contextmanager
    def _without_recording(self) -> Iterator[None]:
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def _batch_phase(self) -> Phase:
        """The phase before the forward; without modules, the begin of the forward is unknown."""
        return "forward" if self.facts.functional else "batch"

    def is_training_thread(self) -> bool:
        """Whether this is the training thread, outside of the profiler's own work."""
        return not (self.closed or self._is_busy) and self._thread in (None, threading.get_ident())

    def should_record_backward(self) -> bool:
        """If only the step's end is recorded, backwards that don't end the step are ignored."""
        return (self._records_all_backwards or self._pauses.is_evaluating) and self.is_training_thread()

    def _note_training(self) -> None:
        """The thread of the first backward or update is the training thread."""
        if self._thread is None:
            self._thread = threading.get_ident()
            self._sequence.note_training()
            self._on_training()
        self._pauses.end_evaluation()

    @stop_on_error
    def backward_began(self, args: tuple, kwargs: dict) -> Any:
        self._note_training()
        self._backwards += 1
        self._after_boundary()
        self.timeline.enter("backward")
        if self._backwards == 1 and not self._optimizers.is_inside:
            self.calls.backward()
        if self._patterns.on and self._backwards == 1:
            self._patterns.backward(args, self.sites.caller_line(4), self.facts.updates)
            self._patterns.note_modes(self.facts.anchor)
        return time.perf_counter()

    @stop_on_error
    def backward_ended(self, token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
        self._backwards = max(0, self._backwards - 1)
        self.timeline.leave()
        if self._backwards or self.closed or token is None:
            return
        self._optimizers.exclude_time(time.perf_counter() - token)
        self._patterns.backward_over()
        updates_now = self.facts.by_hand or self._optimizers.is_inside
        creates_graph = len(args) > 3 and bool(args[3])
        self.timeline.turn("loss" if creates_graph else "update" if updates_now else "python")
        if self._sequence.step is None:  # before the first one is timed
            self.facts.device = self.timeline.use_clock_of(args[0])

    @stop_on_error
    def backward_done(self, token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
        if done and not self._backwards and not self._optimizers.is_inside and self._sequence.can_end_at_backward():
            at = self.timeline.instant()
            self._add_event(TrainingEvent("backward", self.sites.caller_line(4)), at)

    @stop_on_error
    def update_began(self, optimizer: Any, args: tuple, kwargs: dict) -> Any:
        if not self.is_training_thread():
            return None
        self._note_training()
        self.timeline.enter("update")
        self._optimizers.began(optimizer)
        return self._closures.wrap_closure(args, kwargs) if self._is_detailed else None

    @stop_on_error
    def update_ended(self, optimizer: Any, args: tuple, kwargs: dict) -> None:
        inside = self._backwards > 0
        if not self.is_training_thread():
            self.facts.updates_inside += inside and self.facts.device != "cpu"  # backward has its own thread
            return
        self.timeline.leave()
        at = self._sequence.light_span.ended or self.timeline.instant()  # the rest is overhead
        self._light_mode.end()
        self._patterns.optimizer_stepped(optimizer)
        outermost = self._optimizers.ended(optimizer)
        self.facts.updates_inside += inside
        if outermost and not inside:
            where = self.sites.caller_line(5)
            event = TrainingEvent("update", where, self._optimizers.number(optimizer, where))
            self._add_event(event, at)
            if not (self._records_all_backwards or self._optimizers.has_nested):
                self._light_mode.begin(optimizer, event, self._loaders)

    @stop_on_error
    def loading_began(self, args: tuple, kwargs: dict) -> Any:
        self.timeline.load()
        return time.perf_counter()

    @stop_on_error
    def loading_ended(self, token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
        self.timeline.leave()
        spent = time.perf_counter() - (token or 0.0)
        if isinstance(args[0], DataLoader) and not (done and self._loaders.iterator_made(result, spent)):
            self._light_mode.note_unusual()
        evaluates = self._pauses.is_evaluating or not torch.is_grad_enabled()
        if done and self._loaders.batch_drawn(args[0], result, spent, evaluates=evaluates) and self.timeline.on:
            self.calls.has_new_batch = True
            self.timeline.turn(self._batch_phase())

    @stop_on_error
    def saving_began(self, args: tuple, kwargs: dict) -> Any:
        self._light_mode.note_unusual()
        self.timeline.enter("logging")
        return time.perf_counter()

    @stop_on_error
    def saving_ended(self, token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
        self.timeline.leave()
        self._pauses.checkpoint_saved(self.sites.caller_line(), token)

    @stop_on_error
    def threads_set(self, token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
        self.facts.threads_set_at = self.sites.direct_caller_line() or self.facts.threads_set_at

    @stop_on_error
    def mode_began(self, args: tuple, kwargs: dict) -> Any:
        self._pauses.mode_began()

    @stop_on_error
    def mode_ended(self, token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
        self._pauses.mode_ended(training=kwargs.get("mode", args[1] if len(args) > 1 else True))
        if self._pauses.is_evaluating:
            self._light_mode.note_unusual()

    @stop_on_error
    def no_grad_ended(self, token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
        """Re-enabled gradients end a hand-written update."""
        if self.facts.by_hand and self.timeline.depth == 1 and self.timeline.current == "update":
            self.timeline.turn(self._batch_phase())

    @stop_on_error
    def forward_began(self, args: tuple, kwargs: dict) -> Any:
        self._forwards += 1
        if self._forwards > 1 or self.timeline.loading:
            return None
        self._after_boundary()
        self.calls.began(args, kwargs, self._batch_phase(), again=self._backwards > 0)
        return time.perf_counter()

    @stop_on_error
    def forward_ended(self, token: Any, args: tuple, kwargs: dict, result: Any, done: bool) -> None:
        self._forwards = max(0, self._forwards - 1)
        if self._forwards or token is None:
            return
        self.timeline.leave()
        spent = time.perf_counter() - token
        self._optimizers.exclude_time(spent)
        if self._backwards and not self._optimizers.is_inside:
            self._patterns.note_recomputation(spent, self.sites.caller_line(4))
        called = None if self._backwards else self.calls.ended(args, kwargs, result)
        if called is not None and done and self._patterns.on:
            lines = self.sites.caller_lines(4)
            self._patterns.forward(args, kwargs, result, spent, lines, called)
        if called is not None and called.has_gradient and self.timeline.on:
            note_batch(self.facts, self._loaders, called)
