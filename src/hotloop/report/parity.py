"""What was proven of a plan, for a terminal."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotloop.verdicts import Convergence, Parity

_SHOWN = 8

_MEANING = {
    "bitwise": "the same result to the last bit",
    "fp32-equivalent": "the same result but for rounding",
    "reduced-precision": "another result, computed in fewer bits than the baseline's",
    "unproven": "nobody can tell by comparing steps",
    "broken": "another result",
}


def page(parity: Parity) -> RenderableType:
    """The class, why, and the tensors that are furthest off."""
    lines = [f"{parity.plan}: {parity.parity} ({_MEANING[parity.parity]})", f"  {parity.reason}"]
    if parity.convergence is not None:
        lines.append(f"  {_converged(parity.convergence)}")
    shown: list[RenderableType] = [Text(line) for line in lines]
    if parity.errors and parity.parity not in ("bitwise", "unproven"):
        shown.append(_worst(parity))
    return Group(*shown)


def _worst(parity: Parity) -> Table:
    table = Table(title="Furthest from float64", title_justify="left", title_style="bold")
    table.add_column("what")
    table.add_column("tensor")
    for name in ("error", "harmless baselines", "times"):
        table.add_column(name, justify="right")
    for one in parity.errors[:_SHOWN]:
        table.add_row(one.what, Text(one.name), f"{one.error:.1e}", f"{one.floor:.1e}", f"{one.ratio:.3g}")
    return table


def _converged(found: Convergence) -> str:
    outcome = "they end alike" if found.equivalent else "not shown to end alike"
    trained = f"{len(found.plan)} seeds trained for {found.epochs} epochs"
    if found.difference is None:
        return f"{trained}: {outcome}"
    return (
        f"{trained}: {found.what.replace('_', ' ')} differs by"
        f" {found.difference:.2g} ({found.low:.2g} to {found.high:.2g}), allowed {found.margin:.2g}: {outcome}"
    )
