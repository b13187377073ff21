"""Records the modules that the training loop calls in a step, and puts the calls into phases."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.base.phases import Timeline
from hotloop.profiler.base.steps import StepFact
from hotloop.profiler.base.tensor_facts import has_gradient
from hotloop.profiler.compile_race import NetworkCallRecorder

_MAX_CALLS = 4
"""Mean calls per network in a step up to which the rows of an input count as samples."""

_MAX_KNOWN = 1000


class CallInputs(NamedTuple):
    """The inputs of a call of a training module.

    Attributes:
        shapes: of the tensor arguments.
        rows: number of samples; None if no input has a batch dimension.
        has_gradient: whether gradients may reach the call; false for evaluations of a trained network.
        is_after_batch: whether a loader gave a batch since the previous call.
    """

    shapes: list[str]
    rows: int | None
    has_gradient: bool = False
    is_after_batch: bool = False


def describe_inputs(inputs: list[Tensor], *, graded: bool = False, drawn: bool = False) -> CallInputs:
    rows = next((len(value) for value in inputs if value.ndim > value.is_floating_point()), None)
    return CallInputs(["x".join(map(str, value.shape)) for value in inputs], rows, graded, drawn)


class ForwardCalls:
    """Puts module calls into the phases of a timeline; networks are identified by their id.

    A module without parameters through which no gradient passes is auxiliary: such modules augment batches or compute
    metrics.

    Attributes:
        has_new_batch: whether a loader gave a batch since the last call.
        recorder: of calls that may be repeated afterwards.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._graded: dict[int, bool] = {}
        self._learning: set[int] = set()
        self.recorder = NetworkCallRecorder()
        self.begin()

    def begin(self) -> None:
        self._called: list[int] = []
        self._since: set[int] = set()
        self._trained: set[int] = set()
        self._accumulates = self.has_new_batch = False
        self._least: dict[int, int] = {}
        self._most_graded: dict[int, int] = {}

    def end(self, step: StepFact | None) -> None:
        if step is not None:
            step.calls = self.number

    def began(self, args: tuple, kwargs: dict, making: Phase, *, again: bool) -> None:
        """A module call begins; the module is the first argument.

        Args:
            making: the phase in which batches are made.
            again: whether a backward recomputes the call, as activation checkpointing does.
        """
        timeline = self._timeline
        if not again and self._is_auxiliary(args, kwargs):
            timeline.enter(making if timeline.current == making else "logging")
            return
        if not again and self.note_call(id(args[0])):
            timeline.replace_last("loss", "python")  # the same network is called again before any backward
        timeline.enter("loss" if _is_loss(args[0]) else "forward")

    def ended(self, args: tuple, kwargs: dict, result: Any) -> CallInputs | None:
        """A module call has ended and left its phase; returns its inputs if the module is part of the training."""
        module, graded = args[0], has_gradient(result)
        part = _can_learn(module) or bool(graded)
        if torch.is_grad_enabled() and len(self._graded) < _MAX_KNOWN:
            self._graded[id(module)] = part
        if not part:
            return None
        if torch.is_grad_enabled():
            self._timeline.turn("loss")
        may_train = torch.is_grad_enabled() and graded is not False  # an opaque result may hold tensors
        if may_train and module.training and len(self._learning) < _MAX_KNOWN:
            self._learning.add(id(module))
        evaluated = not module.training and id(module) in self._learning
        has_gradient_now = may_train and not evaluated
        inputs = describe_inputs(_tensors(args[1:], kwargs), graded=has_gradient_now, drawn=self.has_new_batch)
        self.has_new_batch = False
        if inputs.shapes and not _is_loss(module):
            self._count(id(module), inputs)
            self.recorder.note(args, kwargs, result)
        return inputs

    def _count(self, network: int, inputs: CallInputs) -> None:
        rows = inputs.rows or 1
        self._least[network] = min(rows, self._least.get(network, rows))
        if inputs.has_gradient:
            self._most_graded[network] = max(rows, self._most_graded.get(network, rows))

    def note_call(self, network: int) -> bool:
        """Records a network call; returns whether the previous call was of the same network."""
        again = bool(self._called) and self._called[-1] == network
        self._called.append(network)
        self._since.add(network)
        return again

    def backward(self) -> None:
        self._accumulates |= not self._trained.isdisjoint(self._since)
        self._trained |= self._since
        self._since = set()

    @property
    def number(self) -> int:
        return len(self._called)

    @property
    def has_sample_count(self) -> bool:
        """Whether a call takes all samples of a step at once; else the size of a sample is unknown."""
        if any(self._least[network] < most for network, most in self._most_graded.items()):
            return False  # some calls get fewer rows, as an agent's action does
        return not self._accumulates and len(self._called) <= _MAX_CALLS * max(1, len(set(self._called)))

    def _is_auxiliary(self, args: tuple, kwargs: dict) -> bool:
        """Repeats the last decision; the first decision is by whether an input has a gradient."""
        if _can_learn(args[0]):
            return False
        has_gradient_input = any(value.requires_grad for value in _tensors(args[1:], kwargs))
        return not self._graded.get(id(args[0]), has_gradient_input)


def _tensors(args: tuple, kwargs: dict) -> list[Tensor]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]


def _can_learn(module: nn.Module) -> bool:
    return _is_loss(module) or next(module.parameters(), None) is not None


def _is_loss(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.loss._Loss):
        return True
    name = type(module).__name__.lower()
    return ("loss" in name or "criterion" in name) and next(module.parameters(), None) is None
