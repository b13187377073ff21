"""Writes docs/reference/json.md from the records that commands print with `--json`.

python -m docs.generators.json_fields
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

from hotloop.core.records.explanation import Explanation
from hotloop.core.records.hardware import Hardware
from hotloop.core.records.model_summary import ModelSummary
from hotloop.core.records.profile import Profile
from hotloop.core.records.race import Parity, RaceScaling, ScriptRun, Verdict
from hotloop.core.records.study import BatchSizeRange, LearningRateRange, StudyResult
from hotloop.core.records.training import Evaluation, ExportRecord

PAGE = Path(__file__).parents[1] / "reference" / "json.md"

BEGIN = """\
# JSON output

`python -m docs.generators.json_fields` writes this page from the source.

With `--json` a command prints one JSON document on stdout; text for people goes to stderr. NaN and infinity are `null`. A
document with `version` gains fields in later versions and loses none. Units are part of a name: `step_ms`, `run_s`,
`peak_memory_bytes`.

An error is a document as well, with exit code 1 or 2:

```json
{"error": {"kind": "DeviceError", "message": "no device cuda here; expected one of: cpu; fix: ..."}}
```

| command | document |
| --- | --- |
| `devices` | [Hardware](#hardware), and `advice`: lines |
| `train` | `run`: its folder, `plan`: all axes, `epochs`: a row per epoch as in `metrics.jsonl`, `final`: test figures, `reason` |
| `run` | [ScriptRun](#scriptrun) |
| `plan` | `plan`, `why`, `remembered`, `compiled`, `passed_over`, `left_open`, `refused`, `device` |
| `race`, `tune` | [Verdict](#verdict); `race --scale` [RaceScaling](#racescaling) and `page` |
| `check` | [Parity](#parity) |
| `profile` | [Profile](#profile), and `pages`: files |
| `explain` | [Explanation](#explanation) |
| `summary` | [ModelSummary](#modelsummary) |
| `evaluate` | [Evaluation](#evaluation), and `files`: paths by name |
| `predict` | `run`, `inputs`, `out`: paths, `shapes` by name, `classes`, `columns` |
| `export` | [ExportRecord](#exportrecord) |
"""

DOCUMENTS = (
    Hardware,
    ScriptRun,
    Verdict,
    RaceScaling,
    Parity,
    Profile,
    Explanation,
    ModelSummary,
    Evaluation,
    ExportRecord,
    StudyResult,
    LearningRateRange,
    BatchSizeRange,
)


def meanings(record: type) -> dict[str, str]:
    """Returns the texts of the docstring's attributes; names that share a line share its text."""
    section = inspect.cleandoc(record.__doc__ or "").partition("Attributes:\n")[2]
    found: dict[str, str] = {}
    for names, text in re.findall(r"^ {4}([\w, ]+): (.*(?:\n {5,}.*)*)", section, re.M):
        found |= dict.fromkeys(re.split(r",\s*", names), " ".join(text.split()))
    return found


def fields(record: type) -> dict[str, Any]:
    """Returns the types of a record's fields by their names."""
    hints = get_type_hints(record)
    names = (
        [field.name for field in dataclasses.fields(record)]
        if dataclasses.is_dataclass(record)
        else [
            name
            for name, field in record.model_fields.items()  # type: ignore[attr-defined]
            if not field.exclude
        ]
    )
    return {name: hints[name] for name in names}


def is_record(kind: Any) -> bool:
    return inspect.isclass(kind) and (dataclasses.is_dataclass(kind) or hasattr(kind, "model_fields"))


def records_in(kind: Any) -> Iterator[type]:
    """Yields the records in a type, such as `list[Timing]`."""
    if is_record(kind):
        yield kind
    for part in get_args(kind):
        yield from records_in(part)


def name_of(kind: Any) -> str:
    """Returns a type as JSON's readers know it, with links to records."""
    if is_record(kind):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    if kind is type(None):
        return "null"
    parts = [name_of(part) for part in get_args(kind)]
    origin = getattr(kind, "__origin__", None)
    if origin in (list, tuple):
        return f"list of {parts[0]}"
    if origin is dict:
        return f"{parts[1]} by name"
    if "Literal" in str(origin):
        return ", ".join(f"`{value}`" for value in get_args(kind))
    if parts:
        return " or ".join(dict.fromkeys(parts))
    return {bool: "true or false", int: "integer", float: "number", str: "text"}.get(kind, "any value")


def section(record: type) -> str:
    """Returns the part of the page about a record."""
    purpose = inspect.cleandoc(record.__doc__ or "").partition("\n\n")[0]
    texts = meanings(record)
    lines = [
        f"### {record.__name__}",
        "",
        " ".join(purpose.split()),
        "",
        "| field | type | meaning |",
        "| --- | --- | --- |",
    ]
    for name, kind in fields(record).items():
        text = texts.get(name, "").replace("|", "\\|").replace("<", "&lt;")
        lines.append(f"| `{name}` | {name_of(kind)} | {text} |")
    return "\n".join([*lines, ""])


def page() -> str:
    """Returns the page as Markdown: the documents, and each record in them after its first use."""
    order: list[type] = []

    def visit(record: type) -> None:
        if record not in order:
            order.append(record)
            for kind in fields(record).values():
                for part in records_in(kind):
                    visit(part)

    for document in DOCUMENTS:
        visit(document)
    return "\n".join([BEGIN, "## Records\n", *map(section, order)]).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
