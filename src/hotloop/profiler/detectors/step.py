"""What the diagnosis asks of a Profile: shares of the step, what a call costs beside its work, what stands at a line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TypeVar

from hotloop.core.records.profile import LineTime, LoaderUse, OperatorTime, Profile, Remedy
from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.costs.op_cost import OpCost
from hotloop.profiler.costs.roofline import least_ms, precision_in

Key = TypeVar("Key")

Value = TypeVar("Value")

COMPUTING_PHASES: tuple[Phase, ...] = ("forward", "loss", "backward", "update")
"""Phases that are made of operators."""

ASIDE_PHASES: tuple[Phase, ...] = ("python", "logging", "batch", "synchronisation", "copy", "unattributed")
"""Phases whose lines are the user's own work between the parts of training."""

OFTEN = 0.5
"""Times in a step from which on something is a habit of the step."""

DEDUCED_PHASES: tuple[Phase, ...] = ("python", "batch", "loss")
"""Phases that a step is in where nothing else is seen; while the thread doesn't run in them, time is unattributed."""

PLAIN = ("", "(loss)")
"""Modules of operators that are in none."""

PYTHON_FACTOR = 2.0
"""A line that takes so many times as long as its operators is about Python rather than about these."""

BY_HAND = "by hand"
"""What an update is called that no optimizer makes."""

_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")

_RANDOM_OPS = ("rand", "normal", "bernoulli", "uniform", "multinomial", "exponential", "poisson")
"""How the names of operators begin that draw numbers."""

_WRAPPER_OPS = ("Optimizer.step#", "Optimizer.zero_grad#")

_SMALL_LAUNCHES = {"cpu": 10.0, "accelerator": 2.0}
"""So many times what a launch takes: operators below it take their time for being called, not for what they do."""

_LAUNCH_US = 4.0
"""Where the machine wasn't measured: 3 to 8 us on processors of today."""


@dataclass(frozen=True)
class ProfiledStep:
    """A profile as the detectors read it; made only where steps were told apart.

    Attributes:
        ms: of a clean step.
        named: places that something is said of already.
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
        """Operators that take less are small."""
        return self.launch_ms * _SMALL_LAUNCHES["cpu" if self.on_cpu else "accelerator"]

    @property
    def core_share(self) -> float:
        """Part of the time in which the thread that calculates had a core, where other programs took the rest."""
        threads = self.profile.threads
        if threads is None or threads.busy + threads.others < threads.cores - 0.5:
            return 1.0
        return min(1.0, threads.busy / max(1, min(threads.torch, threads.cores)))

    def share(self, ms: float) -> float:
        """Of the step, 0 to 1."""
        return min(1.0, max(0.0, ms / self.ms))

    def phase(self, *names: Phase) -> float:
        """Milliseconds of these phases together."""
        return sum(self.profile.phases.get(name, 0.0) for name in names)

    @cached_property
    def _operators(self) -> list[OperatorTime]:
        """Without what only stands around others, such as an optimizer's whole step, whose time is known otherwise."""
        return [one for one in self.profile.operators if not one.name.startswith(_WRAPPER_OPS)]

    @property
    def evaluations(self) -> float:
        """How often an update has the loss computed, as a line search calls its closure; at least 1."""
        return max([1.0, *(use.evaluations for use in self.profile.optimizers)])

    def operators(self, wanted: Callable[[OperatorTime], bool]) -> list[OperatorTime]:
        return [one for one in self._operators if wanted(one)]

    def cost_ms(self, one: OperatorTime) -> float:
        """Milliseconds of the step that go if an operator goes: its own, and its part of what lies between operators."""
        return one.ms * self._scales.get(one.phase, 1.0) + one.calls * self.between_ms(one.phase)

    def calling_ms(self, one: OperatorTime) -> float:
        """Milliseconds of its cost that go to calling it: Python, and starting it, whatever it then does."""
        return min(self.cost_ms(one), one.calls * (self.between_ms(one.phase) + self.launch_ms))

    def between_ms(self, phase: Phase) -> float:
        """What a call costs beside the operator's own time: Python, and starting it."""
        return self._between_ms.get(phase, 0.0)

    def reclaimable_ms(self, one: OperatorTime) -> float:
        """Milliseconds that would go if all calls of an operator were one: what calling costs, and what small ones waste.

        Below what this machine's limits allow for the work itself nothing is counted, and of large operators little more
        than their start. What lies between calls is no more than a small operator, or something else was in between.
        """
        calls = max(one.calls, 1e-9)
        each = one.ms * self._scales.get(one.phase, 1.0) / calls
        wasted = max(0.0, each - operator_least_ms(one, self.profile) / calls)
        large = max(1.0, each * self.core_share / self.small_ms)
        inside = max(min(self.launch_ms, each), min(wasted, each / large**2))
        return self.python_around_ms(one) + one.calls * inside

    def python_around_ms(self, one: OperatorTime) -> float:
        """Milliseconds of Python between an operator's calls, as far as that is no more than a small operator takes."""
        return one.calls * min(self.between_ms(one.phase), self.small_ms) * self.core_share

    def lines(self, *phases: Phase) -> list[LineTime]:
        """Lines in these phases, as parts of what these take: the samples say of each phase how it is divided."""
        found = []
        for phase in phases:
            lines = [line for line in self.profile.lines if line.phase == phase]
            sampled = self._sampled_ms(phase)
            scale = (self.phase(phase) + self._waited_ms(phase)) / sampled if sampled else 0.0
            lines = [line.model_copy(update={"ms": scale * line.ms, "own_ms": scale * line.own_ms}) for line in lines]
            found += self._beside_work(lines, phase) if phase in ASIDE_PHASES else lines
        return found

    def _beside_work(self, lines: list[LineTime], phase: Phase) -> list[LineTime]:
        """What operators take is known better than from samples, which divide the rest alone: of short steps they are few."""
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
        """Milliseconds that lines take by themselves between the parts of training."""
        lines = group_by(self.lines(*ASIDE_PHASES), lambda line: line.where)
        return {where: sum(line.own_ms for line in there) for where, there in lines.items()}

    def _sampled_ms(self, *phases: Phase) -> float:
        return sum(line.own_ms for line in self.profile.lines if line.phase in phases)

    def _waited_ms(self, phase: Phase) -> float:
        """Milliseconds in which the thread didn't run in lines of a phase that is deduced: unattributed in the phases."""
        sampled = self._sampled_ms(*DEDUCED_PHASES)
        if phase not in DEDUCED_PHASES or not sampled or self._sampled_ms("unattributed"):
            return 0.0
        return self.phase("unattributed") * self._sampled_ms(phase) / sampled

    @cached_property
    def evaluation_loaders(self) -> list[LoaderUse]:
        """Loaders that feed an evaluation which is a habit of the step, beside one that feeds the training."""
        if not any(habit.what == "evaluation" and habit.per_step >= OFTEN for habit in self.profile.habits):
            return []
        found = [use for use in self.profile.loaders if use.evaluating_ms]
        return found if len(found) < len(self.profile.loaders) else []

    @cached_property
    def evaluating_ms(self) -> float:
        """Milliseconds of a step in which an evaluation that is a habit waits for its own loaders."""
        return sum(self.loading_ms(use, use.evaluating_ms) for use in self.evaluation_loaders)

    def loading_ms(self, loader: LoaderUse, ms: float) -> float:
        """Milliseconds of the step's wait for data that go with so many of a loader's own, as it was seen to take."""
        waited = self.phase("data")
        seen = sum(use.share * (use.drawing_ms or 0.0) for use in self.profile.loaders)
        ms *= loader.share
        return waited * ms / seen if seen >= ms and seen else min(waited, ms)

    def operators_ms_at(self, where: str, phase: Phase) -> float:
        """Milliseconds of the operators that a line calls in a phase."""
        return sum(self.cost_ms(one) for one in self.operators_by_line.get(where, []) if one.phase == phase)

    @cached_property
    def operators_by_line(self) -> dict[str, list[OperatorTime]]:
        """Operators by the user's line that they belong to."""
        return group_by(self._operators, lambda one: one.where)

    @cached_property
    def kinds(self) -> dict[str, str]:
        """Classes of modules by name."""
        return {one.name: one.kind for one in self.profile.modules}

    @cached_property
    def ambiguous_lines(self) -> frozenset[str]:
        """Lines behind which modules of several classes compute, as where a line calls a library: it says little about the place."""
        at = group_by(self._operators, lambda one: one.where)
        kinds = {where: {self.kinds.get(one.module) for one in ones} - {None} for where, ones in at.items()}
        return frozenset(where for where, found in kinds.items() if len(found) > 1)

    def kind_at(self, one: OperatorTime) -> str:
        """The class of the module that an operator runs in, where its line says little about the place; else empty."""
        return self.kinds.get(one.module, "") if one.where in self.ambiguous_lines else ""

    @cached_property
    def trainer_lines(self) -> frozenset[str]:
        """Lines that hand the training to a library, as `trainer.fit(...)` does: many things share each of them.

        A backward and an optimizer's step are both called from there.
        """
        goes_back = {line.where for line in self.profile.lines if line.phase == "backward"}
        return frozenset(use.where for use in self.profile.optimizers if use.kind != BY_HAND and use.where in goes_back)

    @cached_property
    def _operators_ms(self) -> dict[Phase, float]:
        """Milliseconds of operators in each phase, as the tracer says, which makes them longer."""
        return {phase: sum(one.ms for one in ones) for phase, ones in self._by_phase.items()}

    @cached_property
    def _by_phase(self) -> dict[Phase, list[OperatorTime]]:
        return group_by(self._operators, lambda one: one.phase)

    @cached_property
    def _scales(self) -> dict[Phase, float]:
        """What operators' times must be multiplied with to fit into their phases."""
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
    """A function's name; what comprehensions in it do, it does itself. Up to Python 3.11 they are functions of their own."""
    return "<module>" if function in _COMPREHENSIONS else function.partition(".<locals>.<")[0]


def is_random(one: OperatorTime) -> bool:
    """Whether an operator draws random numbers: whatever holds these is wanted anew at each step."""
    return one.name.removeprefix("aten::").startswith(_RANDOM_OPS)


def group_by(values: Iterable[Value], key: Callable[[Value], Key]) -> dict[Key, list[Value]]:
    """The values by key, in the order of their first."""
    found: dict[Key, list[Value]] = {}
    for value in values:
        found.setdefault(key(value), []).append(value)
    return found


def operator_least_ms(one: OperatorTime, profile: Profile) -> float:
    """Shortest time, in milliseconds, in which this machine can do an operator's work; 0 if unknown or measured under load."""
    if (one.flops is None and one.bytes is None) or profile.limits.busy:
        return 0.0
    return least_ms(OpCost(one.flops or 0.0, one.bytes), profile.limits, precision_in(one, profile.reduced)) or 0.0


def count_elements(shape: str) -> int:
    """Numbers in a tensor of a shape such as `8x3x28x28`; 0 for lists of tensors, of which nobody says how many there are."""
    sizes = shape.split("x")
    return prod(map(int, sizes)) if all(size.isdigit() for size in sizes) else 0


def is_product(one: OperatorTime) -> bool:
    """Whether an operator calculates rather than moves numbers, by its name."""
    return any(part in one.name for part in ("mm", "conv", "linear", "attention", "lstm", "gru"))


def heaviest(operators: Iterable[OperatorTime], step: ProfiledStep) -> str:
    """The line that most of their time belongs to, else the module; empty if neither is known."""
    for place in (lambda one: one.where, lambda one: one.module):
        costs: dict[str, float] = {}
        for one in operators:
            costs[place(one)] = costs.get(place(one), 0.0) + step.cost_ms(one)
        costs.pop("", None)
        if costs:
            return max(costs, key=lambda where: costs[where])
    return ""


def module_text(operators: Sequence[OperatorTime], step: ProfiledStep) -> str:
    """` in h.0.act (NewGELU) and 11 more`: the module that most of their time belongs to; empty where their line says it."""
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
    """`12 %`, with a digit more where it's small."""
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.1f} %"


Detector = Callable[[ProfiledStep], Iterator[Remedy]]
"""Looks for one family of causes; its remedies' gains are shares of the step that it can win, at most."""
