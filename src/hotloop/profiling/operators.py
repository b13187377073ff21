"""Runs a few steps under torch's profiler: which operators ran, for which module, from which line of the user's."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import median
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import ProfilerActivity, ProfilerConfig, ProfilerState

from hotloop.counting import Counts, operator_counts
from hotloop.profiles import OperatorTime, Phase
from hotloop.profiling.chrome import Span, spans_of, write_trace
from hotloop.profiling.compiled import Compilations, Launch
from hotloop.profiling.events import Event, Operator, Reader, copied, walked
from hotloop.profiling.following import Line
from hotloop.profiling.naming import LOSS, Name, Namer
from hotloop.profiling.trail import Trail, Turn
from hotloop.profiling.tree import spelled, upwards

_SHAPES = 8
"""Of so many inputs at most are shapes given."""
_SHOWN = 1000
"""Records that are given at most, those that take longest."""


class _Key(NamedTuple):
    """What makes calls of operators one record."""

    name: str
    phase: Phase
    module: Name | None
    line: Line | None
    shapes: tuple[str, ...]
    dtype: str
    device: str
    copies: str
    used: bool | None


class _Sum:
    """What the calls of one record come to, over all steps traced."""

    def __init__(self) -> None:
        self.calls, self.ns = 0, 0.0
        self.flops: float | None = 0.0
        self.bytes: float | None = 0.0

    def add(self, ns: float, flops: float | None, bytes_: float | None) -> None:
        self.calls += 1
        self.ns += ns
        self.flops = None if flops is None or self.flops is None else self.flops + flops
        self.bytes = None if bytes_ is None or self.bytes is None else self.bytes + bytes_


class Tracer:
    """Traces the steps between `begin()` and `end()`; in between nothing of it is installed.

    Attributes:
        notes: what it couldn't see, in sentences.
    """

    def __init__(
        self,
        is_own: Callable[[CodeType], bool],
        place: Callable[[str, int], str],
        current_phase: Callable[[], Phase] = lambda: "python",
        namer: Namer | None = None,
        compilations: Compilations | None = None,
        turn: Turn = lambda phase, lines: phase,
    ) -> None:
        """
        Args:
            is_own: whether code is the user's, and not a library's.
            place: `file:line`, as records give it.
            current_phase: of the step.
            compilations: what was compiled since the script began.
            namer: that the module clock uses too, so that both give the same names.
            turn: says the phase by the lines that run, too.
        """
        self.notes: list[str] = []
        self._place, self._namer = place, namer or Namer()
        self._compilations = compilations or Compilations()
        self._trail = Trail(is_own, current_phase, turn)
        self._sums: dict[_Key, _Sum] = defaultdict(_Sum)
        self._walls: dict[tuple[Name | None, Phase], int] = defaultdict(int)
        self._traced: dict[Phase, int] = defaultdict(int)
        self._grounds: list[dict[tuple[Phase, Phase], int]] = []
        self._line_runs: Counter[Line] = Counter()
        self._alike: dict[Name, int] = {}
        self._steps = 0
        self._fused: dict[Name, set[Name | None]] = defaultdict(set)
        self._around: dict[Name, Name | None] = {}
        self._compiled_ns: dict[Phase, float] = defaultdict(float)
        self._spans: list[Span] = []
        self._given: tuple[int, list[OperatorTime]] | None = None
        self._on = False

    def begin(self) -> None:
        """A step starts, on this thread; one under a profiler of the script's own is not traced."""
        if torch.autograd.profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled():
            self._note("The script runs a profiler of its own, so no operators were traced under it.")
            return
        with _quiet():
            torch.autograd._prepare_profiler(_config(), _activities())
            torch.autograd._enable_profiler(_config(), _activities())
        self._compilations.begin()
        self._trail.begin()
        self._on = True
        if not self._trail.lines:
            self._note("A debugger or a coverage tool traces the script, so operators have no lines.")

    def end(self) -> None:
        """The step has ended: its operators are read, and everything is taken away again."""
        if not self._on:
            return
        self._on = False
        self._trail.end()
        self._compilations.end()
        events = [_event(raw) for raw in torch.autograd._disable_profiler().events()]
        if self._trail.full:
            self._note("A traced step ran too many lines; what came last in it has no module and no line of its own.")
        self._namer.name([mark.place for mark in self._trail.marks if mark.place is not None])
        reader = Reader(self._trail.marks, _counts, self._compilations.graphs)
        operators = reader.operators(events)
        backward = walked(events)
        for operator in operators:
            self._add(operator, backward)
        self._line_runs.update(self._trail.runs)
        for place, many in self._trail.alike:
            if place.name is not None:
                self._alike[place.name] = max(many, self._alike.get(place.name, 0))
        self._note_walls(reader, events)
        self._spans += spans_of(reader, events, self._place)
        self._steps += 1

    def close(self) -> None:
        """Stops for good; what was traced stays."""
        self.end()

    def operators(self) -> list[OperatorTime]:
        """Per step of those traced, the longest first. Their times are as the profiler saw them: see `matching`."""
        if (
            self._given is None or self._given[0] != self._steps
        ):  # it is asked for again and again while the script runs
            self._given = self._steps, self._records()
        return self._given[1]

    def _records(self) -> list[OperatorTime]:
        steps, place = max(1, self._steps), cache(self._place)
        found = [
            OperatorTime(
                name=key.name,
                phase=key.phase,
                module="" if key.module is None else spelled(key.module, alone=self.alone),
                where="" if key.line is None else place(*key.line),
                calls=total.calls / steps,
                ms=total.ns / steps / 1e6,
                shapes=list(key.shapes),
                dtype=key.dtype,
                device=key.device,
                flops=None if total.flops is None else total.flops / steps,
                bytes=None if total.bytes is None else total.bytes / steps,
                line_runs=self._runs_of(key.line),
                used=key.used,
                copies=key.copies,
                alike=self._alike_of(key.module),
            )
            for key, total in self._sums.items()
        ]
        return sorted(found, key=lambda operator: -operator.ms)[:_SHOWN]

    def _runs_of(self, line: Line | None) -> float | None:
        """Per step."""
        return self._line_runs[line] / max(1, self._steps) if line is not None and line in self._line_runs else None

    def _alike_of(self, module: Name | None) -> int:
        return max((self._alike.get(name, 0) for name in upwards(module)), default=0) if module is not None else 0

    def walls(self) -> dict[tuple[str, Phase], float]:
        """Milliseconds that each module took forward and backward in a traced step by itself, and each phase without."""
        steps = max(1, self._steps)
        return {
            ("" if module is None else spelled(module, alone=self.alone), phase): ns / steps / 1e6
            for (module, phase), ns in self._walls.items()
        }

    def phases(self) -> dict[Phase, float]:
        """Milliseconds that each phase took in a traced step, with all that lies between its operators."""
        return {phase: ns / max(1, self._steps) / 1e6 for phase, ns in self._traced.items()}

    def turned(self) -> list[tuple[Phase, Phase, float]]:
        """As `Facts.turned`: the median over the steps, since few are traced and one may be held up."""
        pairs = {pair for step in self._grounds for pair in step if pair[0] != pair[1]}
        shares = [
            (ground, phase, median(_share(step, ground, phase) for step in self._grounds)) for ground, phase in pairs
        ]
        return sorted(one for one in shares if one[2])

    def fused(self) -> dict[str, list[str]]:
        """Modules that compiled kernels compute for, with those that share a kernel with them."""
        return {
            spelled(name, alone=self.alone): sorted(spelled(other, alone=self.alone) for other in others if other)
            for name, others in self._fused.items()
        }

    def inside(self) -> dict[str, Name]:
        """Those of them that lie inside of a compiled module, or step, by the name that operators give."""
        return {spelled(name, alone=self.alone): name for name, around in self._around.items() if name != around}

    def compiled_shares(self) -> dict[Phase, float]:
        """Of the time outside of all modules and phases in which a compiled step ran, the shares of its kernels' phases."""
        wall = self._walls.get((None, "unattributed"), 0)
        total = max(wall, sum(self._compiled_ns.values()))
        return {phase: ns / total for phase, ns in self._compiled_ns.items()} if wall else {}

    def write(self, path: Path) -> Path | None:
        """Writes what was traced as a Chrome trace; returns its path, None if nothing was traced."""
        return write_trace(path, self._spans) if self._spans else None

    @property
    def alone(self) -> bool:
        """Whether there is but one model."""
        return len({key.module.model for key in self._sums if key.module and not key.module.is_part}) <= 1

    def _note_walls(self, reader: Reader, events: list[Event]) -> None:
        self._grounds.append(defaultdict(int))
        for mark, start, end in reader.segments():
            self._traced[mark.ran] += end - start
            if not mark.deep:
                self._walls[mark.module, mark.ran] += end - start
                self._grounds[-1][mark.ground, mark.phase] += end - start
        for maker, node in reader.nodes(events):
            self._walls[(maker.module if maker is not None else None) or LOSS, "backward"] += node.end - node.start

    def _add(self, operator: Operator, backward: set[int]) -> None:
        module = operator.mark.module if operator.mark is not None else None
        if operator.phase == "backward":
            module = module or LOSS
        event, kernels = operator.event, operator.kernels
        first, last = operator.made
        used = any(number in backward for number in range(first, last)) if last > first and backward else None
        key = _Key(
            _name_of(event),
            operator.phase,
            module,
            operator.line,
            tuple(_shape(shape) for shape in event.shapes[:_SHAPES] if shape),
            next((_FLOATS[dtype] for dtype in event.dtypes if dtype in _FLOATS), ""),
            kernels[0].device if kernels else "cpu",
            next(filter(None, map(copied, kernels)), ""),
            used,
        )
        ns = sum(kernel.end - kernel.start for kernel in kernels) if kernels else max(0, operator.ns)
        counts = operator.counts
        if operator.launch is None or not operator.launch.parts:
            known = (None, None) if counts is None else (counts.flops, counts.bytes)
            self._sums[key].add(ns, *known)
        else:
            self._add_parts(key, operator.launch, ns)

    def _add_parts(self, key: _Key, launch: Launch, ns: float) -> None:
        """A compiled kernel counts for each of its modules by its share of the arithmetic."""
        names = [self._namer.name_of(part.module) or key.module for part in launch.parts]
        for part, name in zip(launch.parts, names, strict=True):
            mine = key._replace(module=name, phase=part.phase or key.phase, line=part.line or key.line)
            self._sums[mine].add(ns * part.share, part.flops, None)
            self._compiled_ns[mine.phase] += ns * part.share
            if name is not None:
                self._fused[name].update(other for other in names if other not in (None, name))
                self._around[name] = key.module

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


_FLOATS = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
}
"""The profiler's words for floating-point dtypes."""


def _share(step: dict[tuple[Phase, Phase], int], ground: Phase, phase: Phase) -> float:
    """Of the time in which a traced step's timeline was in a phase: what the lines say was another."""
    total = sum(ns for (around, _), ns in step.items() if around == ground)
    return step.get((ground, phase), 0) / total if total else 0.0


def _counts(event: Event) -> Counts | None:
    return operator_counts(event.name, event.shapes, event.dtypes, event.arguments) if event.shapes else None


def _name_of(event: Event) -> str:
    """The operator's; what asks for another dtype alone has a name of its own beside what asks for a device."""
    dtype_alone = event.name == "aten::to" and len(event.arguments) == _ARGUMENTS_OF_DTYPE
    return "aten::to.dtype" if dtype_alone else event.name


_ARGUMENTS_OF_DTYPE = 5
"""Of `aten::to.dtype`: the tensor, the dtype, and three that every `aten::to` has."""


def _shape(shape: Any) -> str:
    """`8x10x28x28`; of a list of tensors, how many, and the first one's."""
    if isinstance(shape[0], int):
        return "x".join(map(str, shape))
    return f"{len(shape)} of {'x'.join(map(str, shape[0]))}"


def _event(raw: Any) -> Event:
    kind = str(raw.device_type()).rpartition(".")[2].lower()
    return Event(
        raw.name(),
        raw.start_thread_id(),
        raw.start_ns(),
        raw.end_ns(),
        raw.sequence_nr(),
        raw.fwd_thread_id(),
        raw.correlation_id(),
        raw.linked_correlation_id(),
        "cpu" if kind == "cpu" else f"{kind}:{raw.device_index()}",
        raw.shapes(),
        raw.dtypes(),
        raw.concrete_inputs(),
    )


def _activities() -> set[ProfilerActivity]:
    return {ProfilerActivity.CPU} | ({ProfilerActivity.CUDA} if torch.cuda.is_available() else set())


def _config() -> ProfilerConfig:
    shapes, memory, stacks, flops, modules = True, False, False, False, False
    return ProfilerConfig(ProfilerState.KINETO, shapes, memory, stacks, flops, modules, _ExperimentalConfig())


@contextmanager
def _quiet() -> Iterator[None]:
    """The profiler's library would write a line to the script's stderr; it asks for this when it is first used."""
    before = os.environ.get(_LOG_LEVEL)
    os.environ[_LOG_LEVEL] = "9"
    try:
        yield
    finally:
        os.environ.pop(_LOG_LEVEL)
        if before is not None:
            os.environ[_LOG_LEVEL] = before


_LOG_LEVEL = "KINETO_LOG_LEVEL"
