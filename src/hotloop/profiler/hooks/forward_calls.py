"""What the loop itself calls in a step: which networks, how often and between which backwards, and which modules beside them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.base.phases import Timeline
from hotloop.profiler.base.step_facts import StepFact
from hotloop.profiler.base.tensor_facts import has_gradient
from hotloop.profiler.compile_race import NetworkCallRecorder

_MAX_CALLS = 4
"""Of one network in a step, on average, if what it is given counts as samples."""

_MAX_KNOWN = 1000


class CallInputs(NamedTuple):
    """What a part of the training was called with.

    Attributes:
        shapes: of the tensors among its arguments.
        rows: samples; None where none of the inputs has a dimension for several.
        graded: whether gradients may come back to it: an evaluation of what is trained in training mode needs none.
        drawn: whether a loader gave something since the call before.
    """

    shapes: list[str]
    rows: int | None
    has_gradient: bool = False
    is_after_batch: bool = False


def describe_inputs(inputs: list[Tensor], *, graded: bool = False, drawn: bool = False) -> CallInputs:
    """Of some tensors, none of which is stored."""
    rows = next((len(value) for value in inputs if value.ndim > value.is_floating_point()), None)
    return CallInputs(["x".join(map(str, value.shape)) for value in inputs], rows, graded, drawn)


class ForwardCalls:
    """Puts what is called into the phases of a timeline; networks are known by their id.

    A module without parameters that no gradient goes back through is beside the networks: it augments a batch, or says how
    good a result is.

    Attributes:
        drawn: whether a loader gave something since the last call.
        recorder: of calls that may be repeated afterwards.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._graded: dict[int, bool] = {}
        self._learning: set[int] = set()
        self.recorder = NetworkCallRecorder()
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._called: list[int] = []
        self._since: set[int] = set()
        self._trained: set[int] = set()
        self._accumulates = self.has_new_batch = False
        self._least: dict[int, int] = {}
        self._most_graded: dict[int, int] = {}

    def end(self, step: StepFact | None) -> None:
        """The step ends: its record gets the number of calls."""
        if step is not None:
            step.calls = self.number

    def began(self, args: tuple, kwargs: dict, making: Phase, *, again: bool) -> None:
        """A module begins, the first argument.

        Args:
            making: the phase in which batches are made.
            again: whether a backward computes it again, as behind a checkpoint.
        """
        timeline = self._timeline
        if not again and self._is_auxiliary(args, kwargs):
            timeline.enter(making if timeline.current == making else "logging")
            return
        if not again and self.note_call(id(args[0])):
            timeline.replace_last("loss", "python")  # the same network is called again before any backward
        timeline.enter("loss" if _is_loss(args[0]) else "forward")

    def ended(self, args: tuple, kwargs: dict, result: Any) -> CallInputs | None:
        """It is over and has left its phase; what it was given, if it is a part of the training."""
        module, graded = args[0], has_gradient(result)
        part = _can_learn(module) or bool(graded)
        if torch.is_grad_enabled() and len(self._graded) < _MAX_KNOWN:
            self._graded[id(module)] = part
        if not part:
            return None
        if torch.is_grad_enabled():
            self._timeline.turn("loss")
        seen = torch.is_grad_enabled() and graded is not False  # what has no tensors to be seen may hold some
        if seen and module.training and len(self._learning) < _MAX_KNOWN:
            self._learning.add(id(module))
        evaluated = not module.training and id(module) in self._learning
        found = describe_inputs(_tensors(args[1:], kwargs), graded=seen and not evaluated, drawn=self.has_new_batch)
        self.has_new_batch = False
        if found.shapes and not _is_loss(module):
            self._count(id(module), found)
            self.recorder.note(args, kwargs, result)
        return found

    def _count(self, network: int, given: CallInputs) -> None:
        rows = given.rows or 1
        self._least[network] = min(rows, self._least.get(network, rows))
        if given.has_gradient:
            self._most_graded[network] = max(rows, self._most_graded.get(network, rows))

    def note_call(self, network: int) -> bool:
        """A network is called; whether it was the last one that was called before."""
        again = bool(self._called) and self._called[-1] == network
        self._called.append(network)
        self._since.add(network)
        return again

    def backward(self) -> None:
        """A backward begins, of what was called since the one before."""
        self._accumulates |= not self._trained.isdisjoint(self._since)
        self._trained |= self._since
        self._since = set()

    @property
    def number(self) -> int:
        """Calls of networks in this step."""
        return len(self._called)

    @property
    def has_sample_count(self) -> bool:
        """Whether a network is given all samples of the step at a time; else nobody knows what one sample is."""
        if any(self._least[network] < most for network, most in self._most_graded.items()):
            return False  # it is asked about fewer than it is trained on, as by one who acts
        return not self._accumulates and len(self._called) <= _MAX_CALLS * max(1, len(set(self._called)))

    def _is_auxiliary(self, args: tuple, kwargs: dict) -> bool:
        """As it was the last time; the first time by whether it is given anything that has a gradient."""
        if _can_learn(args[0]):
            return False
        given = any(value.requires_grad for value in _tensors(args[1:], kwargs))
        return not self._graded.get(id(args[0]), given)


def _tensors(args: tuple, kwargs: dict) -> list[Tensor]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]


def _can_learn(module: nn.Module) -> bool:
    return _is_loss(module) or next(module.parameters(), None) is not None


def _is_loss(module: nn.Module) -> bool:
    """Whether a module called by the loop itself says how wrong a result is."""
    if isinstance(module, nn.modules.loss._Loss):
        return True
    name = type(module).__name__.lower()
    return ("loss" in name or "criterion" in name) and next(module.parameters(), None) is None
