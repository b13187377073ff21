"""Whether compiling pays in a run: what it should win there, and what it takes.

The figures are fitted to a dozen networks, each compiled in all ways with nothing kept, on two cores of a server of today.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hotloop.plan import Plan
from hotloop.tuning.search.budget import Budget
from hotloop.tuning.search.step_profile import StepProfile

_COMPILE_S = {"package": 12.5, "step": 8.5, "forward": 8.5, "none": 2.0}
"""A compilation with nothing kept from an earlier one, of the smallest step; none at all where graphs are recorded."""

_OPERATION_COMPILE_S = 0.025
"""For each operation of the step."""

_UNKNOWN_COMPILE_S = 40.0
"""Of a step that torch doesn't show, or that is written out time step by time step."""

_OPERATION_TRACE_S = 0.6e-3
"""For each operation of a step that is traced again."""

_DISPATCH_S = 5e-6
"""What PyTorch spends on one operation, with autograd, whatever its size: 3 to 8 us on processors of today."""

_CALL_S = 2e-6
"""Of that, what a compiled step on a CPU saves besides the time that is measured inside of operations."""

_STEP_CALL_S = {"package": -30e-6, "step": 0.0}
"""What a compiled step costs to call, more than an eager one."""

_FORWARD_SHARE = 0.4
"""Of what is saved, where the update and what is between the parts stays with PyTorch."""

_FUSED_SHARE = 0.3
"""What is left of the time of operations that a compiler writes itself: they share loops over one part of memory."""

_LAUNCH_S = 1e-6
"""For each operation of a step that is recorded as a CUDA graph, between the end of one and the beginning of the next."""

_MIN_GAIN, _MAX_GAIN = 1.02, 8.0


@dataclass(frozen=True)
class CompileCandidate:
    """A way to compile.

    Attributes:
        plan: that is compiled.
        run_s: of this run without it; None if its length isn't known.
        won_s: of that, by going on with it.
        compile_s: that compiling takes.
        telling_s: that it takes to tell whether it is faster, and to prove it.
        pooled: see `StepProfile`.
    """

    plan: Plan
    run_s: float | None
    saved_s: float
    compile_s: float
    race_and_proof_s: float
    has_pooling: bool = False

    @property
    def costs_s(self) -> float:
        return self.compile_s + self.race_and_proof_s


def rate_candidates(
    plans: Iterable[Plan],
    made: StepProfile | None,
    step_s: float,
    budget: Budget,
    *,
    recurrent: bool = False,
    proof_s: float = 0.0,
    looks: int = 0,
) -> list[CompileCandidate]:
    """As they are preferred; those that leave most of the run first, where there is no time for two.

    Args:
        plans: compiled ways, that whose steps are shortest first.
        made: the step of the eager plan; None if that isn't known.
        step_s: of it.
        budget: of the run under it.
        recurrent: whether the step has layers that compilers write out time step by time step.
        proof_s: of a proof that the eager plan needn't have.
        looks: how often the run traces the compiled step again.
    """
    found, pooled = list[CompileCandidate](), made is not None and made.has_pooling
    for plan in plans:
        seen = None if recurrent and plan.compile != "none" else made
        operations = None if seen is None else seen.operations
        gain = estimate_compile_gain(seen, step_s, plan.compile, recorded=plan.graphs != "none")
        won_s = budget.saves_s(gain) - looks * estimate_trace_s(operations or 0)
        takes_s = estimate_compile_s(operations, plan.compile)
        found.append(CompileCandidate(plan, budget.run_s, won_s, takes_s, budget.full_race_s() + proof_s, pooled))
    tight = bool(found) and not budget.is_set_by_user and found[0].saved_s < 2 * found[0].costs_s
    return sorted(found, key=lambda one: one.costs_s - one.saved_s) if tight else found


def estimate_compile_s(operations: int | None, way: str = "package") -> float:
    """Seconds that a compilation takes with nothing kept from an earlier one; twice that on a slow or busy machine."""
    return _UNKNOWN_COMPILE_S if operations is None else _COMPILE_S[way] + operations * _OPERATION_COMPILE_S


def estimate_trace_s(operations: int) -> float:
    """Seconds of seeing once whether a compiled step of so many operations still does the same."""
    return operations * _OPERATION_TRACE_S


def estimate_compile_gain(
    made: StepProfile | None, step_s: float, way: str = "package", *, recorded: bool = False
) -> float:
    """By what factor a compiled step is faster, if a compiler does with it what it does with most; little if it isn't known.

    Args:
        step_s: of the step, where `made` has no time of its own.
        recorded: whether it becomes a CUDA graph, so that the host has little to do.
    """
    if made is None:
        return _MIN_GAIN
    left_s = step_s - made.operations * _DISPATCH_S
    if made.busy_s is not None and recorded:
        left_s = made.busy_s + made.operations * _LAUNCH_S
    elif made.step_s is not None and made.library_s is not None and made.other_s is not None:
        saved_s = (1 - _FUSED_SHARE) * made.other_s + made.operations * _CALL_S - _STEP_CALL_S.get(way, 0.0)
        saved_s *= _FORWARD_SHARE if way == "forward" else 1.0
        step_s, left_s = made.step_s, max(made.step_s - saved_s, made.library_s)
    return min(_MAX_GAIN, max(_MIN_GAIN, step_s / left_s if left_s > 0 else _MAX_GAIN))
