"""Verdicts made by hand, as races of small Tasks leave them."""

from __future__ import annotations

from typing import Any

from hotloop.core.records.race import Timing, Verdict
from hotloop.plan import Plan

VERSIONS = {"hotloop": "1", "torch": "2", "python": "3"}
FUSED, COMPILED, WRONG = Plan(optimizer="fused"), Plan(compile="step"), Plan(precision="bf16")


def timing(plan: Plan, ratio: float, **more: Any) -> Timing:
    figures: dict[str, Any] = dict(ratio=ratio, ratio_low=ratio - 0.01, ratio_high=ratio + 0.01, windows=20)
    figures |= dict(step_ms=10 / ratio, startup_s=1.0, compile_s=0.0, parity="bitwise", states=16, verdict="faster")
    return Timing(name=plan.brief(), plan=plan.model_dump(), **figures | more)


def verdict(*plans: Timing, **more: Any) -> Verdict:
    base = timing(Plan(), 1.0, verdict="no difference")
    given: dict[str, Any] = dict(task="t", fingerprint="f", machine="m", versions=VERSIONS, seconds=1.0, steps=100)
    return Verdict(plans=[base, *plans], baseline="baseline", winner=None, **given | more)
