"""Formats the choice of `auto`, its reasons and the infeasible values, for a terminal or as a document."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotloop.core.feasibility import InfeasibleValue
from hotloop.core.records.race import Convergence, Parity
from hotloop.report.blocks import Block, Section, facts, lines, table, terminal_table, text, tiles

if TYPE_CHECKING:
    from hotloop.core.feasibility import PlanForecast


_STORED = "stored as the fastest that is proven equal"


def plan_page(forecast: PlanForecast, requested: Collection[str] = (), *, has_all_axes: bool = False) -> RenderableType:
    """Returns the plan with its reasons, its file, tried, skipped and open plans, and the infeasible values.

    Args:
        requested: axes that the user set.
        has_all_axes: whether the plan's file has every axis, also those without an effect here.
    """
    choice, first = forecast.choice, "auto runs"
    lines = []
    if forecast.remembered is not None:
        lines.append(f"auto runs: {forecast.remembered.brief()}, {_STORED}")
        first = "without that it would run"
    lines += [f"{first}: {choice.plan.brief()}", *(f"  {reason}" for reason in choice.why)]
    if forecast.compiled:
        tries = "that" if len(forecast.compiled) == 1 else "one or two of these"
        lines.append(
            f"  unless compiled it is faster and proven: --plan auto tries {tries} if timed steps show "
            "that a compilation pays:"
        )
        lines += [f"    {plan.brief()}" for plan in forecast.compiled]
    lines += [f"auto leaves out {line}" for line in forecast.passed_over]
    lines += [f"train finds out about {line}" for line in forecast.left_open]
    lines += _plan_file(forecast, requested, has_all_axes)
    return Group(*(Text(line) for line in lines), refusals_table(forecast.refused))


def _plan_file(forecast: PlanForecast, requested: Collection[str], has_all_axes: bool) -> Iterator[str]:
    """Yields the plan as a file for `--plan FILE`."""
    plan = forecast.plan
    axes = None if has_all_axes else plan.relevant_axes(requested)
    yield ("as a file for --plan FILE" + ("" if has_all_axes else " (hotloop plan --all shows the other axes)") + ":")
    yield from (f"  {line}" for line in plan.to_toml(axes).splitlines())


def refusals_table(refused: Sequence[InfeasibleValue]) -> Table:
    """Returns the infeasible values, each with the reason and the fix."""
    table = Table(title="Can't be run here", title_justify="left", title_style="bold")
    table.add_column("value", no_wrap=True)
    table.add_column("because")
    table.add_column("what to do")
    for one in refused:
        table.add_row(*(Text(cell) for cell in (f"{one.axis}={one.value}", one.violation.reason, one.violation.fix)))
    return table


def plan_document(forecast: PlanForecast) -> dict[str, Any]:
    """Returns the page's content as a document: `plan` runs, and training tries the `compiled` plans."""
    remembered, choice = forecast.remembered, forecast.choice
    return {
        "plan": (remembered or choice.plan).model_dump(),
        "why": list(choice.why) if remembered is None else [_STORED],
        "remembered": remembered is not None,
        "compiled": [plan.model_dump() for plan in forecast.compiled] if remembered is None else [],
        "passed_over": forecast.passed_over,
        "left_open": forecast.left_open,
        "refused": [
            {"axis": one.axis, "value": one.value, "reason": one.violation.reason, "fix": one.violation.fix}
            for one in forecast.refused
        ],
        "device": {name: value for name, value in asdict(forecast.device).items() if name != "speed"},
    }


_MAX_TENSORS = 8

_MEANING = {
    "bitwise": "the same result to the last bit",
    "fp32-equivalent": "the same result except for rounding",
    "reduced-precision": "another result, computed in fewer bits than the baseline's",
    "unproven": "a comparison of steps can't decide",
    "broken": "another result",
}


def parity_page(parity: Parity) -> RenderableType:
    """Returns the class, the reason, and the tensors with the largest errors."""
    lines = [f"{parity.plan}: {parity.parity} ({_MEANING[parity.parity]})", f"  {parity.reason}"]
    if parity.convergence is not None:
        lines.append(f"  {describe_convergence(parity.convergence)}")
    shown: list[RenderableType] = [Text(line) for line in lines]
    if parity.errors and parity.parity not in ("bitwise", "unproven"):
        shown.append(terminal_table(_errors(parity, _MAX_TENSORS)))
    return Group(*shown)


def _errors(parity: Parity, count: int) -> Block:
    rows = [
        (one.what, one.name, f"{one.error:.1e}", f"{one.floor:.1e}", f"{one.ratio:.3g}")
        for one in parity.errors[:count]
    ]
    columns = ("what", "tensor", "error", "rounding noise", "times")
    return table("Furthest from float64", columns, rows, numbers=(2, 3, 4))


def describe_convergence(convergence: Convergence) -> str:
    outcome = "they end alike" if convergence.equivalent else "not shown to end alike"
    trained = f"{len(convergence.plan)} seeds trained for {convergence.epochs} epochs"
    if convergence.difference is None:
        return f"{trained}: {outcome}"
    return (
        f"{trained}: {convergence.what.replace('_', ' ')} differs by"
        f" {convergence.difference:.2g} ({convergence.low:.2g} to {convergence.high:.2g}), allowed {convergence.margin:.2g}: {outcome}"
    )


def proof_section(proof: Parity) -> Section:
    """Returns the class of a plan's agreement with the baseline, and its largest errors."""
    blocks = [
        *tiles([("agreement with the baseline", proof.parity)]),
        text(proof.reason),
        facts(
            [
                ("Plan", proof.plan),
                ("Compared states", f"{proof.states:,}"),
                ("Steps of the free run", f"{proof.free_steps:,}"),
                ("First wrong tensor", proof.first),
                ("Convergence", "" if proof.convergence is None else describe_convergence(proof.convergence)),
            ]
        ),
        *lines(proof.reductions),
    ]
    if proof.errors:
        blocks.append(_errors(proof, 30))
    return Section("proof", "Proof", blocks)
