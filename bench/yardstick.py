"""What a fault does, measured without parity: the faulty step against the same step without the fault, state by state.

Both run the same operations but for the fault, so that they differ by its effect alone. It is given in multiples of
what rounding does: the same step from weights whose last bits were moved.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hotloop.core.state import State, tree_leaves
from hotloop.lowering.program import Program

Key = tuple[str, str]

STEPS = 34
"""Of the honest path, across several ends of epochs."""


@dataclass(frozen=True)
class Effect:
    """What a fault does.

    Attributes:
        multiple: its largest effect on a tensor of one step, in multiples of rounding; 0 if no bit ever changes.
        relative: the largest relative change of the update of all parameters, in one step.
        changed: tensors that it changes beyond rounding, `(kind, name)`, each with the largest multiple.
        apart: distance after a free run, as a share of the honest way; `spread` is that of moved last bits.
    """

    multiple: float
    relative: float
    changed: dict[Key, float]
    apart: float
    spread: float

    @property
    def equivalent(self) -> bool:
        """Whether it does nothing beyond rounding, neither in a step nor in a free run."""
        return self.multiple <= 1 and self.apart <= 2 * self.spread


@dataclass
class Yardstick:
    """The honest path of one Program, kept for all faults of its kind."""

    honest: Program
    steps: int = STEPS
    befores: list[State] = field(default_factory=list)
    afters: list[State] = field(default_factory=list)
    rounding: dict[Key, float] = field(default_factory=dict)
    spread: float = 0.0

    def __post_init__(self) -> None:
        program = self.honest
        program.seed_all()
        before = program.state()
        for number in range(self.steps):
            before = replace(before, sums={})
            after = self._step(program, before)
            self.befores.append(before)
            self.afters.append(after)
            for again in range(2):
                moved = _moved(before, 2 * number + again)
                _merge(self.rounding, _off(self._step(program, moved), moved, after, before))
            before = after
        self.end = self._freely(program, self.befores[0])
        self.spread = max(self._apart(self._freely(program, _moved(self.befores[0], n))) for n in range(1000, 1003))

    def of(self, faulty: Program) -> Effect:
        """Measures a fault."""
        faulty.seed_all()
        found: dict[Key, float] = {}
        relative = 0.0
        for before, after in zip(self.befores, self.afters, strict=True):
            ended = self._step(faulty, before)
            _merge(found, _off(ended, before, after, before))
            relative = max(relative, _relative(ended, after, before))
        multiples = {key: _times(off, self.rounding.get(key, 0.0)) for key, off in found.items() if off}
        return Effect(
            multiple=max(multiples.values(), default=0.0),
            relative=relative,
            changed={key: times for key, times in multiples.items() if times > 1},
            apart=self._apart(self._freely(faulty, self.befores[0])),
            spread=self.spread,
        )

    def _step(self, program: Program, before: State) -> State:
        program.restore(before)
        ended = program.advance(1).ended
        sums = program.state().sums
        if ended:
            program.end_epoch(1.0)
        return replace(program.state(), sums=sums)

    def _freely(self, program: Program, start: State) -> State:
        program.restore(start)
        left = self.steps
        while left:
            outcome = program.advance(left)
            left -= outcome.steps
            if outcome.ended:
                program.end_epoch(1.0)
        return program.state()

    def _apart(self, ended: State) -> float:
        return _relative(ended, self.end, self.befores[0])


def _times(off: float, rounding: float) -> float:
    """Where rounding itself knows no bounds, nothing can be told."""
    return 0.0 if rounding == float("inf") else off / max(rounding, 2.0**-24)


def _merge(into: dict[Key, float], found: dict[Key, float]) -> None:
    for key, value in found.items():
        into[key] = max(into.get(key, 0.0), value)


def _relative(ended: State, after: State, before: State) -> float:
    off = way = 0.0
    for name, value in after.parameters.items():
        off += float((ended.parameters[name].double() - value.double()).square().sum())
        way += float((value.double() - before.parameters[name].double()).square().sum())
    return float("inf") if off != off else (off / way) ** 0.5 if way else 0.0


def _off(ended: State, before: State, after: State, start: State) -> dict[Key, float]:
    """Each tensor's distance from the honest one, of parameters that of how they moved."""
    found = {
        ("update", name): _share(
            value.double() - before.parameters[name].double(),
            after.parameters[name].double() - start.parameters[name].double(),
        )
        for name, value in ended.parameters.items()
    }
    for kind, one, other in (
        ("buffer", {**ended.buffers, **ended.loss}, {**after.buffers, **after.loss}),
        ("average", ended.average, after.average),
        ("loss", ended.sums, after.sums),
        ("optimizer", _flat(ended.optimizer["state"]), _flat(after.optimizer["state"])),
        ("count", _plain(ended), _plain(after)),
    ):
        for name in {*one, *other}:
            both = name in one and name in other
            found[kind, name] = _share(_wide(one[name]), _wide(other[name])) if both else float("inf")
    return found


def _flat(tree: Any) -> dict[str, Any]:
    return {path.strip("/"): value for path, value in tree_leaves(tree) if isinstance(value, Tensor | int | float)}


def _plain(state: State) -> dict[str, Any]:
    return _flat({"schedule": state.schedule, "groups": state.optimizer["groups"], "position": vars(state.position)})


def _wide(value: Any) -> Tensor:
    return torch.as_tensor(value).double()


def _share(value: Tensor, honest: Tensor) -> float:
    if value.shape != honest.shape:
        return float("inf")
    off, size = float((value - honest).norm()), float(honest.norm())
    if off != off:
        return float("inf")
    return off / size if size else (float("inf") if off else 0.0)


def _moved(state: State, number: int) -> State:
    """The State with about half of its weights moved by one last bit."""
    generator = torch.Generator().manual_seed(number)

    def moved(value: Tensor) -> Tensor:
        if not value.is_floating_point():
            return value
        towards = torch.where(torch.rand(value.shape, generator=generator) < 0.5, torch.inf, -torch.inf)
        there = torch.rand(value.shape, generator=generator) < 0.5
        return torch.where(there, torch.nextafter(value, towards.to(value.dtype)), value)

    return replace(state, parameters={name: moved(value) for name, value in state.parameters.items()})
