"""The sequence of a session's steps: detection of the step, differently recorded steps, and the end."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch

from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.base.phases import HostClock, LightSpan, StepClock, Timeline, durations, steps_until_warm
from hotloop.profiler.base.steps import (
    CLOSE,
    DEFAULT_STEPS,
    DELAYED,
    DISTURBING,
    Finder,
    Kind,
    Observer,
    ProfileFacts,
    StepFact,
    StepHooks,
    Tally,
    TrainingEvent,
    is_end,
    order,
)
from hotloop.profiler.hooks.optimizer_hooks import NextUpdates, OptimizerRecorder
from hotloop.profiler.hooks.resources import Cores, memory_in_use

_WARM_UP_S = 0.2
_MAX_WARM_UP_STEPS = 3
"""Least warm-up seconds; limit of warm-up steps after detection, if steps are short."""

_MAX_EVENTS = 24
"""Number of updates and backwards without a detected step, after which a period is recorded as a whole."""

_WHOLE_S = 3.0
_MAX_WHOLE_EVENTS = 200
"""Limits of such a period: seconds; updates and backwards."""

_MAX_STRAYS = 10
"""Number of other updates since the last step's end, after which the script is in another loop."""

_MAX_AWAITED = 400
"""Limit of additional backwards while waiting for an optimizer's updates."""

_LIKE_CLEAN: tuple[Kind, ...] = ("clocked", "sampled")
"""Disturbing kinds that take hardly longer than clean steps."""

_ABANDONED_S, _ABANDONED_FACTOR = 30.0, 20.0
"""Seconds, and multiple of the median step, after which a step is unlikely to end as usual."""

ENOUGH_STEPS = 8
"""Number of measured steps that are retained when another loop begins."""

LONGEST_S = 30.0
"""Seconds of recording, once `ENOUGH_STEPS` are measured."""

AWAITED_FACTOR = 8.0
"""Multiple of `LONGEST_S` while waiting for updates."""


class StepSequence:
    """Goes from step to step.

    Args:
        steps: number to measure, however long that takes; None for `DEFAULT_STEPS`, limited by `LONGEST_S`.
        stage: is notified of each step.
        observers: makes the observers once the step is known.
        found: whether steps are detected; else the caller calls `boundary` after each step.
        in_step: whether other ranks take the same steps, so that no clock may decide how steps are recorded.

    Attributes:
        facts: of the steps.
        timeline: of the current step.
        step: the current step; None between steps and before detection.
        is_over: whether enough steps are recorded.
        mark_ms: overhead of a timeline mark.
        light_span, rare_updates: skipped steps before a clean step; updates that end no step.
    """

    def __init__(
        self,
        steps: int | None,
        stage: StepHooks,
        observers: Callable[[], list[Observer]],
        *,
        found: bool,
        in_step: bool = False,
    ) -> None:
        self.facts = ProfileFacts(torch=True)
        self.timeline = Timeline(HostClock())
        self.step: StepFact | None = None
        self.is_over, self.mark_ms, self._is_alone = False, 0.0, False
        self.observers = ObserverGroup()
        self.cores, self.light_span, self.rare_updates = Cores(), LightSpan(), RareUpdates()
        self._listener, self._observers_of, self._pending = stage, observers, PendingSteps()
        self._finder, self._sought, self._strays, self._updates = Finder(), Tally(), Tally(), NextUpdates()
        self._steps, self._is_time_limited = steps or DEFAULT_STEPS, steps is None and not in_step
        self._anchor = None if found else TrainingEvent("update", "")
        self._must_find_step, self._is_in_step, self._remaining_kinds = found, in_step, order(self._steps)
        self._began: Any = None
        self._first_s: float | None = None
        self._warm_up_steps = self._awaited_steps = 0
        self._since = self._step_since = 0.0
        self._first: TrainingEvent | None = None
        self._early: list[tuple[TrainingEvent, StepFact]] = []

    def note_training(self) -> None:
        if self._first_s is None:
            self._first_s = time.perf_counter()

    def can_end_at_backward(self) -> bool:
        return self._must_find_step and (self._anchor is None or self._anchor.what == "backward")

    def add_event(self, event: TrainingEvent, at: Any = None) -> None:
        """Records an event that may end a step, at a clock mark; None is now."""
        self.facts.trained += 1
        self.facts.updates += event.what == "update"
        if not self._must_find_step:
            return
        if self._anchor is None:
            self._end_early(event, at)
            self._finder.record(event)
            self._anchor = self._finder.anchor()
            if self._anchor is not None and is_end(self._anchor, event):
                self._discard_step()
                self._begin_measuring()
            else:
                self._record_whole(event)
                self._begin_early()
        elif not is_end(self._anchor, event):
            self._note_stray(event)
        else:
            self.rare_updates.steps += 1
            self._is_alone = not self._strays.most
            if self._anchor.what == "update":
                self._strays.clear()
            self.boundary(at)

    @property
    def is_early(self) -> bool:
        return self.step is not None and self.step.kind == "early"

    def _begin_early(self) -> None:
        if self.step is None and self._anchor is None and not self.n_measured() and len(self._early) < _MAX_EVENTS:
            self._next_step("early")

    def _end_early(self, event: TrainingEvent, at: Any) -> None:
        """Stores the piece up to an event, for a script that ends before its step is known."""
        if self.step is None or not self.is_early:
            self._first = event if not self._early else self._first
            return
        self._early.append((event, self.step))
        self._end_step(at)
        self.facts.steps = []

    def use_early_steps(self) -> None:
        """Without measured steps, uses the pieces recorded before detection."""
        if self.n_measured() or self._first is None or not self._early:
            return
        self.read_device_steps(wait=True)
        if (early := early_steps(self._first, self._early)) is not None:
            self.facts.set_anchor(early[0])
            self.facts.steps = early[1]

    def _record_whole(self, event: TrainingEvent) -> None:
        self._sought.record(TrainingEvent(event.what, "", event.which))
        if self.step is None and self._sought.most == _MAX_EVENTS:
            self._since = time.perf_counter()
            self.observers = ObserverGroup(self._observers_of())
            self._next_step("whole")
        elif self.step is not None and (
            time.perf_counter() - self._since > _WHOLE_S or self._sought.most > _MAX_WHOLE_EVENTS
        ):
            self.end_whole_step()
            self.is_over = True

    def end_whole_step(self) -> None:
        if self.step is not None and self.step.kind == "whole":
            self._end_step()

    def _discard_step(self) -> None:
        if self.step is not None:
            self._listener.flags()
            self.end_observers()
            self._listener.end()
            self.step = None
        self.close()
        self.observers = ObserverGroup()

    def _note_stray(self, event: TrainingEvent) -> None:
        """Detects another training loop, or an optimizer after backwards were taken for steps."""
        assert self._anchor is not None
        by_hand = self._anchor.what == "backward"
        if event.what != "update":
            return
        if self.step is not None and not by_hand:
            self.rare_updates.record(event, self.step, self.light_span.passed)
        if self.n_measured() >= ENOUGH_STEPS and not by_hand:
            self._strays.record(event)
            self.is_over = self._is_time_limited and self._strays.most >= _MAX_STRAYS
            return
        if not self._strays.most and not by_hand:
            self._finder = Finder()
        self._strays.record(event)
        self._finder.record(event)
        found = self._finder.anchor()
        if found is not None and is_end(found, event) and (by_hand or self._strays.most >= _MAX_STRAYS):
            self._anchor = found
            self._restart()

    def _restart(self) -> None:
        self._discard_step()
        self._remaining_kinds, self._strays, self._awaited_steps = order(self._steps), Tally(), 0
        self._finder, self._updates, self.cores, self._first_s = Finder(), NextUpdates(), Cores(), time.perf_counter()
        self._listener.restart()
        self._begin_measuring()

    def _begin_measuring(self) -> None:
        assert self._anchor is not None
        self.facts.set_anchor(self._anchor)
        self._pending.drop_measured()
        self.rare_updates = RareUpdates()
        self.facts.steps, self.facts.between_ms, self.facts.warm_up_s, self.facts.awaited = [], {}, 0.0, False
        self._warm_up_steps = self.light_span.left = 0
        self._since = time.perf_counter()
        if not self.observers:
            self.observers = ObserverGroup(self._observers_of())
        self._next_step("warm-up")

    def boundary(self, at: Any = None) -> None:
        """Ends a step, at a clock mark or now, and begins the next."""
        self.note_training()
        if self.step is None:
            self._begin_measuring()
            return
        if self.light_span.left:
            self._pass_light_step()
            return
        self._end_step(at)
        self.read_device_steps()
        self._listener.between_steps()
        kind = self._next_kind()
        if kind is None:
            self.is_over = True
        else:
            self._next_step(kind)

    def _next_kind(self) -> Kind | None:
        watched_s = time.perf_counter() - (self._first_s or 0.0)
        is_short = self._is_in_step or watched_s < _WARM_UP_S
        if self._warm_up_steps < 1 or (is_short and self._warm_up_steps < _MAX_WARM_UP_STEPS):
            self._warm_up_steps += 1
            return "warm-up"
        if not self.facts.warm_up_s:
            self.facts.warm_up_s = watched_s
        if self._is_long():
            return None
        if not self._remaining_kinds:
            self._awaited_steps += 1
            return "settling" if self._awaited_steps <= _MAX_AWAITED and self._awaits_updates() else None
        kind = self._remaining_kinds[0]
        if self._is_in_step and kind in ("clean", "instrumented") and self.facts.steps[-1].kind in DISTURBING:
            return "settling"  # all ranks must decide alike
        if not self._is_in_step and kind == "clean":
            self.light_span.left = steps_until_warm(self.facts.steps) + self.rare_updates.extra_steps(self.n_measured())
        return self._remaining_kinds.pop(0)

    def _is_long(self) -> bool:
        passed_s = time.perf_counter() - self._since
        if not self._is_time_limited or passed_s <= LONGEST_S or self.n_measured() < ENOUGH_STEPS:
            return False
        return passed_s > AWAITED_FACTOR * LONGEST_S or not self._awaits_updates()

    def _awaits_updates(self) -> bool:
        """Whether backwards end steps so far, but updates may show later that steps are longer."""
        facts = self.facts
        facts.awaited = facts.by_hand and bool(self._strays.most or self._updates.is_expected())
        return facts.awaited

    def _pass_light_step(self) -> None:
        """Ends a skipped step, with as little work as before the clean step."""
        self.light_span.left -= 1
        assert self.step is not None
        self._listener.restart_step()
        self.facts.drop_step(self.step)
        self.count_light_steps()
        self.cores.begin()
        self._began = self.timeline.instant()

    def can_go_light(self, event: TrainingEvent) -> bool:
        """Returns whether the next steps are skipped, and end with this update and no other before it."""
        return self.light_span.left > 0 and self._is_alone and self._anchor is not None and is_end(self._anchor, event)

    def count_light_steps(self) -> None:
        passed, self.light_span.passed = self.light_span.passed, 0
        self.rare_updates.steps += passed
        self.facts.trained, self.facts.updates = self.facts.trained + passed, self.facts.updates + passed
        self._began = self.light_span.began if passed else self._began

    def n_measured(self) -> int:
        return sum(step.kind in ("clean", "instrumented") for step in self.facts.steps)

    def is_step_abandoned(self) -> bool:
        """Returns whether a disturbed step will hardly end as usual: the script has gone on to something else."""
        if self.step is None or self.step.kind not in DISTURBING or self._anchor is None:
            return False
        strays = self._anchor.what == "update" and self._strays.most >= _MAX_STRAYS
        passed_s = time.perf_counter() - self._step_since
        return strays or (passed_s > _ABANDONED_S and not self._is_in_step and self._is_held_up(_ABANDONED_FACTOR))

    def stop_detailed_step(self) -> None:
        """Ends detailed recording of the current step, which won't count; a later step replaces it."""
        assert self.step is not None
        if self.timeline.on:
            self._began = self.timeline.end()[0][0]
        self.end_observers()
        self._remaining_kinds.insert(0, self.step.kind)
        self.step.kind = "settling"

    def _is_held_up(self, times: float) -> bool:
        passed_ms = (time.perf_counter() - self._step_since) * 1e3
        known = [step.ms for step in self.facts.steps if step.kind in ("clean", "instrumented") and step.ms]
        return bool(known) and passed_ms > times * median(known)

    def _next_step(self, kind: Kind) -> None:
        self.step = StepFact(kind)
        ground = self._listener.begin(kind)
        self.observers.begin(kind)
        self._listener.observers_ready()
        self.cores.begin()
        if kind in CLOSE:
            self.timeline.begin(ground)
        else:
            self._began = self.timeline.instant()
        self._step_since = time.perf_counter()

    def _end_step(self, at: Any = None) -> None:
        step, together = self.step, 1 + self.light_span.passed
        assert step is not None
        self.count_light_steps()
        at = self.timeline.instant() if at is None else at
        whole: list[tuple[Any, Phase]] = [(self._began, "unattributed"), (at, "unattributed")]
        marks = self.timeline.end(at) if self.timeline.on else whole
        step.cpu_ms, step.system_ms, step.pages = (use / together for use in self.cores.end(clean=step.kind == "clean"))
        step.flags += self._listener.flags()
        usual = self._is_usual(step)
        self.end_observers(drop=step.kind in DISTURBING and step.kind != "whole" and not usual)
        if step.kind in CLOSE:  # a slow system call
            step.memory = memory_in_use(self.facts.device)
        self._listener.end(usual=usual)
        self._pending.add(step, marks)
        self.facts.steps.append(step)
        self.step = None

    def _is_usual(self, step: StepFact) -> bool:
        held_up = step.kind in _LIKE_CLEAN and self._is_held_up(DELAYED)
        return self.facts.has_usual_flags(step) and not held_up

    def end_observers(self, *, drop: bool = True) -> None:
        if self.timeline.on:
            self.timeline.end()
        if self.step is not None:
            self.observers.end(self.step.kind, drop=drop)

    def close(self) -> None:
        self._awaits_updates()
        self.observers.close()

    def abandon(self) -> None:
        """In a forked child: removes the module observers."""
        if self.step is not None and self.step.kind in ("traced", "whole"):
            sys.settrace(None)
            torch._C._autograd._enable_record_function(False)
        self.timeline.on = False
        self.observers.drop_modules()

    def read_device_steps(self, *, wait: bool = False) -> None:
        """Reads clock marks of steps that the device has finished; with `wait`, of all."""
        if wait and self._pending and self.facts.device != "cpu":
            torch.accelerator.synchronize()
        self._pending.read(self.timeline.clock, self.mark_ms)


class ObserverGroup:
    """Observers of the current step's kind begin in order, and end in reverse order."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = list(observers)

    def __iter__(self) -> Iterator[Observer]:
        return iter(self._observers)

    def __len__(self) -> int:
        return len(self._observers)

    def begin(self, kind: Kind) -> None:
        for observer in self._observers:
            if kind in observer.kinds:
                observer.begin()

    def end(self, kind: Kind, *, drop: bool) -> None:
        for observer in reversed(self._observers):
            if kind in observer.kinds:
                observer.drop() if drop else observer.end()

    def close(self) -> None:
        with ExitStack() as ending:  # all are closed, even if one raises
            for observer in reversed(self._observers):
                ending.callback(observer.close)

    def drop_modules(self) -> None:
        """In a forked child: ends all but the profiler and the sampler, whose threads and locks are missing."""
        for observer in self._observers:
            if not {"traced", "sampled"}.intersection(observer.kinds):
                observer.drop()


class RareUpdates:
    """Counts updates of optimizers that don't end a step, in all steps: the few measured steps may be unrepresentative.

    Attributes:
        steps: number of ended steps.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._steps_with: defaultdict[int, list[int]] = defaultdict(list)

    def record(self, event: TrainingEvent, step: StepFact, uncounted: int) -> None:
        """Another optimizer has stepped in the current step, `uncounted` steps after `steps`."""
        steps, now = self._steps_with[event.which], self.steps + uncounted
        if not steps or steps[-1] != now:
            step.flags.append(_update_flag(event.which))
            steps.append(now)

    def extra_steps(self, measured: int) -> int:
        """Returns how many more steps to skip, so that not all steps of a kind have (or lack) a rare update.

        The number follows the Thue-Morse sequence, which never has a loop's period.
        """
        return (measured // 2).bit_count() % 2 if self._steps_with else 0

    def records(self, optimizers: OptimizerRecorder) -> list[dict[str, Any]]:
        """Returns each optimizer with its flag and its interval in steps."""
        known = {which: optimizers.class_and_line(which) for which in self._steps_with}
        return [
            {**known[which], "flag": _update_flag(which), "every": (at[-1] - at[0]) / (len(at) - 1)}
            for which, at in self._steps_with.items()
            if len(at) > 1
        ]


def _update_flag(which: int) -> str:
    return f"update {which}"


def early_steps(
    first: TrainingEvent, pieces: Sequence[tuple[TrainingEvent, StepFact]]
) -> tuple[TrainingEvent, list[StepFact]] | None:
    """Joins pieces of time to steps; returns the event that ends a step, and the steps; None without a whole step.

    Args:
        first: the event before the first piece.
        pieces: each with the event at its end.
    """
    finder = Finder()
    for event in (first, *(event for event, _ in pieces)):
        finder.record(event)
    anchor = finder.guess()
    steps: list[StepFact] = []
    step: StepFact | None = StepFact("instrumented") if is_end(anchor, first) else None
    for event, piece in pieces:
        if step is not None:
            _add_piece(step, piece)
        if is_end(anchor, event):
            steps += [step] if step is not None else []
            step = StepFact("instrumented")
    return (anchor, steps) if steps else None


def _add_piece(step: StepFact, piece: StepFact) -> None:
    step.ms += piece.ms
    step.cpu_ms += piece.cpu_ms
    step.calls += piece.calls
    step.memory = piece.memory
    step.flags += [flag for flag in piece.flags if flag not in step.flags]
    for phase, ms in piece.phases.items():
        step.phases[phase] = step.phases.get(phase, 0.0) + ms
    for what, ms in piece.apart_ms.items():
        step.apart_ms[what] = step.apart_ms.get(what, 0.0) + ms


class PendingSteps:
    """Steps whose marks the device has not reached yet, in order."""

    def __init__(self) -> None:
        self._steps: list[tuple[StepFact, list[tuple[Any, Phase]]]] = []

    def __bool__(self) -> bool:
        return bool(self._steps)

    def add(self, step: StepFact, marks: list[tuple[Any, Phase]]) -> None:
        self._steps.append((step, marks))

    def drop_measured(self) -> None:
        """Drops all but early steps."""
        self._steps = [(step, marks) for step, marks in self._steps if step.kind == "early"]

    def read(self, clock: StepClock, mark_ms: float) -> None:
        """Fills in the times of finished steps, less the overhead of a mark."""
        while self._steps and clock.has_passed(self._steps[0][1][-1][0]):
            step, marks = self._steps.pop(0)
            step.ms = clock.ms(marks[0][0], marks[-1][0])
            has_phases = step.kind in ("early", "instrumented", "whole")
            step.phases = durations(marks, clock, mark_ms) if has_phases else {}
