"""Runs a few steps under torch's profiler: operators with their modules and the user's lines, and a Chrome trace."""

from __future__ import annotations

import gzip
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import ProfilerActivity, ProfilerConfig, ProfilerState

from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.patches import Patches
from hotloop.core.records.profile import OperatorTime
from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.operator_cost import OpCost, count_operator
from hotloop.profiler.timers.line_tracer import MARK, Line, PhaseOfLines, TraceMarkers
from hotloop.profiler.timers.module_names import LOSS_NAME, ModuleName, ModuleNames, enclosing_names, format_name
from hotloop.profiler.trace.events import (
    OperatorCall,
    OperatorKey,
    TracedSteps,
    TraceEvent,
    TraceReader,
    backward_nodes,
    copy_direction,
    merge_typical_steps,
)
from hotloop.profiler.trace.inductor_kernels import CompilationRecorder, KernelLaunch

_MAX_SHAPES = 8  # most input shapes per record
_MAX_RECORDS = 1000  # most records; the longest are returned


class Tracer:
    """Traces steps between `begin()` and `end()`; the script's own profiler has priority.

    Attributes:
        notes: sentences on operators that couldn't be traced.
    """

    def __init__(
        self,
        is_own: Callable[[CodeType], bool],
        place: Callable[[str, int], str],
        current_phase: Callable[[], Phase] = lambda: "python",
        namer: ModuleNames | None = None,
        compilations: CompilationRecorder | None = None,
        turn: PhaseOfLines = lambda phase, lines: phase,
    ) -> None:
        """
        Args:
            is_own: returns whether code is the user's, not a library's.
            place: returns `file:line` for records.
            current_phase: returns the phase of the step.
            compilations: compilations since the script began.
            namer: names of modules, shared with the module clock.
            turn: returns the phase, given the running lines.
        """
        self.notes: list[str] = []
        self._place, self._namer = place, namer or ModuleNames()
        self._compilations = compilations or CompilationRecorder()
        self._markers = TraceMarkers(is_own, current_phase, turn)
        self._steps: list[TracedSteps] = []
        self._spans: list[Span] = []
        self._joined: tuple[int, TracedSteps] | None = None
        self._given: tuple[int, list[OperatorTime]] | None = None
        self._on = self._script_profiler = False
        self._thread, self._began = 0, 0.0
        self._others = Patches()
        for name in ("_prepare_profiler", "_enable_profiler"):
            self._others.patch(torch.autograd.profiler, name, self._yield_to_script_profiler)

    def begin(self) -> None:
        """Starts a step on this thread, unless the script has a profiler of its own."""
        running = torch.autograd.profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled()
        if self._script_profiler or running:
            self._note("The script runs a profiler of its own, so no operators were traced under it.")
            return
        with _silence_kineto():
            torch.autograd._prepare_profiler(_config(), _activities())
            torch.autograd._enable_profiler(_config(), _activities())
        self._compilations.begin()
        self._markers.begin()
        self._on, self._thread, self._began = True, threading.get_ident(), time.perf_counter()
        if not self._markers.lines:
            self._note("A debugger or a coverage tool traces the script, so operators have no lines.")

    def end(self) -> None:
        """Ends a step: stops the profiler and reads the operators."""
        if not self._on:
            return
        ms = (time.perf_counter() - self._began) * 1e3
        events = [_convert_event(raw) for raw in self._stop().events()]
        if self._markers.full:
            self._note("A traced step ran too many lines; its last operators have no module and no line.")
        self._namer.name([mark.place for mark in self._markers.marks if mark.place is not None])
        reader = TraceReader(self._markers.marks, _event_cost, self._compilations.graphs)
        operators = reader.operators(events)
        backward = backward_nodes(events)
        step = TracedSteps(ms, line_runs=Counter(self._markers.line_tracer.runs), steps=1)
        for operator in operators:
            self._add(step, operator, backward)
        for place, many in self._markers.alike:
            if place.name is not None:
                step.alike[place.name] = max(many, step.alike.get(place.name, 0))
        _note_walls(step, reader, events, whole=not self._markers.full)
        self._spans += spans_of(reader, events, self._place)
        self._steps.append(step)

    def drop(self) -> None:
        """Ends an untypical step without reading it."""
        if self._on:
            self._stop()

    def close(self) -> None:
        """Stops for good; totals stay."""
        self.end()
        self._others.undo()

    def _stop(self) -> Any:
        self._on = False
        self._markers.end()
        self._compilations.end()
        return torch.autograd._disable_profiler()

    def _yield_to_script_profiler(self, start: Callable[..., Any]) -> Callable[..., Any]:
        """Drops the step if the script starts a profiler: torch runs a single profiler at a time."""

        @wraps(start)
        def started(*args: Any, **kwargs: Any) -> Any:
            self._script_profiler = True
            if threading.get_ident() == self._thread:
                self.drop()
            return start(*args, **kwargs)

        return started

    @property
    def _typical_steps(self) -> TracedSteps:
        if self._joined is None or self._joined[0] != len(self._steps):
            self._joined = len(self._steps), merge_typical_steps(self._steps)
        return self._joined[1]

    def operators(self) -> list[OperatorTime]:
        """Returns operators per traced step, the longest first, with uncorrected times: see `calibration`."""
        many = len(self._steps)
        if self._given is None or self._given[0] != many:  # called often while the script runs
            self._given = many, self._records()
        return self._given[1]

    def _records(self) -> list[OperatorTime]:
        steps, place = max(1, self._typical_steps.steps), cache(self._place)
        functions = self._markers.line_tracer.functions()
        found = [
            OperatorTime(
                name=key.name,
                phase=key.phase,
                module="" if key.module is None else format_name(key.module, alone=self.alone),
                where="" if key.line is None else place(*key.line),
                function="" if key.line is None else functions.get(key.line, ""),
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
                within=key.within,
                outer=key.outer,
                hooked=key.is_in_hook,
                alike=self._alike_of(key.module),
            )
            for key, total in self._typical_steps.sums.items()
        ]
        return sorted(found, key=lambda operator: -operator.ms)[:_MAX_RECORDS]

    def _runs_of(self, line: Line | None) -> float | None:
        seen = self._typical_steps
        return seen.line_runs[line] / max(1, seen.steps) if line is not None and line in seen.line_runs else None

    def _alike_of(self, module: ModuleName | None) -> int:
        return (
            max((self._typical_steps.alike.get(name, 0) for name in enclosing_names(module)), default=0)
            if module is not None
            else 0
        )

    def walls(self) -> dict[tuple[str, Phase], float]:
        """Returns the own ms of each module, forward and backward, and of each phase outside of modules, per step."""
        steps = max(1, self._typical_steps.steps)
        return {
            ("" if module is None else format_name(module, alone=self.alone), phase): ns / steps / 1e6
            for (module, phase), ns in self._typical_steps.walls.items()
        }

    def phases(self) -> dict[Phase, float]:
        """Returns the ms of each phase per traced step, with the time between operators."""
        return {phase: ns / max(1, self._typical_steps.steps) / 1e6 for phase, ns in self._typical_steps.phases.items()}

    @property
    def grounds(self) -> list[Counter[tuple[Phase, Phase]]]:
        """Per completely traced step, ns of each pair of timeline phase and phase by lines."""
        return self._typical_steps.grounds

    def fused(self) -> dict[str, list[str]]:
        """Returns the modules of compiled kernels, each with those that share a kernel with it."""
        return {
            format_name(name, alone=self.alone): sorted(
                format_name(other, alone=self.alone) for other in others if other
            )
            for name, others in self._typical_steps.fused.items()
        }

    def compiled_modules(self) -> dict[str, ModuleName]:
        """Returns those inside of a compiled module or step, by the name that operators use."""
        return {
            format_name(name, alone=self.alone): name
            for name, around in self._typical_steps.around.items()
            if name != around
        }

    def compiled_shares(self) -> dict[Phase, float]:
        """Returns the shares of phases in unattributed time outside of modules, from compiled kernels."""
        wall = self._typical_steps.walls.get((None, "unattributed"), 0)
        total = max(wall, sum(self._typical_steps.compiled_ns.values()))
        return {phase: ns / total for phase, ns in self._typical_steps.compiled_ns.items()} if wall else {}

    def write(self, path: Path) -> Path | None:
        """Writes a Chrome trace and returns its path; None if nothing was traced."""
        return write_trace(path, self._spans) if self._spans else None

    @property
    def alone(self) -> bool:
        """Whether there is only one model."""
        return len({key.module.model for key in self._typical_steps.sums if key.module and not key.module.is_part}) <= 1

    def _add(self, step: TracedSteps, operator: OperatorCall, backward: set[int]) -> None:
        module = operator.mark.module if operator.mark is not None else None
        if operator.phase == "backward":
            module = module or LOSS_NAME
        event, kernels = operator.event, operator.kernels
        first, last = operator.created_nodes
        used = any(number in backward for number in range(first, last)) if last > first and backward else None
        key = OperatorKey(
            _operator_name(event),
            operator.phase,
            module,
            operator.line,
            tuple(_format_shape(shape) for shape in event.shapes[:_MAX_SHAPES] if shape),
            next((_FLOAT_NAMES[dtype] for dtype in event.dtypes if dtype in _FLOAT_NAMES), ""),
            kernels[0].device if kernels else "cpu",
            next(filter(None, map(copy_direction, kernels)), ""),
            used,
            operator.within,
            operator.outermost,
            operator.is_in_hook,
        )
        ns = sum(kernel.end - kernel.start for kernel in kernels) if kernels else max(0, operator.ns)
        counts = operator.counts
        if operator.launch is None or not operator.launch.parts:
            known = (None, None) if counts is None else (counts.flops, counts.bytes)
            step.sums[key].add(ns, *known)
        else:
            self._add_parts(step, key, operator.launch, ns)

    def _add_parts(self, step: TracedSteps, key: OperatorKey, launch: KernelLaunch, ns: float) -> None:
        """Adds a compiled kernel to each of its modules, by their shares of the arithmetic."""
        names = [self._namer.name_of(part.module) or key.module for part in launch.parts]
        for part, name in zip(launch.parts, names, strict=True):
            mine = key._replace(module=name, phase=part.phase or key.phase, line=part.line or key.line)
            step.sums[mine].add(ns * part.share, part.flops, None)
            step.compiled_ns[mine.phase] += ns * part.share
            if name is not None:
                step.fused[name].update(other for other in names if other not in (None, name))
                step.around[name] = key.module

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


_FLOAT_NAMES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
}
"""The profiler's names of floating-point dtypes."""


def _note_walls(step: TracedSteps, reader: TraceReader, events: list[TraceEvent], *, whole: bool) -> None:
    grounds: Counter[tuple[Phase, Phase]] = Counter()
    for mark, start, end in reader.segments():
        step.phases[mark.executed_phase] += end - start
        if not mark.is_in_backward:
            step.walls[mark.module, mark.executed_phase] += end - start
            grounds[mark.timeline_phase, mark.phase] += end - start
    for maker, node in reader.nodes(events):
        step.walls[(maker.module if maker is not None else None) or LOSS_NAME, "backward"] += node.end - node.start
    if whole:
        step.grounds.append(grounds)


def _event_cost(event: TraceEvent) -> OpCost | None:
    return count_operator(event.name, event.shapes, event.dtypes, event.arguments) if event.shapes else None


def _operator_name(event: TraceEvent) -> str:
    """Returns the operator's name; a dtype conversion without a device gets a name of its own."""
    dtype_alone = event.name == "aten::to" and len(event.arguments) == _ARGUMENTS_OF_DTYPE
    return "aten::to.dtype" if dtype_alone else event.name


_ARGUMENTS_OF_DTYPE = 5  # arguments of `aten::to.dtype`: tensor, dtype, and three that every `aten::to` has


def _format_shape(shape: Any) -> str:
    """Formats a shape as `8x10x28x28`; for a list of tensors, their number and the first shape."""
    if isinstance(shape[0], int):
        return "x".join(map(str, shape))
    return f"{len(shape)} of {'x'.join(map(str, shape[0]))}"


def _convert_event(raw: Any) -> TraceEvent:
    kind = str(raw.device_type()).rpartition(".")[2].lower()
    return TraceEvent(
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
def _silence_kineto() -> Iterator[None]:
    """Stops Kineto from writing a line to stderr; it reads the variable at its first use."""
    before = os.environ.get(_LOG_LEVEL)
    os.environ[_LOG_LEVEL] = "9"
    try:
        yield
    finally:
        os.environ.pop(_LOG_LEVEL)
        if before is not None:
            os.environ[_LOG_LEVEL] = before


_LOG_LEVEL = "KINETO_LOG_LEVEL"


MAX_SPANS = 40_000
"""Most spans in a file; the longest are written."""
_COMPRESSED_FROM_CHARS = 1_000_000  # characters above which the file is compressed; both viewers read compressed files


_NEAR_NS = 20_000


class Span(NamedTuple):
    """A span of time, in ns, in a row of the trace."""

    row: str
    name: str
    start: int
    end: int
    about: dict[str, Any] = {}  # noqa: RUF012


def spans_of(reader: TraceReader, events: Iterable[TraceEvent], place: Callable[[str, int], str]) -> list[Span]:
    """Returns the spans of a step: phases, modules, the user's lines, operators and device kernels."""
    spans: list[Span] = []
    for mark, start, end in reader.segments():
        module = "" if mark.module is None else (mark.module.path or mark.module.model)
        line = "" if mark.line is None else place(*mark.line)
        for row, name in (("phases", mark.executed_phase), ("modules", module), ("lines", line)):
            _append_span(spans, Span(row, name, start, end))
    for maker, node in reader.nodes(events):
        if maker is not None and maker.module is not None:
            _append_span(spans, Span("modules backward", maker.module.path or maker.module.model, node.start, node.end))
    for event in events:
        if not event.name.startswith(MARK):
            row = "operators" if event.thread == reader.thread and event.device == "cpu" else "others"
            about = {"shapes": [shape for shape in event.shapes if shape]} if any(event.shapes) else {}
            row = row if event.device == "cpu" else event.device
            spans.append(Span(row, event.name, event.start, event.end, about))
    return spans


def _append_span(spans: list[Span], span: Span) -> None:
    """Appends a span, or extends the last span of its row with the same name if it is near."""
    if not span.name:
        return
    for at in range(len(spans) - 1, max(-1, len(spans) - 4), -1):
        last = spans[at]
        if last.row == span.row and last.name == span.name and span.start - last.end < _NEAR_NS:
            spans[at] = last._replace(end=span.end)
            return
    spans.append(span)


def write_trace(path: Path, spans: Sequence[Span]) -> Path:
    """Writes the longest spans and returns the path, which gets `.gz` if the file is compressed."""
    first = min((span.start for span in spans), default=0)
    rows = {row: number for number, row in enumerate(dict.fromkeys(span.row for span in spans))}
    kept = sorted(spans, key=lambda span: span.start - span.end)[:MAX_SPANS]
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": row}}
        for row, number in rows.items()
    ]
    events += [
        {
            "ph": "X",
            "name": span.name,
            "pid": 0,
            "tid": rows[span.row],
            "ts": (span.start - first) / 1e3,
            "dur": (span.end - span.start) / 1e3,
            **({"args": span.about} if span.about else {}),
        }
        for span in sorted(kept, key=lambda span: (span.start, -span.end))
    ]
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))
    if len(text) < _COMPRESSED_FROM_CHARS and path.suffix != ".gz":
        write_atomic(path, text, "--trace")
        return path
    path = path if path.suffix == ".gz" else path.with_name(f"{path.name}.gz")
    write_atomic(path, gzip.compress(text.encode()), "--trace")
    return path
