"""What `auto` would run and why, and what can't be run, as tables for a terminal or a document for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotloop.core.feasibility.forecast import InfeasibleValue
from hotloop.core.records.race import Convergence, Parity

if TYPE_CHECKING:
    from hotloop.core.feasibility.forecast import PlanForecast, RankedPlan


_REMEMBERED = "remembered as the fastest that is proven equal"


def plan_page(found: PlanForecast) -> RenderableType:
    """What runs and what speaks for it, what is tried before, passed over or left open, and what can't be run."""
    choice, first = found.choice, "auto runs"
    lines = []
    if found.remembered is not None:
        lines.append(f"auto runs: {found.remembered.brief()}, {_REMEMBERED}")
        first = "without that it would run"
    lines += [f"{first}: {choice.plan.brief()}", *(f"  {reason}" for reason in choice.why)]
    if found.compiled:
        tries = "that" if len(found.compiled) == 1 else "one or two of these"
        if any(one.plan.compile == "none" for one in found.compiled):
            tries += ", and one with compile=none,"
        lines.append(
            f"  unless compiled it is faster and proven: --plan auto tries {tries} first, if timed steps say it pays:"
        )
        lines += _with_new_reasons(found.compiled)
    lines += [f"auto passes over {line}" for line in found.passed_over]
    lines += [f"train finds out about {line}" for line in found.left_open]
    return Group(*(Text(line) for line in lines), refusals_table(found.refused))


def _with_new_reasons(choices: Sequence[RankedPlan]) -> Iterator[str]:
    """Each plan, and behind it the reasons that no plan before it has."""
    told = set[str]()
    for choice in choices:
        yield f"    {choice.plan.brief()}"
        yield from (f"      {reason}" for reason in choice.why if reason not in told)
        told.update(choice.why)


def refusals_table(refused: Sequence[InfeasibleValue]) -> Table:
    """Values that can't be run here, with the reason and what to do."""
    table = Table(title="Can't be run here", title_justify="left", title_style="bold")
    table.add_column("value", no_wrap=True)
    table.add_column("because")
    table.add_column("what to do")
    for one in refused:
        table.add_row(*(Text(cell) for cell in (f"{one.axis}={one.value}", one.violation.reason, one.violation.fix)))
    return table


def plan_document(found: PlanForecast) -> dict[str, Any]:
    """The same for programs: `plan` is what runs, `compiled` what is raced and proven before, the rest as on the page."""
    remembered, choice = found.remembered, found.choice
    return {
        "plan": (remembered or choice.plan).model_dump(),
        "why": list(choice.why) if remembered is None else [_REMEMBERED],
        "remembered": remembered is not None,
        "compiled": [one.plan.model_dump() for one in found.compiled] if remembered is None else [],
        "compiled_why": [list(one.why) for one in found.compiled] if remembered is None else [],
        "passed_over": found.passed_over,
        "left_open": found.left_open,
        "refused": [
            {"axis": one.axis, "value": one.value, "reason": one.violation.reason, "fix": one.violation.fix}
            for one in found.refused
        ],
        "device": {name: value for name, value in asdict(found.device).items() if name != "speed"},
    }


_MAX_TENSORS = 8

_MEANING = {
    "bitwise": "the same result to the last bit",
    "fp32-equivalent": "the same result but for rounding",
    "reduced-precision": "another result, computed in fewer bits than the baseline's",
    "unproven": "nobody can tell by comparing steps",
    "broken": "another result",
}


def parity_page(parity: Parity) -> RenderableType:
    """The class, why, and the tensors that are furthest off."""
    lines = [f"{parity.plan}: {parity.parity} ({_MEANING[parity.parity]})", f"  {parity.reason}"]
    if parity.convergence is not None:
        lines.append(f"  {_describe_convergence(parity.convergence)}")
    shown: list[RenderableType] = [Text(line) for line in lines]
    if parity.errors and parity.parity not in ("bitwise", "unproven"):
        shown.append(_worst_tensors_table(parity))
    return Group(*shown)


def _worst_tensors_table(parity: Parity) -> Table:
    table = Table(title="Furthest from float64", title_justify="left", title_style="bold")
    table.add_column("what")
    table.add_column("tensor")
    for name in ("error", "harmless baselines", "times"):
        table.add_column(name, justify="right")
    for one in parity.errors[:_MAX_TENSORS]:
        table.add_row(one.what, Text(one.name), f"{one.error:.1e}", f"{one.floor:.1e}", f"{one.ratio:.3g}")
    return table


def _describe_convergence(found: Convergence) -> str:
    outcome = "they end alike" if found.equivalent else "not shown to end alike"
    trained = f"{len(found.plan)} seeds trained for {found.epochs} epochs"
    if found.difference is None:
        return f"{trained}: {outcome}"
    return (
        f"{trained}: {found.what.replace('_', ' ')} differs by"
        f" {found.difference:.2g} ({found.low:.2g} to {found.high:.2g}), allowed {found.margin:.2g}: {outcome}"
    )
