"""Forwards of a step, and what they are to each other: the same once more, an evaluation, or another one's place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hotloop.profiler.hooks.forward_calls import CallInputs


@dataclass
class Mark:
    """Of a forward or backward, in the graph.

    Attributes:
        step: in which it happened.
        walked: whether another backward came by.
        updates: of optimizers that were done before.
    """

    where: str
    step: int
    seconds: float = 0.0
    is_walked: bool = False
    updates: int = 0


@dataclass
class Forward:
    """An outermost forward.

    Attributes:
        lines: of the user's that called it, from inside out.
        inputs: which tensors it got, see `tensor_fingerprints`.
        graded: whether it built a graph.
        training: whether the module was in training mode.
        given: the tensors among its inputs, and whether a loader gave something since the forward before.
        outputs: which tensors it gave, as a network whose forward is worth while.
    """

    module: int
    mark: Mark
    lines: tuple[str, ...]
    inputs: frozenset[tuple]
    has_graph: bool
    training: bool
    given: CallInputs
    outputs: tuple[bool, frozenset[tuple]] | None = None


def is_eval(one: Forward, trained: Sequence[Forward]) -> bool:
    """Whether a forward that no backward went through only looks at how good the network is that is trained here.

    What a network in training mode is asked about other samples may well be a part of the training: targets, actions,
    labels for what has none. So may what it is asked about fewer samples than it is trained on, if no loader gave them.
    """
    if not one.training:
        same = [other for other in trained if other.module == one.module and other.training]
        return any(one.given.is_after_batch or (one.given.rows or 1) >= (other.given.rows or 1) for other in same)
    return is_repeat(one, trained)


def is_repeat(one: Forward, trained: Sequence[Forward]) -> bool:
    """Whether the same network was trained on the same inputs."""
    return bool(one.inputs) and any(other.module == one.module and other.inputs == one.inputs for other in trained)


def repeats(trained: Sequence[Forward]) -> Iterator[tuple[Forward, Forward]]:
    """Forwards of a network on the same inputs that gave the same, each with the first; dropout gives something else."""
    seen: dict[tuple, Forward] = {}
    for one in trained:
        first = seen.setdefault((one.module, one.inputs, one.outputs), one)
        if first is not one and one.inputs and one.outputs is not None:
            yield one, first


def inputs_of(trained: Sequence[Forward]) -> set[tuple]:
    return {(one.module, one.inputs) for one in trained if one.inputs}


def own_line(one: Forward, known: Sequence[Forward]) -> str:
    """The line that tells a forward from those that the training needs; many may go through one function."""
    others = [other.lines for other in known if other.module == one.module and other.lines[0] == one.lines[0]]
    differing = (
        (here for here, there in zip(one.lines, others[0], strict=False) if here != there) if others else iter(())
    )
    return next(differing, one.lines[0])
