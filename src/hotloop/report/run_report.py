"""The report of a run: everything that its folder says, as one HTML file."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from hotloop.core.files.atomic_files import read_regular
from hotloop.core.files.run_folder import StoredRun
from hotloop.core.format import format_flops, format_shape
from hotloop.core.records.model_summary import ModelLayers
from hotloop.core.records.profile import Profile
from hotloop.core.records.race import Parity, Verdict
from hotloop.core.records.training import Evaluation
from hotloop.errors import HotloopError, RunError
from hotloop.report.blocks import Block, Section, details, facts, figures, lines, report_page, table, text, tiles
from hotloop.report.evaluation import evaluation_section
from hotloop.report.plan import proof_section
from hotloop.report.profile import profile_section
from hotloop.report.progress import format_duration
from hotloop.report.race import race_section
from hotloop.report.run_curves import run_figures

Document = Profile | Verdict | Parity | Evaluation

_MAX_EPOCH_ROWS = 200

_MAX_EVENT_ROWS = 300

_MAX_PICTURE_BYTES = 400_000
"""Bytes of the images of mistakes in a report, so that its file stays below 6 MB."""

_KEYS: dict[str, type[BaseModel]] = {"phases": Profile, "plans": Verdict, "parity": Parity, "confusion": Evaluation}
"""A field that only one kind of document has."""

_STORED = ("profile.json", "race.json", "proof.json")
"""Documents in the run's folder that a report shows."""


def read_document(path: Path) -> Document:
    """Reads the JSON document of `profile`, `race`, `check` or `evaluate`.

    Raises:
        RunError: the file is no such document.
    """
    try:
        content = json.loads(read_regular(path) or b"")
        model = next(model for key, model in _KEYS.items() if key in content)
        found = model.model_validate({key: v for key, v in content.items() if key in model.model_fields})
    except (ValueError, TypeError, StopIteration, ValidationError, RecursionError, UnicodeDecodeError) as error:
        raise RunError(
            f"{path} is no result of hotloop",
            expected="a run's folder, or a file that `hotloop profile --json`, race, check or evaluate printed",
            fix="check the path",
        ) from error
    return found  # type: ignore[return-value]


def run_report(run: StoredRun, documents: Sequence[Document] = ()) -> str:
    """Returns the HTML of a run's report; `documents` are shown besides those in the folder."""
    stored, unread = _stored_documents(run.path)
    shown = [*stored, *([run.evaluation] if run.evaluation else []), *documents]
    sections = [
        Section("summary", "Summary", list(_summary(run))),
        Section("curves", "Curves", list(_curves(run))),
        *([Section("layers", "Layers", _layers(run.layers))] if run.layers else []),
        *_plan_search_sections(run.path, unread),
        *_document_sections(shown, _pictures(run.path)),
        Section("journal", "Journal", _journal(run)),
        Section("environment", "Environment", list(_environment(run))),
        *_source_sections(run),
    ]
    return report_page(
        sections,
        run.name,
        _subtitle(run),
        title=f"{run.name}: {run.state}",
        state=run.state,
        failure=_failure(run),
        next_step=_next_step(run),
        damages=[*run.damages, *unread],
    )


def document_report(documents: Sequence[Document]) -> str:
    """Returns the HTML of a report of results without a run, such as the profile of a script."""
    first = documents[0]
    name = str(getattr(first, "source", "") or getattr(first, "task", "") or getattr(first, "run", "") or "result")
    environment = facts([("Machine", getattr(first, "machine", "")), *sorted(getattr(first, "versions", {}).items())])
    sections = [*_document_sections(documents, {})]
    if environment["pairs"]:
        sections.append(Section("environment", "Environment", [environment]))
    kinds = {Profile: "profile", Verdict: "race", Parity: "proof", Evaluation: "evaluation"}
    return report_page(sections, name, ", ".join(dict.fromkeys(kinds[type(one)] for one in documents)))


def _document_sections(documents: Sequence[Document], pictures: dict[int, str]) -> list[Section]:
    sections: list[Section] = []
    for document in documents:
        if isinstance(document, Profile):
            section = profile_section(document)
        elif isinstance(document, Verdict):
            section = race_section(document)
        elif isinstance(document, Parity):
            section = proof_section(document)
        else:
            section = evaluation_section(document, pictures)
        number = sum(one.id.split("-")[0] == section.id for one in sections)
        sections.append(Section(f"{section.id}-{number + 1}", section.title, section.blocks) if number else section)
    return sections


def _plan_search_sections(folder: Path, unread: list[str]) -> list[Section]:
    """Returns the race and the proof that chose the run's plan; adds a line to `unread` for a damaged file."""
    path = folder / "plan_search.json"
    if not path.is_file():
        return []
    try:
        found: Document | None = read_document(path)
    except HotloopError:
        found = None
    if not isinstance(found, Verdict):
        unread.append(f"{path} is damaged and left out")
        return []
    return [replace(race_section(found), id="plan-search", title="Plan: race and proof")]


def _stored_documents(folder: Path) -> tuple[list[Document], list[str]]:
    found, unread = [], []
    for name in _STORED:
        if (folder / name).is_file():
            try:
                found.append(read_document(folder / name))
            except HotloopError:
                unread.append(f"{folder / name} is damaged and left out")
    return found, unread


def _pictures(folder: Path) -> dict[int, str]:
    """Returns the images of mistakes that `hotloop evaluate` stored, by the sample's index."""
    try:
        document = json.loads(read_regular(folder / "evaluation" / "pictures.json") or b"{}")
        found, size = {}, 0
        for index, address in document.items():
            size += len(address)
            if size > _MAX_PICTURE_BYTES:
                break
            found[int(index)] = str(address)
        return found
    except (ValueError, AttributeError, TypeError, RecursionError, HotloopError):
        return {}


def _subtitle(run: StoredRun) -> str:
    created = run.record.created if run.record else ""
    return f"{run.path} · {created.replace('T', ' ')}" if created else str(run.path)


def _failure(run: StoredRun) -> dict[str, str] | None:
    if run.state != "failed":
        return None
    return {"kind": str(run.last.get("kind", "failure")), "message": str(run.last.get("message", ""))}


def _next_step(run: StoredRun) -> dict[str, str] | None:
    command = f"hotloop train --resume {shlex.quote(str(run.path))}"
    said = {
        "stopped": f"The training was stopped ({run.reason}). Go on with:",
        "killed": "The training process ended without a stop. Go on with:",
        "failed": "After the fix, go on with:",
    }
    return {"text": said[run.state], "command": command} if run.state in said else None


def _summary(run: StoredRun) -> Iterator[Block]:
    yield from tiles(list(_tiles(run)))
    record, plan = run.record, run.plan
    known = record.facts if record else None
    source = record.source if record else None
    reasons = run.last_value("plan_reasons")
    shapes = [format_shape(shape) if shape else "a number" for shape in known.inputs] if known else []
    yield facts(
        [
            ("Task", None if source is None else source.reference),
            ("Parameters of the Task", None if source is None else _pairs_text(source.parameters)),
            ("Changed by the command", None if record is None else _pairs_text(record.overrides)),
            ("Data", None if known is None else _data_text(known)),
            ("Shapes of a sample", ", ".join(shapes)),
            ("Model", None if known is None else f"{known.parameters:,} parameters, {known.trainable:,} trainable"),
            ("Optimizer", None if known is None else known.optimizer),
            ("Epochs", f"{len(run.epochs):,} of {run.planned_epochs or '?'}"),
            ("Steps", f"{run.step:,}"),
            ("Time of training", format_duration(run.seconds)),
            ("Plan", None if plan is None else plan.brief()),
            ("Why this plan", "; ".join(map(str, reasons)) if isinstance(reasons, list) else None),
            ("Resumes exactly", None if known is None else "yes" if known.exact else "no"),
            ("Rehearsals of a resume", "; ".join(record.rehearsals) if record and record.rehearsals else None),
            ("Note", None if record is None else record.note),
        ]
    )
    yield from lines(known.inexact if known else [])


def _tiles(run: StoredRun) -> Iterator[tuple[str, str]]:
    for name, value in (run.final or {}).items():
        if name.startswith("test_") and isinstance(value, int | float):
            yield name.replace("_", " "), f"{value:.4g}"
    best, (monitor, _) = run.best_epoch, run.monitor
    if best is not None:
        yield f"best {monitor.replace('_', ' ')} (epoch {best['epoch']})", f"{best[monitor]:.4g}"
        for name, value in best.items():
            if name.startswith("validation_") and name != monitor and value is not None:
                yield f"{name.replace('_', ' ')} then", f"{value:.4g}"
    speeds = [row["samples_per_s"] for row in run.epochs if row.get("samples_per_s")]
    if speeds:
        yield "samples per second, median", f"{sorted(speeds)[len(speeds) // 2]:,.0f}"


def _data_text(known: Any) -> str:
    samples = "a stream" if known.samples is None else f"{known.samples:,} samples"
    return f"{samples}, batches of {known.batch_size:,}"


def _pairs_text(pairs: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in pairs.items())


def _curves(run: StoredRun) -> Iterator[Block]:
    shown = run_figures(run)
    if not shown:
        yield text("No figures yet: the first epoch isn't complete.")
        return
    yield from figures(shown)
    yield from lines(list(_figure_notes(run)))
    if run.epochs:
        yield details(f"Table of {len(run.epochs):,} epochs", _epoch_table(run))


def _figure_notes(run: StoredRun) -> Iterator[str]:
    if run.has_sampled_accuracy:
        yield "The accuracy on training data is of a fixed sample, without augmentation and dropout."
    if run.progress and not any(row.get("gradient_norm") is not None for row in run.progress):
        plan = run.plan
        why = "gradients aren't stored after a step"
        if plan is not None and plan.parallel not in ("none", "data"):
            why = f"each rank has a part of the gradients under a plan with parallel={plan.parallel}"
        elif plan is not None and plan.compile != "none":
            why = f"gradients aren't stored under a plan with compile={plan.compile}"
        yield f"The gradient norm isn't recorded: {why}."


def _epoch_table(run: StoredRun) -> Block:
    rows = run.epochs[-_MAX_EPOCH_ROWS:]
    best = run.best_epoch
    if best is not None and best not in rows:
        rows = [best, *rows]
    columns = list(dict.fromkeys(key for row in rows for key in row if any(r.get(key) is not None for r in rows)))
    caption = "Epochs" if len(rows) >= len(run.epochs) else f"The best and the last {_MAX_EPOCH_ROWS} epochs"
    marked = [number for number, row in enumerate(rows) if row is best]
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    return table(caption, [name.replace("_", " ") for name in columns], cells, range(len(columns)), marked)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def _layers(layers: ModelLayers) -> list[Block]:
    rows = [
        (
            "\u2003" * row.depth + (row.name.rpartition(".")[2] or "the model"),
            row.kind + (f", the same as {row.shared_with}" if row.shared_with else ""),
            ", ".join(format_shape(shape[1:]) for shape in row.output),
            f"{row.parameters:,}" if row.parameters else "",
            format_flops(row.flops / layers.samples) if row.flops else "",
            "; ".join(row.notes),
        )
        for row in layers.rows
    ]
    parameters = sum(row.parameters for row in layers.rows)
    flops = sum(row.flops for row in layers.rows) / layers.samples
    counted = f"; forward pass of one sample: {format_flops(flops)}" if flops else ""
    columns = ("layer", "kind", "output of a sample", "parameters", "FLOPs of a sample", "notes")
    shown = table("Layers", columns, rows, numbers=(3, 4))
    return [text(f"{parameters:,} parameters{counted}."), shown, *lines(layers.notes)]


def _journal(run: StoredRun) -> list[Block]:
    rows = list(_event_rows(run))
    cut = len(rows) - _MAX_EVENT_ROWS
    shown = rows[:100] + rows[100 + cut :] if cut > 0 else rows
    left_out = [text(f"{cut:,} events in the middle are left out.")] if cut > 0 else []
    return [table("Events", ("time", "event", "step", "details"), shown, numbers=(2,)), *left_out]


def _event_rows(run: StoredRun) -> Iterator[tuple[str, str, str, str]]:
    """Yields the journal's events; consecutive checkpoints are one row, and a kill has a row of its own."""
    checkpoints: list[dict[str, Any]] = []
    has_stopped, plan = True, None
    for event in [*run.events, None]:
        if event is not None and event["event"] == "checkpoint":
            checkpoints.append(event)
            continue
        if checkpoints:
            count = "checkpoint" if len(checkpoints) == 1 else f"{len(checkpoints)} checkpoints"
            yield _clock(checkpoints[-1]["time"]), count, _cell(checkpoints[-1].get("step")), ""
            checkpoints = []
        if event is None:
            break
        kind = event["event"]
        if kind == "resume" and not has_stopped:
            yield "", "killed", "", "the process ended without a stop"
        if kind in ("start", "resume"):
            if plan is not None and event.get("plan") != plan:
                yield "", "plan switch", _cell(event.get("step")), f"{plan} → {event.get('plan')}"
            plan = event.get("plan")
        has_stopped = kind in ("stop", "failure", "final") or (has_stopped and kind not in ("start", "resume"))
        yield _clock(event["time"]), kind, _cell(event.get("step")), _event_details(event)
    if run.state == "killed":
        yield "", "killed", "", "the process ended without a stop"


def _event_details(event: dict[str, Any]) -> str:
    if event["event"] == "failure":
        return str(event.get("message", ""))
    left_out = ("event", "time", "step", "plan_reasons", "monitor", "goal", "machine")
    return ", ".join(
        f"{key} {_cell(value)}" for key, value in event.items() if key not in left_out and value is not None
    )


def _clock(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else ""
    except (ValueError, OverflowError, OSError):
        return str(seconds)


def _environment(run: StoredRun) -> Iterator[Block]:
    record = run.record
    versions = sorted(record.versions.items()) if record else []
    yield facts(
        [
            ("Machine", run.last_value("machine")),
            ("Host", run.status.get("host")),
            *versions,
            ("Checkpoints every", record.checkpoint_every if record else None),
            *((f"Switch {name}", value) for name, value in sorted((record.switches if record else {}).items())),
        ]
    )


def _source_sections(run: StoredRun) -> list[Section]:
    sources = run.sources
    main = run.record.source.file if run.record and run.record.source else None
    blocks = [
        {"kind": "source", "name": name, "text": content, "is_open": name == main} for name, content in sources.items()
    ]
    return [Section("source", "Source", blocks)] if blocks else []
