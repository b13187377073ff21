"""A child process at low priority that compiles a plan into the cache of packages, and proves the plan."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hotloop.core.processes import CompileProcess
from hotloop.core.random.rng import preserve_generators
from hotloop.core.records.race import Parity
from hotloop.errors import describe_error
from hotloop.lowering.build import lower
from hotloop.lowering.compile.package_cache import NOT_CACHED
from hotloop.lowering.program import Program
from hotloop.parity.proof import prove_programs
from hotloop.plan import BASELINE, Plan
from hotloop.task import Task
from hotloop.tuning.economics import Payoff
from hotloop.tuning.spare_time import SpareTime
from hotloop.tuning.step_profile import profile_step

_NICE = 10
"""Lowers the child's priority: on a busy core the child gets a tenth, and with 19 a sixtieth, which never ends."""

_MIN_LIMIT_S, _LIMIT_FACTOR = 120.0, 12.0
"""Least seconds for the child, and the factor on the estimate: a child on busy cores is slow."""

_READ_S = 10.0


@dataclass(frozen=True)
class PreparedPlan:
    """The result of a child.

    Attributes:
        plan: the plan.
        parity: None if there was no proof.
        why_not: why the plan can't be used; empty if it is compiled and proven.
        seconds: from the child's start.
        compile_s: of them, in the compiler.
        gain: estimated speedup; None if it isn't estimated.
        pays: False if the child found that the plan can't win back its cost.
        package: SHA-256 of the package that was proven; empty without a package.
    """

    plan: Plan
    parity: Parity | None
    why_not: str
    seconds: float
    compile_s: float = 0.0
    gain: float | None = None
    pays: bool = True
    package: str = ""


class CandidateProcess:
    """One child, beside the training.

    Args:
        training: the Program of the training; the proof has its State at the child's start.
        eager: the plan that needs no compiling; its step is profiled if the payoff has no gain.
        plans: best first; the child takes the first, or the first that a profile of the step favours.
        accepted: classes of a proof that are enough.
        payoff: what a plan may save.
    """

    def __init__(
        self,
        task: Task,
        training: Program,
        eager: Plan,
        plans: Sequence[Plan],
        accepted: tuple[str, ...],
        payoff: Payoff,
    ) -> None:
        self._plans, self._accepted, self._began = plans, accepted, time.monotonic()
        self.limit_s = max(_MIN_LIMIT_S, _LIMIT_FACTOR * payoff.prepare_s)
        threads = torch.get_num_threads()
        self._process = CompileProcess(lambda: _prepare(task, training, eager, plans, payoff, threads))
        self.spare_time = SpareTime(payoff.step_s, self._process.pause, self._process.proceed, budget_s=payoff.budget_s)

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> PreparedPlan | None:
        """Returns the result; None while the child works."""
        seconds = time.monotonic() - self._began
        if self._process.is_ready:
            found = self._process.result(_READ_S)
        elif seconds > self.limit_s:
            found = {"failure": f"compiling and proving it did not end within {self.limit_s:.0f} s"}
        else:
            return None
        self.end()
        return self._read(found, seconds)

    def _read(self, found: dict[str, Any], seconds: float) -> PreparedPlan:
        gain, compile_s, plan = (
            found.get("gain"),
            float(found.get("compile_s", 0.0)),
            self._plans[found.get("place", 0)],
        )
        if (why := found.get("failure")) is not None:
            return PreparedPlan(plan, None, str(why), seconds, compile_s, gain, bool(found.get("pays", True)))
        parity = Parity.model_validate(found["parity"])
        why_not = "" if parity.parity in self._accepted else f"it's {parity.parity}: {parity.reason}"
        return PreparedPlan(plan, parity, why_not, seconds, compile_s, gain, package=str(found.get("package", "")))

    def end(self) -> None:
        """Ends the child and its compilers."""
        self._process.end()


def _prepare(
    task: Task, training: Program, eager: Plan, plans: Sequence[Plan], payoff: Payoff, threads: int
) -> dict[str, Any]:
    """Compiles and proves one of the plans in the child; see `CandidateProcess`."""
    os.nice(_NICE)
    later = training.state()  # before other Programs change the Task's objects
    torch.set_num_threads(threads)  # the package is for this number; a new thread has torch's default
    from torch._inductor import config  # imports torch's compiler, which takes seconds

    config.compile_threads = 1  # a fork can't start pools of processes
    if payoff.gain is None:
        program = lower(task, eager)
        with preserve_generators():
            payoff = payoff.with_profile(profile_step(program, rewrites=plans[0].rewrites != "none"))
        del program  # its memory is for the candidate
    usual = [place for place, plan in enumerate(plans) if plan.layout == BASELINE.layout]
    place = usual[0] if usual and payoff.has_pooling else 0  # rewrites of pooling need the usual layout
    plan, estimate = plans[place], dict[str, Any](gain=payoff.gain, place=place)
    if not payoff.is_worthwhile:
        return estimate | {"failure": str(payoff), "pays": False}
    lines: list[str] = []
    try:
        program = lower(task, plan, lines.append)
    except Exception as error:  # the reason is for the user: the plan is left out, and training goes on
        return estimate | {"failure": describe_error(error)}
    if missing := [line for line in lines if line.startswith(NOT_CACHED)]:
        return estimate | {"failure": missing[0]}
    (parity,) = prove_programs(task, [program], later=later)
    return estimate | {
        "parity": parity.model_dump(mode="json"),
        "compile_s": program.compile_s,
        "package": program.parts.package.digest,
    }
