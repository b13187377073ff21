"""What was promised of hotloop's speed, and by how much each promise is kept or missed: plain values from a summary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.speed.lanes import BASELINE, FEWER_BITS, PEERS, REDUCED, TUTORIAL
from bench.speed.summary import RUN_S, Summary
from bench.speed.workloads import WORKLOADS

SMALL = tuple(name for name, workload in WORKLOADS.items() if workload.grey)
LARGE = tuple(name for name in WORKLOADS if name not in SMALL)

RUN_GOALS = {"warm": 2.2, "cold": 1.5}
"""Of a run that takes the tutorial's loop two minutes, everything included, by what is in the cache."""

_W1_STEPS, _W3_STEPS = 7500, 469
"""Of an epoch on Fashion-MNIST."""


@dataclass(frozen=True)
class Target:
    """One promise.

    Attributes:
        where: workloads, and what of them.
        goal: what is to be reached; the most there may be where `most`.
        reached: None where it wasn't measured.
        unit: of both; "x" of ratios.
        unrun: peers that may be faster than those that it was reached against.
        why: it wasn't measured, where that is known.
    """

    where: str
    goal: float
    reached: float | None
    unit: str = "x"
    most: bool = False
    unrun: tuple[str, ...] = ()
    why: str = ""

    @property
    def met(self) -> bool | None:
        """None where it wasn't measured, or was reached against some alone."""
        if self.reached is None:
            return None
        reached = self.reached <= self.goal if self.most else self.reached >= self.goal
        return None if reached and self.unrun else reached

    @property
    def verdict(self) -> str:
        """`met`, or by how much it was missed."""
        if self.reached is None:
            return f"not measured: {self.why}" if self.why else "not measured"
        if self.met is None:
            return f"ahead of those that ran (not run: {', '.join(self.unrun)})"
        if self.met:
            return "met"
        if self.goal <= 0:
            return f"missed by {self.reached - self.goal:.3g} {self.unit}"
        off = self.reached / self.goal - 1 if self.most else 1 - self.reached / self.goal
        return f"missed by {off:.0%}"


def targets(found: Summary, device: str) -> list[Target]:
    """Those of a device, in order."""
    kept = _on_cpu(found) if device == "cpu" else _on_gpu(found)
    return [*kept, *_plain(found), *(_memory(found, workload) for workload in found.lines)]


def _on_cpu(found: Summary) -> Iterator[Target]:
    for name in ("lightning", "accelerate"):
        for goal, which in ((2.5, "floor"), (4.0, "goal")):
            yield Target(f"W1 to W5, step, mean over {name} ({which})", goal, mean_of(SMALL, _step(found, name)))
    yield Target("W1 to W5, step, mean over transform", 4.0, mean_of(SMALL, _step(found, "transform")))
    yield from _best(found, SMALL, 1.2)
    for cache, goal in RUN_GOALS.items():
        run = f"W1 to W5, run of {RUN_S / 60:.0f} min reckoned, mean over tutorial, {cache}"
        yield Target(run, goal, mean_of(SMALL, _run(found, cache)))
    yield from _best(found, LARGE, 1.0)
    yield Target("W6 to W9, step, mean over tutorial", 1.15, mean_of(LARGE, _step(found, TUTORIAL)))


def _on_gpu(found: Summary) -> Iterator[Target]:
    for workload in ("W1", "W2", "W4"):
        for name, goal in (("lightning", 20.0), (TUTORIAL, 10.0)):
            yield Target(f"{workload}, step over {name}", goal, _step(found, name)(workload))
    for workload, steps, goal_s in (("W1", _W1_STEPS, 0.3), ("W3", _W3_STEPS, 0.25)):
        line = found.line(workload, found.ours)
        epoch_s = 1e-3 * steps * line.step_ms if line is not None and line.step_ms else None
        yield Target(f"{workload}, an epoch of {steps} steps", goal_s, epoch_s, "s", most=True)
    for workload in ("W6", "W7", "W9"):
        yield Target(f"{workload}, step over {TUTORIAL}, in default precision", 1.5, _step(found, TUTORIAL)(workload))
        yield _with_fewer_bits(found, workload)


def _with_fewer_bits(found: Summary, workload: str) -> Target:
    own, tutorial = found.line(workload, FEWER_BITS), found.line(workload, TUTORIAL)
    where = f"{workload}, step over {TUTORIAL}, bf16 allowed"
    if own is None:
        return Target(where, 3.0, None, why=f"see --plans auto/{REDUCED}")
    if own.step_ms is None or tutorial is None or tutorial.step_ms is None:
        return Target(where, 3.0, None, why=own.missing)
    return Target(where, 3.0, tutorial.step_ms / own.step_ms)


def _plain(found: Summary) -> Iterator[Target]:
    """hotloop's plan beside its own baseline, where that ran too: what it chooses may never be slower."""
    for workload in found.lines:
        line = found.line(workload, BASELINE)
        if line is not None and line.ratio:
            within = line.ratio.median if line.ratio.high is None else line.ratio.high
            yield Target(f"{workload}, step over hotloop's own baseline (upper end of its interval)", 1.0, within)


def _best(found: Summary, workloads: Sequence[str], goal: float) -> Iterator[Target]:
    for workload in workloads:
        best = found.best_peer(workload) if workload in found.lines else None
        reached = best.ratio.median if best is not None and best.ratio else None
        where = f"{workload}, step over the best peer{f' ({best.name})' if best else ''}"
        yield Target(where, goal, reached, unrun=_unrun(found, workload) if best else ())


def _unrun(found: Summary, workload: str) -> tuple[str, ...]:
    """Peers that know this network and weren't measured on it, for lack of time or for another reason."""
    ran = {line.name for line in found.lines[workload] if line.step_ms}
    able = [peer.name for peer in PEERS if not peer.missing(WORKLOADS[workload])]
    return tuple(name for name in able if name not in ran)


def _memory(found: Summary, workload: str) -> Target:
    """The most that it held with any cache, beyond what the tutorial's loop did."""
    own, tutorial = found.line(workload, found.ours), found.line(workload, TUTORIAL)
    data_mb = found.limits.get(workload, {}).get("data_bytes", 0) / 1e6
    more_mb = None
    if own is not None and tutorial is not None and own.peak_mb and tutorial.peak_mb:
        more_mb = max(own.peak_mb.values()) - max(tutorial.peak_mb.values())
    return Target(f"{workload}, memory of the host beyond the tutorial's", data_mb, more_mb, "MB", most=True)


Reached = Callable[[str], float | None]


def _step(found: Summary, name: str) -> Reached:
    """How many times as fast as that peer, by workload."""

    def reached(workload: str) -> float | None:
        line = found.line(workload, name)
        return line.ratio.median if line is not None and line.ratio else None

    return reached


def _run(found: Summary, cache: str) -> Reached:
    def reached(workload: str) -> float | None:
        own, tutorial = found.line(workload, found.ours), found.line(workload, TUTORIAL)
        if own is None or tutorial is None or cache not in own.run_s or not tutorial.run_s:
            return None
        return _only(tutorial.run_s) / own.run_s[cache]

    return reached


def _only(by_cache: Mapping[str, float]) -> float:
    return next(iter(by_cache.values()))


def mean_of(workloads: Sequence[str], reached: Reached) -> float | None:
    """The geometric mean, where there is one of each: of some of them it would promise something else."""
    each = [reached(workload) for workload in workloads]
    if any(value is None for value in each):
        return None
    return math.exp(sum(math.log(value) for value in each if value is not None) / len(each))
