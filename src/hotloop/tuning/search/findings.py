"""The findings of a search, derived from the timings of its races."""

from __future__ import annotations

from collections.abc import Mapping

from hotloop.core.processes import Deadline
from hotloop.core.records.race import Timing
from hotloop.plan import Plan

BASELINE = "baseline"

OWN_ORDER = (
    "its data has an order of its own, so no plan can be proven equal and none was raced, whatever the "
    "--time-limit; hotloop race measures how fast they are"
)


def has_results(timings: Mapping[str, Timing]) -> bool:
    """Whether any plan except the baseline has a result."""
    rivals = [timing for timing in timings.values() if timing.name != BASELINE]
    return any(one.verdict is not None or one.failure is not None or one.behind for one in rivals)


def is_rules_open(rules: Plan | None, baseline: Plan, timings: Mapping[str, Timing], failed: Mapping[str, str]) -> bool:
    """Whether the plan of the rules is undecided: neither excluded by a result nor proven."""
    if rules is None or rules == baseline:
        return not has_results(timings)
    timing = timings.get(rules.brief())
    if timing is None or timing.failure is not None:
        return timing is None and rules.brief() not in failed
    return timing.parity is None and not timing.behind and (timing.verdict is None or (timing.ratio or 0.0) > 1)


def short_limit_note(time_limit_s: float | None, deadline: Deadline) -> str:
    """Returns the message for a search that found no significant difference between a plan and the baseline."""
    short, more = "too little was measured", "a --time-limit gives more time"
    if time_limit_s is not None:
        short, more = f"a time limit of {time_limit_s:g} s is too short", "give it more"
    elif deadline.is_met:
        short, more = f"{deadline}, too little", "a later stop gives more"
    return f"{short} to compare any plan with the baseline; {more}"
