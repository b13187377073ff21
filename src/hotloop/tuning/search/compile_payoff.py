"""Estimates of compilations: gain, seconds, and saving in a run.

The constants are fitted to a dozen networks, compiled without cache on two cores of a 2025 server.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hotloop.plan import Plan
from hotloop.tuning.search.budget import Budget
from hotloop.tuning.search.step_profile import StepProfile

_COMPILE_S = {"package": 12.5, "step": 8.5, "forward": 8.5, "none": 2.0}
"""Seconds to compile the smallest step without a cache, by the axis `compile`; `none` is a recorded graph."""

_OPERATION_COMPILE_S = 0.025
"""Seconds for each operation of the step."""

_UNKNOWN_COMPILE_S = 40.0
"""Seconds for a step whose operations are hidden, or that is unrolled over time."""

_OPERATION_TRACE_S = 0.6e-3
"""Seconds for each operation of a step that is traced again."""

_DISPATCH_S = 5e-6
"""Seconds of PyTorch's overhead for an operation with autograd: 3 to 8 us."""

_CALL_S = 2e-6
"""Part of this overhead that a compiled step on a CPU saves, outside of the measured operations."""

_STEP_CALL_S = {"package": -30e-6, "step": 0.0}
"""Seconds of a compiled step's call beyond an eager one."""

_FORWARD_SHARE = 0.4
"""Share of the saving if only the forward and backward pass are compiled."""

_FUSED_SHARE = 0.3
"""Remaining share of the time of operations that the compiler fuses."""

_LAUNCH_S = 1e-6
"""Seconds between two operations of a CUDA graph."""

_MIN_GAIN, _MAX_GAIN = 1.02, 8.0


@dataclass(frozen=True)
class CompileCandidate:
    """A compiled plan with expected seconds: of the run without it (None if unknown), saved, and of compilation."""

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
    """Returns the candidates, fastest first; if there is no time for two, the largest saving first.

    Args:
        plans: compiled plans, fastest first.
        made, step_s, budget: the eager plan's step (None if unknown), its seconds, and its run's budget.
        recurrent: whether compilers unroll the step's layers over time.
        proof_s: of a proof that the eager plan doesn't need.
        looks: number of times that the run traces the compiled step again.
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
    """Estimates the seconds of a compilation without a cache; a slow or busy machine takes twice as long."""
    return _UNKNOWN_COMPILE_S if operations is None else _COMPILE_S[way] + operations * _OPERATION_COMPILE_S


def estimate_trace_s(operations: int) -> float:
    """Estimates the seconds of tracing a step of `operations` operations again."""
    return operations * _OPERATION_TRACE_S


def estimate_compile_gain(
    made: StepProfile | None, step_s: float, way: str = "package", *, recorded: bool = False
) -> float:
    """Estimates the speedup of a compiled step; the minimum if `made` is unknown.

    Args:
        step_s: seconds of the step, if `made` has none.
        recorded: whether the step becomes a CUDA graph, which removes the host's overhead.
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
