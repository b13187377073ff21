"""Follows the user line that a thread executes, by Python's tracing, in a few steps, and marks it in torch's profiler."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import CodeType, FrameType
from typing import Any

from torch import nn

from hotloop.core.records.profile_terms import Phase
from hotloop.core.torch_private import RecordFunctionFast, next_sequence_number
from hotloop.profiler.base.call_sites import is_step
from hotloop.profiler.base.transparency import can_keep_locals, clear_frame_variables, hide_from_compiler
from hotloop.profiler.timers.module_names import LOSS_NAME, ModuleName, ModulePlace, StepInputs
from hotloop.profiler.timers.modules import ModuleCallHooks

_SUSPENDED = CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR

Line = tuple[str, int]
"""File and line number."""


@hide_from_compiler
class LineTracer:
    """Follows the lines of user frames, from the innermost frame that runs at `begin`.

    A frame whose code may store its dictionary of variables isn't followed: Python would fill the dictionary at each
    line.

    Attributes:
        line: the innermost user line; None before the first line and while paused.
    """

    def __init__(self, is_own: Callable[[CodeType], bool], moved: Callable[[], None]) -> None:
        self._is_own, self._moved = is_own, moved
        self._own: dict[CodeType, bool] = {}
        self._lines: list[Line | None] = []
        self._frames: list[FrameType] = []
        self._ran: Counter[Line] = Counter()
        self._called: Counter[tuple[CodeType, int, int]] = Counter()
        self._on = self._entered = False

    @property
    def lines(self) -> Sequence[Line | None]:
        """All current lines, outermost first."""
        return self._lines

    @property
    def line(self) -> Line | None:
        return self._lines[-1] if self._lines else None

    @property
    def runs(self) -> Counter[Line]:
        """Number of runs of each line since `begin`, or of calls by one instruction on the line, if more."""
        found = self._ran.copy()
        for (code, line, _), often in self._called.items():
            found[code.co_filename, line] = max(found[code.co_filename, line], often)
        return found

    def functions(self) -> dict[Line, str]:
        """Returns the names of the user functions that ran, by their lines."""
        own = [code for code, is_own in self._own.items() if is_own]
        lines = ((code, line) for code in own for _, _, line in code.co_lines() if line is not None)
        return {(code.co_filename, line): code.co_qualname for code, line in lines}

    def begin(self) -> bool:
        """Returns False, and follows nothing, if a debugger or coverage tool traces already."""
        self._lines, self._ran, self._called = [], Counter(), Counter()
        if sys.gettrace() is not None:
            return False
        self._frames = list(self._running(sys._getframe(1)))
        for frame in reversed(self._frames):
            self._lines.append((frame.f_code.co_filename, frame.f_lineno))
            frame.f_trace = self._step
        self._on = True
        sys.settrace(self._call)
        return True

    def end(self) -> None:
        if not self._on:
            return
        sys.settrace(None)
        self._on = False
        for frame in [*self._frames, *self._running(sys._getframe(1))]:
            frame.f_trace = None
            clear_frame_variables(frame)
        self._lines, self._frames = [], []

    def pause(self) -> None:
        """Code from here on, as in a backward, is not called by the current line."""
        self._lines.append(None)

    def resume(self, depth: int) -> None:
        del self._lines[depth:]

    @property
    def depth(self) -> int:
        return len(self._lines)

    def _running(self, frame: FrameType | None) -> Iterator[FrameType]:
        while frame is not None and not is_step(frame.f_code):
            if self._owns(frame.f_code):
                yield frame
            frame = frame.f_back

    def _owns(self, code: CodeType) -> bool:
        own = self._own.get(code)
        if own is None:
            own = self._own[code] = self._is_own(code) and not can_keep_locals(code)
        return own

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        if not self._owns(frame.f_code):
            self._note_call(frame)
            return None
        if frame.f_code.co_flags & _SUSPENDED and all(known is not frame for known in self._frames):
            self._frames.append(frame)
        self._lines.append((frame.f_code.co_filename, frame.f_lineno))
        self._entered = True  # a lambda's first line is the line where it begins
        return self._step

    def _note_call(self, frame: FrameType) -> None:
        """Counts calls of library functions; resuming a generator is no call.

        Calls are counted by instruction, so that several modules called on one line don't count as a loop.
        """
        caller = frame.f_back
        if caller is not None and self._owns(caller.f_code) and not frame.f_code.co_flags & _SUSPENDED:
            self._called[caller.f_code, caller.f_lineno, caller.f_lasti] += 1

    def _step(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            now = (frame.f_code.co_filename, frame.f_lineno)
            self._ran[now] += 1
            if self._lines and (self._entered or self._lines[-1] != now):
                self._entered = False
                self._lines[-1] = now
                self._moved()
        elif event == "return" and self._lines:
            self._entered = False
            self._lines.pop()
            self._moved()
        return self._step


PhaseOfLines = Callable[[Phase, Iterable[Line | None]], Phase]
"""Corrects the timeline's phase by the user lines on the stack."""

MARK = "hotloop#"
_MAX_MARKS, _MAX_MARKS_PER_LINE = 100_000, 20_000
"""Limits per step; a line that runs so often is plain Python and calls no operators."""


@dataclass(frozen=True)
class TraceMark:
    """The state from a mark on.

    Attributes:
        number: of the next autograd node.
        place: the innermost module whose forward runs; None outside of modules.
        line: the user's line.
        phase: by the timeline and the lines on the stack.
        is_in_backward: whether a backward pass runs.
        timeline_phase: the phase by the timeline alone.
    """

    number: int
    place: ModulePlace | None
    line: Line | None
    phase: Phase
    is_in_backward: bool
    timeline_phase: Phase = "python"

    @property
    def module(self) -> ModuleName | None:
        """The module's name; `(loss)` outside of modules in the loss phase."""
        if self.place is None:
            return LOSS_NAME if self.phase == "loss" else None
        return self.place.name

    @property
    def executed_phase(self) -> Phase:
        """The phase of the executed code: a model's modules run forward, in whichever phase they are called."""
        if self.is_in_backward or self.place is None or self.place.name is None:
            return self.phase
        if self.place.name == LOSS_NAME:
            return "loss"
        return self.phase if self.place.name.is_part else "forward"


@hide_from_compiler
class TraceMarkers:
    """Leaves the marks of one step at a time.

    Attributes:
        marks: of the step, in order; mark n has the name `hotloop#n` in the profiler's record.
        full: whether the limit of marks was reached.
        lines: whether lines are followed.
        line_tracer: with the runs of lines, and their functions.
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
        self.line_tracer = LineTracer(is_own, self.mark)
        self._places: dict[int, ModulePlace] = {}
        self._inside: list[ModulePlace | None] = [None]
        self._outermost: ModulePlace | None = None
        self._inputs = StepInputs()
        self._marked: Counter[Line | None] = Counter()

    @property
    def alike(self) -> Iterable[tuple[ModulePlace, int]]:
        """Modules that share an input tensor (or slices of one) with others of their class, and how many share it."""
        return self._inputs.alike()

    def begin(self) -> None:
        self._inputs, self._marked = StepInputs(), Counter()
        self.marks, self.full, self._inside, self._outermost = [], False, [None], None
        self._module_hooks.open()
        self.lines = self.line_tracer.begin()
        self.mark()

    def end(self) -> None:
        self.line_tracer.end()
        self._module_hooks.close()
        self.mark()
        self._places = {key: place for key, place in self._places.items() if place.is_alive}

    def mark(self, deep: bool = False) -> None:
        """Leaves a mark; also called at changes of the phase."""
        if self.full:
            return
        self.full = len(self.marks) >= _MAX_MARKS
        deep = deep or self._module_hooks.depth > 0
        ground: Phase = "backward" if deep else self._phase()
        phase, line = self._line_phase(ground, self.line_tracer.lines), self.line_tracer.line
        if self.full or self._marked[line] >= _MAX_MARKS_PER_LINE:
            line = None  # the line is unknown from here on
            if not self.full and self._is_unchanged(phase, deep):
                return
        self._marked[line] += line is not None
        with RecordFunctionFast(f"{MARK}{len(self.marks)}"):
            number = next_sequence_number()
        self.marks.append(TraceMark(number, self._inside[-1], line, phase, deep, ground))

    def _is_unchanged(self, phase: Phase, deep: bool) -> bool:
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
        """Repeated calls of one network: the time between them is no loss."""
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
        inside, depth = len(self._inside), self.line_tracer.depth
        self._inside.append(None)
        self.line_tracer.pause()
        self.mark(deep=True)
        try:
            yield
        finally:
            del self._inside[inside:]
            self.line_tracer.resume(depth)
            self.mark()
