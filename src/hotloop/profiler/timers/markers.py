"""Marks in a profiler's record at which the module, the user's line or the phase changes, so that events find theirs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _RecordFunctionFast

from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.base.transparency import hide_from_compiler
from hotloop.profiler.hooks.module_calls import ModuleCallHooks
from hotloop.profiler.timers.line_tracer import Line, LineTracer
from hotloop.profiler.timers.module_names import LOSS_NAME, ModuleName, ModulePlace, StepInputs

PhaseOfLines = Callable[[Phase, Iterable[Line | None]], Phase]
"""Says the phase of what runs, by the timeline's and the user's lines on the stack."""

MARK = "hotloop#"
_MAX_MARKS = 100_000
"""Marks in a step at most."""
_MAX_MARKS_PER_LINE = 20_000
"""For each line at most: what is plain Python, and runs so often, calls no operators."""


@dataclass(frozen=True)
class TraceMark:
    """What holds from here on.

    Attributes:
        number: of the next node that autograd makes.
        place: of the innermost module whose forward runs; None outside of all.
        line: of the user's.
        phase: as whoever watches the phases says, and the lines that are on the stack.
        deep: whether this is inside of a backward pass.
        ground: the phase without the lines.
    """

    number: int
    place: ModulePlace | None
    line: Line | None
    phase: Phase
    is_in_backward: bool
    timeline_phase: Phase = "python"

    @property
    def module(self) -> ModuleName | None:
        """The module's name; `(loss)` outside of all, where the loss is computed."""
        if self.place is None:
            return LOSS_NAME if self.phase == "loss" else None
        return self.place.name

    @property
    def executed_phase(self) -> Phase:
        """The phase of what ran here: a model's modules run forward, whatever the phase was when they were called."""
        if self.is_in_backward or self.place is None or self.place.name is None:
            return self.phase
        if self.place.name == LOSS_NAME:
            return "loss"
        return self.phase if self.place.name.is_part else "forward"


@hide_from_compiler
class TraceMarkers:
    """Leaves the marks of one step at a time.

    Attributes:
        marks: of the step, in order; mark n lies in the profiler's record under the name `hotloop#n`.
        full: whether there were too many.
        lines: whether lines could be followed.
    """

    def __init__(
        self,
        is_own: Callable[[CodeType], bool],
        current_phase: Callable[[], Phase],
        turn: PhaseOfLines = lambda phase, lines: phase,
    ) -> None:
        self.marks: list[TraceMark] = []
        self.full = self.lines = False
        self._phase, self._line_phase = current_phase, turn
        self._module_hooks = ModuleCallHooks(self)
        self._line_tracer = LineTracer(is_own, self.mark)
        self._places: dict[int, ModulePlace] = {}
        self._inside: list[ModulePlace | None] = [None]
        self._outermost: ModulePlace | None = None
        self._inputs = StepInputs()
        self._marked: Counter[Line | None] = Counter()

    @property
    def runs(self) -> Mapping[Line, int]:
        """How often each line of the user's ran in the step."""
        return self._line_tracer.runs

    @property
    def functions(self) -> Mapping[Line, str]:
        """Which function of the user's a line is in, of those that ran."""
        return self._line_tracer.functions()

    @property
    def alike(self) -> Iterable[tuple[ModulePlace, int]]:
        """Modules of which many were given the same input in the step, or slices of one, and how many."""
        return self._inputs.alike()

    def begin(self) -> None:
        self._inputs, self._marked = StepInputs(), Counter()
        self.marks, self.full, self._inside, self._outermost = [], False, [None], None
        self._module_hooks.open()
        self.lines = self._line_tracer.begin()
        self.mark()

    def end(self) -> None:
        self._line_tracer.end()
        self._module_hooks.close()
        self.mark()
        self._places = {key: place for key, place in self._places.items() if place.is_alive}

    def mark(self, deep: bool = False) -> None:
        """Something has changed; also for whoever knows of a change of the phase."""
        if self.full:
            return
        self.full = len(self.marks) >= _MAX_MARKS
        deep = deep or self._module_hooks.depth > 0
        ground: Phase = "backward" if deep else self._phase()
        phase, line = self._line_phase(ground, self._line_tracer.lines), self._line_tracer.line
        if self.full or self._marked[line] >= _MAX_MARKS_PER_LINE:
            line = None  # of what comes it isn't known
            if not self.full and self._is_unchanged(phase, deep):
                return
        self._marked[line] += line is not None
        with _RecordFunctionFast(f"{MARK}{len(self.marks)}"):
            number = torch._C._autograd._get_sequence_nr()
        self.marks.append(TraceMark(number, self._inside[-1], line, phase, deep, ground))

    def _is_unchanged(self, phase: Phase, deep: bool) -> bool:
        """Whether what was marked last is just as a mark without a line would be."""
        last = self.marks[-1]
        return (last.line, last.place, last.phase, last.is_in_backward) == (None, self._inside[-1], phase, deep)

    def enter(self, module: nn.Module, args: tuple) -> int:
        place = self._places.get(id(module))
        if place is None or place.module is not module:
            place = self._places[id(module)] = ModulePlace.from_call(module, self._inside[-1], sys._getframe(2))
        if self._inside[-1] is None and not self._module_hooks.depth:
            self._note_network_call(place)
        self._inputs.note(place, self._inside[-1], args)
        self._inside.append(place)
        self.mark()
        return len(self._inside) - 1

    def _note_network_call(self, place: ModulePlace) -> None:
        """The loop calls a network; where it is the one of before, what lies between the two is no loss."""
        if place is self._outermost:
            for at in range(len(self.marks) - 1, -1, -1):
                mark = self.marks[at]
                if mark.place is not None or mark.is_in_backward or mark.phase != "loss":
                    break
                self.marks[at] = replace(mark, phase="python", timeline_phase="python")
        self._outermost = place

    def leave(self, before: int) -> None:
        del self._inside[before:]
        self.mark()

    @contextmanager
    def backward(self, roots: Any) -> Iterator[None]:
        inside, depth = len(self._inside), self._line_tracer.depth
        self._inside.append(None)
        self._line_tracer.pause()
        self.mark(deep=True)
        try:
            yield
        finally:
            del self._inside[inside:]
            self._line_tracer.resume(depth)
            self.mark()
