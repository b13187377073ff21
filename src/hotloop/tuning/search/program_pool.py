"""The Programs of a search in memory, and their startup costs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from hotloop.core.hardware.limits import free_memory_bytes
from hotloop.core.processes import Deadline, time_limit
from hotloop.core.records.training import TaskFacts
from hotloop.errors import PlanError
from hotloop.lowering.build import lower
from hotloop.lowering.program import Program
from hotloop.plan import Plan
from hotloop.task import Task

MAX_COMPILE_S = 1800.0
"""Seconds after which a compilation is ended: torch's compiler doesn't finish for every network."""


@dataclass
class ProgramPool:
    """Programs of one Task by name.

    Attributes:
        starts: seconds of the first lowering without compiling, and of compiling, by name.
        compile_limit_s: for each compilation.
    """

    task: Task
    lower: Callable[[Task, Plan], Program] = lambda task, plan: lower(task, plan)
    programs: dict[str, Program] = field(default_factory=dict)
    starts: dict[str, tuple[float, float]] = field(default_factory=dict)
    compile_limit_s: float = MAX_COMPILE_S

    def get_program(self, name: str, plan: Plan) -> Program:
        """Returns the Program of this name, lowered if it isn't in memory.

        Raises:
            PlanError: the plan can't be run, or compiling it takes too long.
        """
        if name not in self.programs:
            began = time.perf_counter()
            limited = (
                nullcontext() if plan.compile == "none" else time_limit(self.compile_limit_s, self._compile_limit_error)
            )
            with limited:
                program = self.programs[name] = self.lower(self.task, plan)
            self.starts.setdefault(name, (time.perf_counter() - began - program.compile_s, program.compile_s))
        return self.programs[name]

    def _compile_limit_error(self) -> PlanError:
        return PlanError(
            f"compiling it was stopped after {self.compile_limit_s:,.0f} s",
            expected="a compiler that finishes",
            fix="choose compile=none",
        )

    def release(self, names: Iterable[str]) -> None:
        held = [name for name in names if name in self.programs]
        for name in held:
            self.programs.pop(name).close()
        if held:
            gc.collect()  # models and optimizers refer to each other

    def recompile_s(self, name: str, plan: Plan, deadline: Deadline) -> float:
        """Compiles again and returns the seconds; those of the first time on failure or at the deadline."""
        try:
            with deadline.enforce("compiling again"):
                program = self.lower(self.task, plan)
        except Exception:
            return self.starts[name][1] if name in self.starts else 0.0
        program.close()
        return program.compile_s

    def close(self) -> None:
        for program in self.programs.values():
            program.close()


_BYTES_PER_PARAMETER = 28
"""Bytes for each parameter: value, gradient, two optimizer values, and the State's copy."""

_MEMORY_SHARE = 0.6
"""Share of the free memory; the rest is for activations and the proof."""


def max_programs_in_memory(facts: TaskFacts, device: str) -> int:
    """Returns the number of further Programs that fit into the free memory."""
    return int(
        _MEMORY_SHARE * free_memory_bytes(torch.device(device)) / (_BYTES_PER_PARAMETER * max(1, facts.parameters))
    )


def split_evenly(wanted: list[str], size: int) -> list[list[str]]:
    """Splits names into as few groups as possible, of similar size and at most `size`."""
    count = -(-len(wanted) // max(1, size))
    return [wanted[number::count] for number in range(count)]
