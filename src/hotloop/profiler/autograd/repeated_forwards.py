"""Compares the forward passes of a step: repeated ones, evaluations, and ones without a backward pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hotloop.profiler.hooks.forward_calls import CallInputs


@dataclass
class Mark:
    """A record of a forward or backward pass, stored in the metadata of graph nodes.

    Attributes:
        is_walked: whether a further backward pass has run through the node.
        updates: number of optimizer updates before the pass.
    """

    where: str
    step: int
    seconds: float = 0.0
    is_walked: bool = False
    updates: int = 0


@dataclass
class Forward:
    """An outermost forward pass.

    Attributes:
        lines: the user's lines that called the module, innermost first.
        inputs: fingerprints of the inputs, see `tensor_fingerprints`.
        training: whether the module was in training mode.
        given: the tensors among the inputs, and whether a loader gave a batch since the forward pass before.
        outputs: whether inputs need gradients, and fingerprints of the outputs; None if a repetition costs little.
    """

    module: int
    mark: Mark
    lines: tuple[str, ...]
    inputs: frozenset[tuple]
    has_graph: bool
    training: bool
    given: CallInputs
    outputs: tuple[bool, frozenset[tuple]] | None = None


def is_eval(forward: Forward, trained: Sequence[Forward]) -> bool:
    """Returns whether a forward pass without backward pass only evaluates the network that is trained here.

    A pass in training mode on other samples may belong to training: it may compute targets, actions or labels. So may a
    pass in evaluation mode on fewer samples than the network is trained on, if no loader gave them.
    """
    if not forward.training:
        others = [other for other in trained if other.module == forward.module and other.training]
        return any(
            forward.given.is_after_batch or (forward.given.rows or 1) >= (other.given.rows or 1) for other in others
        )
    return is_repeat(forward, trained)


def is_repeat(forward: Forward, trained: Sequence[Forward]) -> bool:
    """Returns whether the same network was trained on the same inputs."""
    return bool(forward.inputs) and any(
        other.module == forward.module and other.inputs == forward.inputs for other in trained
    )


def repeats(trained: Sequence[Forward]) -> Iterator[tuple[Forward, Forward]]:
    """Yields passes of a network with the inputs and outputs of an earlier pass, each with that pass."""
    firsts: dict[tuple, Forward] = {}
    for forward in trained:
        first = firsts.setdefault((forward.module, forward.inputs, forward.outputs), forward)
        if first is not forward and forward.inputs and forward.outputs is not None:
            yield forward, first


def inputs_of(trained: Sequence[Forward]) -> set[tuple]:
    return {(forward.module, forward.inputs) for forward in trained if forward.inputs}


def own_line(forward: Forward, known: Sequence[Forward]) -> str:
    """Returns the line that distinguishes a pass from those that training needs; several may share a function."""
    others = [other.lines for other in known if other.module == forward.module and other.lines[0] == forward.lines[0]]
    pairs = zip(forward.lines, others[0], strict=False) if others else ()
    return next((line for line, other in pairs if line != other), forward.lines[0])
