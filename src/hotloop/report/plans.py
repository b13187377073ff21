"""What `auto` would run and why, and what can't be run, as tables for a terminal or a document for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotloop.feasible import Refused
from hotloop.hardware import Device
from hotloop.rules import Choice


def page(
    choice: Choice, passed_over: Sequence[str], left_open: Sequence[str], refused: Sequence[Refused]
) -> RenderableType:
    """The choice, what speaks for it, what it had to pass over or leaves open, and the table of what can't be run."""
    lines = [f"auto runs: {choice.plan.brief()}", *(f"  {reason}" for reason in choice.why)]
    lines += [f"auto passes over {line}" for line in passed_over]
    lines += [f"train finds out about {line}" for line in left_open]
    return Group(*(Text(line) for line in lines), refusals(refused))


def refusals(refused: Sequence[Refused]) -> Table:
    """Values that can't be run here, with the reason and what to do."""
    table = Table(title="Can't be run here", title_justify="left", title_style="bold")
    table.add_column("value", no_wrap=True)
    table.add_column("because")
    table.add_column("what to do")
    for one in refused:
        table.add_row(*(Text(cell) for cell in (f"{one.axis}={one.value}", one.violation.reason, one.violation.fix)))
    return table


def document(
    choice: Choice, passed_over: Sequence[str], left_open: Sequence[str], refused: Sequence[Refused], device: Device
) -> dict[str, Any]:
    """The same for programs: `plan`, `why`, `passed_over`, `left_open`, `refused` and `device`."""
    return {
        "plan": choice.plan.model_dump(),
        "why": list(choice.why),
        "passed_over": list(passed_over),
        "left_open": list(left_open),
        "refused": [
            {"axis": one.axis, "value": one.value, "reason": one.violation.reason, "fix": one.violation.fix}
            for one in refused
        ],
        "device": {name: value for name, value in asdict(device).items() if name != "speed"},
    }
