"""Queries on a profiled step: shares of its time, costs of calls, operators and lines by place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeVar

from hotloop.core.records.profile import LineTime, LoaderUse, OperatorTime, Profile, Remedy
from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.operator_cost import OpCost, least_ms, precision_in

Key = TypeVar("Key")

Value = TypeVar("Value")

COMPUTING_PHASES: tuple[Phase, ...] = ("forward", "loss", "backward", "update")
"""Phases that consist of operators."""

ASIDE_PHASES: tuple[Phase, ...] = ("python", "logging", "batch", "synchronisation", "copy", "unattributed")
"""Phases of the user's own lines between the parts of training."""

OFTEN = 0.5
"""Least count per step of a recurring pattern."""

DEDUCED_PHASES: tuple[Phase, ...] = ("python", "batch", "loss")
"""Default phases of a running thread; time in which the thread doesn't run is unattributed."""

PLAIN = ("", "(loss)")
"""Module names of operators outside of any module."""

PYTHON_FACTOR = 2.0
"""Ratio of a line's time to its operators' time above which the line counts as Python work."""

BY_HAND = "by hand"
"""Kind of an update without an optimizer."""

_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")

_RANDOM_OPS = ("rand", "normal", "bernoulli", "uniform", "multinomial", "exponential", "poisson")
"""Name prefixes of random operators."""

_WRAPPER_OPS = ("Optimizer.step#", "Optimizer.zero_grad#")

_SMALL_LAUNCHES = {"cpu": 10.0, "accelerator": 2.0}
"""Time of a small operator, in launches: below it the call costs more than the work."""

_LAUNCH_US = 4.0  # launch time of an operator on an unmeasured machine, in us; measured values are 3 to 8 us


@dataclass(frozen=True)
class ProfiledStep:
    """A profile with distinguished steps, as the detectors read it.

    Attributes:
        ms: time of a clean step.
        named: places that already have a remedy.
    """

    profile: Profile
    ms: float
    named: frozenset[str] = frozenset()

    @property
    def on_cpu(self) -> bool:
        return self.profile.device == "cpu"

    @property
    def launch_ms(self) -> float:
        return (self.profile.limits.launch_us or _LAUNCH_US) / 1e3

    @property
    def small_ms(self) -> float:
        """Time below which an operator counts as small."""
        return self.launch_ms * _SMALL_LAUNCHES["cpu" if self.on_cpu else "accelerator"]

    @property
    def core_share(self) -> float:
        """Share of time in which the computing thread has a core, if other programs use the rest."""
        threads = self.profile.threads
        if threads is None or threads.busy + threads.others < threads.cores - 0.5:
            return 1.0
        return min(1.0, threads.busy / max(1, min(threads.torch, threads.cores)))

    def share(self, ms: float) -> float:
        """Returns the share of the step, 0 to 1."""
        return min(1.0, max(0.0, ms / self.ms))

    def part(self, ms: float) -> str:
        """Formats a part of the step as `1.20 ms of each step of 8.50 ms`."""
        return f"{ms:.2f} ms of each step of {self.ms:.2f} ms"

    def phase(self, *names: Phase) -> float:
        """Returns the milliseconds of these phases together."""
        return sum(self.profile.phases.get(name, 0.0) for name in names)

    @cached_property
    def _operators(self) -> list[OperatorTime]:
        """Operators without wrappers, such as an optimizer's whole step, whose time is known from elsewhere."""
        return [one for one in self.profile.operators if not one.name.startswith(_WRAPPER_OPS)]

    @property
    def evaluations(self) -> float:
        """Evaluations of the loss per update, as in a line search with a closure; at least 1."""
        return max([1.0, *(use.evaluations for use in self.profile.optimizers)])

    def operators(self, wanted: Callable[[OperatorTime], bool]) -> list[OperatorTime]:
        return [one for one in self._operators if wanted(one)]

    def cost_ms(self, one: OperatorTime) -> float:
        """Returns an operator's own milliseconds and its part of the time between operators."""
        return one.ms * self._scales.get(one.phase, 1.0) + one.calls * self.between_ms(one.phase)

    def calling_ms(self, one: OperatorTime) -> float:
        """Returns the milliseconds of calls: Python and launches."""
        return min(self.cost_ms(one), one.calls * (self.between_ms(one.phase) + self.launch_ms))

    def between_ms(self, phase: Phase) -> float:
        """Returns the milliseconds per call between operators: Python and launches."""
        return self._between_ms.get(phase, 0.0)

    def reclaimable_ms(self, one: OperatorTime) -> float:
        """Returns the milliseconds saved if a single call replaced all calls of an operator.

        The least time of the work itself stays, and of large operators little more than the launch is saved. The time
        between calls counts only up to that of a small operator: a longer time has another cause.
        """
        calls = max(one.calls, 1e-9)
        each = one.ms * self._scales.get(one.phase, 1.0) / calls
        wasted = max(0.0, each - operator_least_ms(one, self.profile) / calls)
        large = max(1.0, each * self.core_share / self.small_ms)
        inside = max(min(self.launch_ms, each), min(wasted, each / large**2))
        return self.python_around_ms(one) + one.calls * inside

    def python_around_ms(self, one: OperatorTime) -> float:
        """Returns the Python time between calls, per call at most that of a small operator."""
        return one.calls * min(self.between_ms(one.phase), self.small_ms) * self.core_share

    def lines(self, *phases: Phase) -> list[LineTime]:
        """Returns lines with times scaled to their phases: samples only divide the time of a phase."""
        found = []
        for phase in phases:
            lines = [line for line in self.profile.lines if line.phase == phase]
            sampled = self._sampled_ms(phase)
            scale = (self.phase(phase) + self._waited_ms(phase)) / sampled if sampled else 0.0
            lines = [line.model_copy(update={"ms": scale * line.ms, "own_ms": scale * line.own_ms}) for line in lines]
            found += self._beside_work(lines, phase) if phase in ASIDE_PHASES else lines
        return found

    def _beside_work(self, lines: list[LineTime], phase: Phase) -> list[LineTime]:
        """Takes operator times from the trace, and divides the rest by samples, which are few in short steps."""
        at = {
            where: sum(line.own_ms for line in ones) for where, ones in group_by(lines, lambda line: line.where).items()
        }
        work = [self.operators_ms_at(line.where, phase) * line.own_ms / (at[line.where] or 1.0) for line in lines]
        more = [max(0.0, line.own_ms - own) for line, own in zip(lines, work, strict=True)]
        everything = sum(self.cost_ms(one) for one in self._by_phase.get(phase, []))
        rest = max(0.0, sum(at.values()) - everything) / (sum(more) or 1.0)
        return [
            line.model_copy(update={"own_ms": own + rest * extra})
            for line, own, extra in zip(lines, work, more, strict=True)
        ]

    @cached_property
    def aside_ms(self) -> dict[str, float]:
        """Own milliseconds of lines between the parts of training."""
        lines = group_by(self.lines(*ASIDE_PHASES), lambda line: line.where)
        return {where: sum(line.own_ms for line in there) for where, there in lines.items()}

    def _sampled_ms(self, *phases: Phase) -> float:
        return sum(line.own_ms for line in self.profile.lines if line.phase in phases)

    def _waited_ms(self, phase: Phase) -> float:
        """Returns the unattributed milliseconds in which the thread didn't run in lines of a deduced phase."""
        sampled = self._sampled_ms(*DEDUCED_PHASES)
        if phase not in DEDUCED_PHASES or not sampled or self._sampled_ms("unattributed"):
            return 0.0
        return self.phase("unattributed") * self._sampled_ms(phase) / sampled

    @cached_property
    def evaluation_loaders(self) -> list[LoaderUse]:
        """Loaders of an evaluation in most steps, if another loader feeds the training."""
        if not any(habit.what == "evaluation" and habit.per_step >= OFTEN for habit in self.profile.habits):
            return []
        found = [use for use in self.profile.loaders if use.evaluating_ms]
        return found if len(found) < len(self.profile.loaders) else []

    @cached_property
    def evaluating_ms(self) -> float:
        """Milliseconds per step in which such an evaluation waits for its loaders."""
        return sum(self.loading_ms(use, use.evaluating_ms) for use in self.evaluation_loaders)

    def loading_ms(self, loader: LoaderUse, ms: float) -> float:
        """Returns the part of the wait for data that belongs to `ms` of a loader's measured time."""
        waited = self.phase("data")
        seen = sum(use.share * (use.drawing_ms or 0.0) for use in self.profile.loaders)
        ms *= loader.share
        return waited * ms / seen if seen >= ms and seen else min(waited, ms)

    def operators_ms_at(self, where: str, phase: Phase) -> float:
        return sum(self.cost_ms(one) for one in self.operators_by_line.get(where, []) if one.phase == phase)

    @cached_property
    def operators_by_line(self) -> dict[str, list[OperatorTime]]:
        return group_by(self._operators, lambda one: one.where)

    @cached_property
    def kinds(self) -> dict[str, str]:
        return {one.name: one.kind for one in self.profile.modules}

    @cached_property
    def ambiguous_lines(self) -> frozenset[str]:
        """Lines at which modules of several classes run, such as a call of a library."""
        at = group_by(self._operators, lambda one: one.where)
        kinds = {where: {self.kinds.get(one.module) for one in ones} - {None} for where, ones in at.items()}
        return frozenset(where for where, found in kinds.items() if len(found) > 1)

    def kind_at(self, one: OperatorTime) -> str:
        """Returns the class of an operator's module if its line is ambiguous; else empty."""
        return self.kinds.get(one.module, "") if one.where in self.ambiguous_lines else ""

    @cached_property
    def trainer_lines(self) -> frozenset[str]:
        """Lines such as `trainer.fit(...)`, which call both backward and the optimizer's step."""
        goes_back = {line.where for line in self.profile.lines if line.phase == "backward"}
        return frozenset(use.where for use in self.profile.optimizers if use.kind != BY_HAND and use.where in goes_back)

    @cached_property
    def _operators_ms(self) -> dict[Phase, float]:
        """Traced milliseconds of operators in each phase; the tracer lengthens them."""
        return {phase: sum(one.ms for one in ones) for phase, ones in self._by_phase.items()}

    @cached_property
    def _by_phase(self) -> dict[Phase, list[OperatorTime]]:
        return group_by(self._operators, lambda one: one.phase)

    @cached_property
    def _scales(self) -> dict[Phase, float]:
        """Factors that fit the operators' times into their phases."""
        taken = {phase: self.phase(phase) for phase in self._operators_ms}
        return {phase: min(1.0, taken[phase] / ms) for phase, ms in self._operators_ms.items() if ms and taken[phase]}

    @cached_property
    def _between_ms(self) -> dict[Phase, float]:
        found: dict[Phase, float] = {}
        for phase in COMPUTING_PHASES:
            calls = sum(one.calls for one in self._by_phase.get(phase, []))
            idle = self.phase(phase) - self._operators_ms.get(phase, 0.0)
            if calls and idle > 0:
                found[phase] = idle / calls
        return found


def named_function(function: str) -> str:
    """Returns a function's name without comprehensions, which are functions of their own up to Python 3.11."""
    return "<module>" if function in _COMPREHENSIONS else function.partition(".<locals>.<")[0]


def is_random(one: OperatorTime) -> bool:
    """Returns whether an operator draws random numbers."""
    return one.name.removeprefix("aten::").startswith(_RANDOM_OPS)


def group_by(values: Iterable[Value], key: Callable[[Value], Key]) -> dict[Key, list[Value]]:
    """Groups values by key, in the order of first occurrence."""
    found: dict[Key, list[Value]] = {}
    for value in values:
        found.setdefault(key(value), []).append(value)
    return found


def operator_least_ms(one: OperatorTime, profile: Profile) -> float:
    """Returns the least milliseconds of an operator's work on this machine; 0 if unknown or measured under load."""
    if (one.flops is None and one.bytes is None) or profile.limits.busy:
        return 0.0
    return least_ms(OpCost(one.flops or 0.0, one.bytes), profile.limits, precision_in(one, profile.reduced)) or 0.0


def count_elements(shape: str) -> int:
    """Returns the number of elements of a shape such as `8x3x28x28`; 0 for lists of tensors."""
    sizes = shape.split("x")
    return prod(map(int, sizes)) if all(size.isdigit() for size in sizes) else 0


def is_product(one: OperatorTime) -> bool:
    """Returns whether an operator is dominated by arithmetic, by its name."""
    return any(part in one.name for part in ("mm", "conv", "linear", "attention", "lstm", "gru"))


def heaviest(operators: Iterable[OperatorTime], step: ProfiledStep) -> str:
    """Returns the line with most of the operators' time, else the module; empty if unknown."""
    for place in (lambda one: one.where, lambda one: one.module):
        costs: dict[str, float] = {}
        for one in operators:
            costs[place(one)] = costs.get(place(one), 0.0) + step.cost_ms(one)
        costs.pop("", None)
        if costs:
            return max(costs, key=lambda where: costs[where])
    return ""


def module_text(operators: Sequence[OperatorTime], step: ProfiledStep) -> str:
    """Returns text such as ` in h.0.act (NewGELU) and 11 more`; empty if the lines aren't ambiguous."""
    costs: dict[str, float] = {}
    for one in operators:
        if step.kind_at(one):
            costs[one.module] = costs.get(one.module, 0.0) + step.cost_ms(one)
    if not costs:
        return ""
    name = max(costs, key=lambda module: costs[module])
    more = f" and {len(costs) - 1} more" if len(costs) > 1 else ""
    return f" in {name or 'the model'} ({step.kinds[name]}){more}"


def percent(share: float) -> str:
    """Formats a share as `12 %`, small shares with a decimal."""
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"


Detector = Callable[[ProfiledStep], Iterator[Remedy]]
"""Yields remedies of one family of causes, with upper bounds of their gains as shares of the step."""
