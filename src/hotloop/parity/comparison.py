"""The tensors of one step by name, the distance between two steps, and the evidence of all compared steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hotloop.core.number_formats import Arithmetic, describe_reductions
from hotloop.core.state import State, tree_leaves
from hotloop.core.tensor_distance import SLICE, difference_norm, slices, tensor_norm, to_float64
from hotloop.data.batch_tree import copy_tree, tree_tensors
from hotloop.lowering.program import Program

Key = tuple[str, str]
"""(what, name), as in `TensorError`."""

StepTensors = Mapping[Key, Tensor]
"""float64 on the CPU; counts stay integers."""

KINDS = ("count", "loss", "buffer", "gradient", "optimizer", "update", "size of update", "average")
"""In the order of their computation in a step."""

FLOAT32_UNIT = 2.0**-24
"""Unit roundoff of fp32: half the distance from 1 to the next number."""


class _StepRecord(StepTensors):
    """Stores tensors as they are and converts one at a time to float64, since a whole network is large."""

    def __init__(self) -> None:
        self._values: dict[Key, tuple[Any, Any]] = {}

    def record(self, key: Key, value: Any, before: Any = None) -> None:
        self._values[key] = value, before

    def __getitem__(self, key: Key) -> Tensor:
        value, before = self._values[key]
        return to_float64(value) if before is None else _parameter_change(value, before)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[Key]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def run_one_step(program: Program, state: State, batch: Any, *, lent: bool = False) -> tuple[StepTensors, State]:
    """Runs a step from `state` on a copy of `batch`; returns its tensors and the State after it.

    Args:
        lent: both share the Program's memory, valid until its next step.
    """
    program.restore(replace(state, sums={}))
    before = {name: (value.grad, _version(value.grad)) for name, value in program.model.named_parameters()}
    copied = copy_tree(batch)
    program.step(copied)
    after, tensors = program.state(lent=lent), _StepRecord()
    for name, value in after.sums.items():
        tensors.record(("count" if name in _COUNTS else "loss", name), value)
    for key, value in _buffers(after):
        tensors.record(key, value)
    for name, parameter in program.model.named_parameters():
        gradient, (old, version) = parameter.grad, before[name]
        if gradient is not None and (gradient is not old or gradient._version != version):  # made in this step
            tensors.record(("gradient", name), gradient.detach().to("cpu", copy=not lent))
    for path, value in tree_leaves({key: after.optimizer[key] for key in ("state", "own", "groups")}):
        if isinstance(value, Tensor | int | float) and not isinstance(value, bool):
            tensors.record(("optimizer", path.strip("/")), value)
    for name, value in after.parameters.items():
        if is_real(value):
            tensors.record(("update", name), value, state.parameters[name])
    for name, value in after.average.items():
        tensors.record(("average", name), value)
    for place, (was, now) in enumerate(zip(tree_tensors(batch), tree_tensors(copied), strict=True)):
        tensors.record(("count", f"tensors {place} of the batch that were changed"), int(not torch.equal(was, now)))
    return tensors, after


_COUNTS = ("samples", "weight")


def _buffers(state: State) -> Iterator[tuple[Key, Any]]:
    for name, value in {**state.buffers, **state.loss}.items():
        yield ("buffer", name), value


def _parameter_change(value: Tensor, before: Tensor) -> Tensor:
    """Returns the change in float64, computed in slices to save memory."""
    if value.layout != torch.strided or value.is_complex():
        return to_float64(value) - to_float64(before)
    change = torch.empty(value.shape, dtype=torch.float64)
    for part, (mine, theirs) in zip(change.view(-1).split(SLICE), slices(value, before), strict=True):
        torch.sub(to_float64(mine), to_float64(theirs), out=part)
    return change


def _version(tensor: Tensor | None) -> int:
    return -1 if tensor is None else tensor._version


def tensor_scales(truth: StepTensors, before: State) -> dict[Key, float]:
    """Returns the scale of each tensor: its norm, but at least a hundredth of the largest of its kind.

    So the error of a gradient that is truly zero, such as of a bias before a batch normalization, is relative to other
    gradients. A buffer that the step doesn't change, such as a mask, is no such measure: it may have any size.
    """
    constant = {key for key, value in _buffers(before) if key in truth and torch.equal(to_float64(value), truth[key])}
    sizes = {key: _finite_norm(value) for key, value in truth.items()}
    largest: dict[Key, float] = {}
    for key, value in truth.items():
        if value.numel() and key not in constant and sizes[key] < math.inf:
            largest[_tensor_kind(key)] = max(largest.get(_tensor_kind(key), 0.0), sizes[key] / value.numel() ** 0.5)
    return {
        key: max(sizes[key], 0.01 * largest.get(_tensor_kind(key), 0.0) * value.numel() ** 0.5)
        for key, value in truth.items()
    }


def _tensor_kind(key: Key) -> Key:
    """Returns the kind; of an optimizer's state and of buffers with the role, such as running means."""
    separator = {"optimizer": "/", "buffer": "."}.get(key[0])
    return key[0], key[1].rpartition(separator)[2] if separator else ""


def _finite_norm(value: Tensor) -> float:
    norm = tensor_norm(value)
    return norm if math.isfinite(norm) else tensor_norm(value.nan_to_num(0.0, 0.0, 0.0))


def relative_errors(tensors: StepTensors, truth: StepTensors, sizes: dict[Key, float]) -> dict[Key, float]:
    """Returns each tensor's distance from the truth relative to its scale; infinite where shapes or integers differ.

    The length of an update along the true one is compared as well: rounding is small in the sum over an update's
    numbers.
    """
    found: dict[Key, float] = {}
    for group in _tensor_groups(tensors, truth):
        for (key, value, true), off in zip(group, _distance_norms(group, sizes), strict=True):
            found[key] = off
            if key[0] == "update" and 0 < (size := float(torch.dot(true.flatten(), true.flatten()))) < math.inf:
                along = torch.dot(value.double().flatten(), true.flatten())
                found["size of update", key[1]] = abs(float(along) / size - 1)
    return found | {key: math.inf for key in tensors if key not in found}


def _tensor_groups(tensors: StepTensors, truth: StepTensors) -> Iterator[list[tuple[Key, Tensor, Tensor]]]:
    """Yields tensors of equal shape in both as (key, value, truth), in groups of up to `SLICE` numbers."""
    group: list[tuple[Key, Tensor, Tensor]] = []
    numbers = 0
    for key in tensors:
        true = truth.get(key)
        if true is None:
            continue
        if group and numbers + true.numel() > SLICE:
            yield group
            group, numbers = [], 0
        value = tensors[key]  # converts to float64
        if true.shape == value.shape:
            group.append((key, value, true))
            numbers += true.numel()
    if group:
        yield group


def missing_tensors(tensors: StepTensors, truth: StepTensors) -> list[Key]:
    """Returns the tensors that a step lacks; gradients are no fault, since a compiled step doesn't show them."""
    return [key for key in truth if key not in tensors and key[0] != "gradient"]


def _distance_norms(group: Sequence[tuple[Key, Tensor, Tensor]], sizes: dict[Key, float]) -> list[float]:
    """Computes several relative errors in few calls: for small tensors the calls take longer than the arithmetic."""
    real = [(value, true) for _, value, true in group if value.is_floating_point() and true.is_floating_point()]
    apart = iter(_difference_norms(real))
    return [
        _relative_error(next(apart), sizes[key])
        if value.is_floating_point() and true.is_floating_point()
        else (0.0 if torch.equal(value.double(), true.double()) else math.inf)
        for key, value, true in group
    ]


def _relative_error(distance: float, size: float) -> float:
    if distance == 0:
        return 0.0
    return distance / size if math.isfinite(distance) and 0 < size < math.inf else math.inf


def _difference_norms(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[float]:
    if len(pairs) < 2:
        return [difference_norm(*pair) for pair in pairs]
    off = torch._foreach_norm(torch._foreach_sub(*map(list, zip(*pairs, strict=True))))
    norms = torch.stack(list(off)).tolist()
    return [norm if math.isfinite(norm) else difference_norm(*pair) for norm, pair in zip(norms, pairs, strict=True)]


def is_real(value: Any) -> bool:
    """Checks whether the value is a tensor of floating-point or complex numbers, which rounding affects."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


TensorErrors = dict[Key, float]


@dataclass
class StepErrors:
    """Evidence of the steps of a baseline or a candidate.

    Attributes:
        errors: relative error of each tensor, by state.
        eager_states: numbers of the states, from 0, at which a compiled plan ran eagerly, such as for a smaller batch.
        differs: path and step at which the State first wasn't bitwise the baseline's.
        unequal: tensors not bitwise the eager step's at a state where that step's distance from float64 is infinite.
        failed: the first step that raised, and its error; later steps are left out.
        has_tested_draws: whether the random numbers were tested; `draws` is their fault.
        unproven: why the steps can't be compared; `short_of_memory` if memory was missing.
        arithmetic: the products of the first step; None if unknown.
        unexplained_states: states at which larger nudges were tried for this candidate without explaining its error.
    """

    name: str
    errors: list[TensorErrors] = field(default_factory=list)
    eager_states: set[int] = field(default_factory=set)
    differs: str | None = None
    unequal: set[Key] = field(default_factory=set)
    failed: str | None = None
    has_tested_draws: bool = False
    draws: str | None = None
    unproven: str | None = None
    short_of_memory: bool = False
    arithmetic: Arithmetic | None = None
    unexplained_states: int = 0

    @property
    def is_able(self) -> bool:
        return self.failed is None and self.unproven is None

    @property
    def visible_errors(self) -> list[TensorErrors]:
        """Errors by state; where a compiled plan ran eagerly, only of tensors that its compiled program never shows."""
        shown = {key for state, errors in enumerate(self.errors) if state not in self.eager_states for key in errors}
        return [
            {key: error for key, error in errors.items() if state not in self.eager_states or key not in shown}
            for state, errors in enumerate(self.errors)
        ]


@dataclass
class Evidence:
    """Evidence of all single steps.

    Attributes:
        baselines: the baseline and harmless changes of it.
        peers: the eager step in the candidates' reduced precision, and changes of it; empty without reduced precision.
        last: the last State from which the schedule allows a free run; or the first.
        steps: the number of the step at each state, from 0.
        rounding: the largest error of each tensor among the judges, by state.
        shared_draws: origin of the candidates' random numbers, if all other Programs get them.
        unproven: why nothing can be proven.
        nudged_rounding: as `rounding`, with more nudges where a candidate had large errors.
        requested: whether the candidates' plan asks for the reduced precision.
    """

    baselines: list[StepErrors]
    peers: list[StepErrors]
    candidates: list[StepErrors]
    last: State
    steps: list[int] = field(default_factory=list)
    rounding: list[TensorErrors] = field(default_factory=list)
    shared_draws: str = ""
    unproven: str | None = None
    nudged_rounding: list[TensorErrors] = field(default_factory=list)
    requested: bool = False

    def reductions(self, candidate: StepErrors) -> list[str]:
        """Returns the operators that a candidate computes in fewer bits than the baseline, one line per class."""
        baseline = self.baselines[0].arithmetic if self.baselines else None
        if candidate.arithmetic is None or baseline is None:
            return []
        return describe_reductions(candidate.arithmetic, baseline)

    @property
    def judges(self) -> list[StepErrors]:
        """The steps whose errors show the size of rounding errors in the candidates' precision."""
        return self.peers or self.baselines
