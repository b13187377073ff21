"""Writes a small trace of a few steps for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hotloop.core.files.atomic_files import write_atomic
from hotloop.profiler.timers.markers import MARK
from hotloop.profiler.trace.events import TraceEvent, TraceReader

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
