"""Merges times of several races of a search: with each Program's startup, relative to one baseline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hotloop.core.records.race import Timing, with_payoff
from hotloop.tuning.races.statistics import Ratio, verdict_of

_SAME_LOAD_RATIO = 1.5
"""Ratio of two races' baselines from which the machine's load differed. Plans of few threads suffer less from load, so
the ratio of such a race is too large; the measured step time is an upper bound of the speed."""


def add_startup_cost(
    timings: Iterable[Timing], baseline: str, starts: Mapping[str, tuple[float, float]], steps: int | None
) -> dict[str, Timing]:
    """Returns the times of one race by name, with startup costs: a Program starts in its first race alone.

    Args:
        starts: seconds of lowering without compiling, and of compiling, by name.
        steps: of the whole run; None if unknown.
    """
    return _rebase_all({one.name: _add_start(one, starts.get(one.name), steps) for one in timings}, baseline)


def _add_start(timing: Timing, start: tuple[float, float] | None, steps: int | None) -> Timing:
    if timing.step_ms is None or start is None:
        return timing
    startup_s, compile_s = max(start[0], timing.startup_s or 0.0), start[1]
    run_s = None if steps is None else startup_s + compile_s + steps * timing.training_s
    return timing.model_copy(update={"startup_s": startup_s, "compile_s": compile_s, "run_s": run_s})


def rebase_timings(timings: Mapping[str, Timing], baseline: str, steps: int | None) -> dict[str, Timing]:
    """Returns the times of several races relative to the baseline of the last race."""
    base_ms = timings[baseline].step_ms
    assert base_ms is not None
    moved = {name: one if name == baseline else _rebase(base_ms, one, steps) for name, one in timings.items()}
    return _rebase_all(moved, baseline)


def _rebase_all(timings: Mapping[str, Timing], baseline: str) -> dict[str, Timing]:
    return {name: with_payoff(timing, timings[baseline]) for name, timing in timings.items()}


def _rebase(base_ms: float, timing: Timing, steps: int | None) -> Timing:
    if not (timing.step_ms and timing.ratio):
        return timing
    step_ms = base_ms / timing.ratio
    if not 1 / _SAME_LOAD_RATIO < timing.step_ms * timing.ratio / base_ms < _SAME_LOAD_RATIO:
        step_ms = max(step_ms, timing.step_ms)
    ratios = {"ratio": timing.ratio, "ratio_low": timing.ratio_low, "ratio_high": timing.ratio_high}
    kept = base_ms / step_ms / timing.ratio
    figures: dict[str, Any] = {name: one and one * kept for name, one in ratios.items()}
    figures |= {"step_ms": step_ms, "samples_per_s": (timing.samples_per_s or 0.0) * timing.step_ms / step_ms}
    if kept < 1:
        figures["verdict"] = verdict_of(
            Ratio(figures["ratio"], figures["ratio_low"], figures["ratio_high"], timing.windows)
        )
    moved = timing.model_copy(update=figures)
    run_s = None if steps is None else moved.starts_s + steps * moved.training_s
    return moved.model_copy(update={"run_s": run_s})
