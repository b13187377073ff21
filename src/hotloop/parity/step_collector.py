"""Collection of errors: the same step by all Programs at each State of the baseline's path, compared with float64."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from hotloop.core.float32_switches import read_switches
from hotloop.core.number_formats import Arithmetic
from hotloop.core.state import State, differing_paths
from hotloop.errors import describe_error, error_summary, is_out_of_memory
from hotloop.lowering.product_counts import ProductCounter, count_products
from hotloop.lowering.program import Program
from hotloop.parity.comparison import (
    FLOAT32_UNIT,
    Evidence,
    Key,
    StepErrors,
    StepTensors,
    TensorErrors,
    missing_tensors,
    relative_errors,
    run_one_step,
    tensor_scales,
)
from hotloop.parity.references import (
    FARTHER,
    Float64Reference,
    ReferenceRun,
    nudge_state,
    reordered_reference,
    rounding_error,
)
from hotloop.parity.trajectory import PathState, translate_baseline_errors, walk_states

_SUSPICIOUS_RATIO = 8.0
"""Multiple of a state's rounding error from which on more nudges check whether rounding explains the error."""

_NUDGES = 8
"""Number of nudges of the usual size, and of larger ones."""

_MAX_FRUITLESS = 6
"""States at which nudges don't explain a plan's error, after which none are tried for it."""

_PATH_SHARE = 1 / 8
"""Share of an update's rounding error that may change its length there: a switched ReLU changes whole gradients, along
them or across by chance. A length that is wrong at most states shows in its median."""

_SAME_SHARE = 1e-2
"""Largest relative difference of float64's and the baseline's loss; rounding is orders of magnitude smaller."""


_HARMLESS, _ALIKE_IN_PRECISION = 1e-4, 1.0
"""Largest relative error of a harmless change's loss. Another order of samples may exceed it, such as where each sample
is mixed with the one before."""

_MAX_UNITS = 8.0
"""Limit of the baseline's error of the loss, in units of its format, where torch's settings reduce its precision."""


class StepCollector:
    """Runs the same step with all Programs, state by state; a reference that differs too much is dropped.

    Args:
        ahead: steps of the free run after the last State.
        nudging: the reference to nudge where a candidate's error is large.
        later: see `walk_states`.
    """

    def __init__(
        self,
        truth: Float64Reference,
        references: Sequence[ReferenceRun],
        peers: Sequence[ReferenceRun],
        candidates: Sequence[Program],
        ahead: int = 0,
        nudging: ReferenceRun | None = None,
        later: State | None = None,
    ) -> None:
        self.truth, self.candidates, self._ahead, self._nudging = truth, candidates, ahead, nudging
        self._later = later
        self.references, self.peers = list(references), list(peers)
        self.walker = references[0].program
        self._nudged_states = 0
        self._format_error = _MAX_UNITS * max((reference.unit for reference in references), default=0.0)
        self._harmless = max(_HARMLESS, self._format_error)
        records = [StepErrors(program.parts.plan.brief()) for program in candidates]
        self.evidence = Evidence(_active_errors(references), _active_errors(peers), records, self.walker.state())

    def collect(self, progress: Callable[[int], None] = lambda states: None) -> Evidence:
        """Walks the path until its end, or until nothing can be proven."""
        evidence = self.evidence
        for number, point in enumerate(walk_states(self.walker, later=self._later)):
            here = replace(point.state, position=self.walker.position)
            left = self.walker.steps_left()
            evidence.last = here if left is None or left >= self._ahead else evidence.last
            evidence.unproven = (number < 2 and self._unrepeatable(point)) or self._compare(point, number)
            if evidence.unproven:
                break
            self.walker.restore(here)
            progress(number + 1)
        return evidence

    def _compare(self, point: PathState, number: int) -> str | None:
        """Runs one step with all Programs; returns the reason if nothing can be proven."""
        evidence = self.evidence
        # The baseline runs first, so that the Task stores its objects for later steps. Others may share its Program.
        nudged_too = self._nudging is not None and self._nudging.program is self.walker and len(self.candidates) > 1
        lent = len(self.references) == 1 and not nudged_too
        plain, after = _run_recorded(
            self.walker, self.references[0].errors, lambda: self._baseline(point, number, lent=lent)
        )
        try:
            true = self.truth.step(point.state, point.batch)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return f"the step can't be run in float64: {error_summary(error)[0]}"
        if self.truth.watch.narrowed:
            return f"there is no float64 truth to compare with: {self.truth.watch.narrowed}"
        if not number and len(self.references) > 1 and not self.truth.watch.draws:
            self.references.append(reordered_reference(self.walker))
        sizes = tensor_scales(true, point.state)
        found = relative_errors(plain, true, sizes)
        if _step_error(found) > max(_SAME_SHARE, self._format_error):
            # Two runs may have been equal by chance.
            return self._unrepeatable(point) or (
                f"the baseline's loss is off by {found[_LOSS]:.0%} in float64, so the two compute different results"
            )
        self.references[0].errors.errors.append(found)
        for reference in self.references[1:]:
            self._run_reference(reference, self._harmless, point, number, (true, sizes), lent=True)
        peer_tensors = [
            self._run_reference(peer, _ALIKE_IN_PRECISION, point, number, (true, sizes)) for peer in self.peers
        ]
        evidence.baselines, evidence.peers = _active_errors(self.references), _active_errors(self.peers)
        if self.peers and not evidence.peers:
            return "the eager step in that precision can't be run"
        evidence.steps.append(point.state.position.step)
        evidence.rounding.append(largest_errors([record.errors[-1] for record in evidence.judges]))
        evidence.nudged_rounding.append(dict(evidence.rounding[-1]))
        eager = next((seen for seen in peer_tensors if seen), plain)
        for program, record in zip(self.candidates, evidence.candidates, strict=True):
            if record.is_able:
                self._run_candidate(program, record, point, (true, sizes, eager, after))
        return None

    def _baseline(self, point: PathState, number: int, *, lent: bool = False) -> tuple[StepTensors, State]:
        with translate_baseline_errors(self.walker):
            return self.references[0].step(point.state, point.batch, number, lent=lent)

    def _run_reference(
        self,
        reference: ReferenceRun,
        limit: float,
        point: PathState,
        number: int,
        known: tuple[StepTensors, TensorErrors],
        *,
        lent: bool = False,
    ) -> StepTensors | None:
        """Runs one step of a reference; drops it if it fails or changes the loss by more than `limit`."""
        if not reference.is_active:
            return None
        try:
            seen = reference.step(point.state, point.batch, number, lent=lent)[0]
            found = relative_errors(seen, *known)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            found = {_LOSS: float("inf")}  # the failure of a changed baseline says nothing about the plan
        if not reference.is_in_order:  # a buffer of samples has another order then, which is no rounding
            found = {key: error for key, error in found.items() if key[0] != "buffer" or error <= _SAME_SHARE}
        reference.is_active = _step_error(found) <= limit
        if not reference.is_active:
            return None
        reference.errors.errors.append(found)
        return seen

    def _run_candidate(
        self,
        program: Program,
        record: StepErrors,
        point: PathState,
        known: tuple[StepTensors, TensorErrors, StepTensors, State],
    ) -> None:
        true, sizes, eager, expected = known
        ran = program.compiled_steps
        try:
            seen, after = _run_recorded(
                program, record, lambda: run_one_step(program, point.state, point.batch, lent=True)
            )
        except Exception as error:
            if is_out_of_memory(error):
                record.unproven = f"there was no memory for its step in the proof ({describe_error(error)})"
                record.short_of_memory = True
            else:
                record.failed = f"step {point.state.position.step + 1} raised {describe_error(error)}"
            return
        found = relative_errors(seen, true, sizes) | dict.fromkeys(missing_tensors(seen, true), float("inf"))
        if ran is not None and program.compiled_steps == ran:
            record.eager_states.add(len(record.errors))
        record.errors.append(found)
        if record.differs is None and (paths := differing_paths(after, expected)):
            record.differs = f"{paths[0].strip('/')} after step {point.state.position.step + 1}"
        record.unequal |= _unequal_keys(
            seen, eager, {key for key in found if self.evidence.rounding[-1].get(key) == math.inf}
        )
        rounding = self.evidence.nudged_rounding[-1]
        if record.unexplained_states < _MAX_FRUITLESS and _error_ratio(found, rounding) > _SUSPICIOUS_RATIO:
            self._take_closer_look(point, true, sizes, found)
            record.unexplained_states += _error_ratio(found, rounding) > _SUSPICIOUS_RATIO

    def _take_closer_look(self, point: PathState, true: StepTensors, sizes: TensorErrors, found: TensorErrors) -> None:
        """Measures rounding at this state with more nudges, once for all candidates.

        A plan may round more than a nudge, and switch a ReLU that no nudge of this size switches by chance.
        """
        nudging = self._nudging
        if nudging is None or not nudging.is_active or self._nudged_states == len(self.evidence.rounding):
            return
        self._nudged_states, rounding = len(self.evidence.rounding), self.evidence.nudged_rounding[-1]
        if nudging not in self.references + self.peers:  # else it has run already
            limit = _ALIKE_IN_PRECISION if self.peers else self._harmless
            if self._run_reference(nudging, limit, point, self._nudged_states, (true, sizes), lent=True) is None:
                return
        first = 1000 * point.state.position.step
        for number in range(first, first + _NUDGES):
            if (errors := self._run_nudged(point, number, nudging.unit, true, sizes)) is None:
                return
            rounding |= largest_errors([rounding, errors])
        if _error_ratio(found, rounding) <= _SUSPICIOUS_RATIO:
            return
        near = dict(rounding)
        for number in range(first + _NUDGES, first + 2 * _NUDGES):
            if (errors := self._run_nudged(point, number, FARTHER * nudging.unit, true, sizes)) is None:
                return
            possible = {
                key: rounding_error(error, max(near.get(key, 0.0), FLOAT32_UNIT)) for key, error in errors.items()
            }
            rounding |= largest_errors([rounding, possible])

    def _run_nudged(
        self, point: PathState, number: int, unit: float, true: StepTensors, sizes: TensorErrors
    ) -> TensorErrors | None:
        assert self._nudging is not None
        try:
            state = nudge_state(point.state, number, unit)
            with self._nudging.around():
                seen = run_one_step(self._nudging.program, state, point.batch, lent=True)[0]
            return relative_errors(seen, true, sizes)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return None

    def _unrepeatable(self, point: PathState) -> str | None:
        with warnings.catch_warnings(record=True) as warned, _warn_of_nondeterminism():
            warnings.simplefilter("always")
            first = self._baseline(point, 0)[1]
            second = self._baseline(point, 0, lent=True)[1]
        paths = differing_paths(first, second)
        if not paths:
            return None
        messages = [str(warning.message) for warning in warned]
        names = [message.partition(" ")[0] for message in messages if "deterministic" in message]
        if names:
            return f"{names[0]} gives another result each time, so there is nothing to compare with"
        return (
            "the step is too random to compare: run twice from the same State, with the generators of Python, NumPy and"
            f" torch seeded alike, the baseline gives another {paths[0].strip('/')}"
        )


StepFunction = Callable[[], tuple[StepTensors, State]]


def _run_recorded(program: Program, record: StepErrors, step: StepFunction) -> tuple[StepTensors, State]:
    """Runs a step; at a record's first step also records the products and their formats."""
    if record.arithmetic is not None or record.errors:
        return step()
    pieces, captured = program.parts.plan.accumulation, program.captured
    if captured is not None:
        with program.around():
            record.arithmetic = Arithmetic(count_products(captured, read_switches()), pieces)
        return step()
    try:
        with ProductCounter() as products:
            found = step()
    except Exception as error:
        # torch has operations that fail under a dispatch mode: without it, the step raises its own errors
        if is_out_of_memory(error):
            raise
        return step()
    record.arithmetic = Arithmetic(products.counts, pieces)
    return found


_LOSS = ("loss", "loss")


def _step_error(found: TensorErrors) -> float:
    """Returns a step's error: of the loss, or if smaller, of the gradients, since a loss may cancel to nearly zero."""
    gradients = [error for (what, _), error in found.items() if what == "gradient"]
    return min(found[_LOSS], max(gradients, default=math.inf))


def _active_errors(references: Sequence[ReferenceRun]) -> list[StepErrors]:
    return [reference.errors for reference in references if reference.is_active]


@contextmanager
def _warn_of_nondeterminism() -> Iterator[None]:
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def largest_errors(found: Sequence[TensorErrors]) -> TensorErrors:
    """Returns the largest error of each tensor."""
    return {key: max(errors.get(key, 0.0) for errors in found) for key in {key for errors in found for key in errors}}


def _unequal_keys(seen: StepTensors, eager: StepTensors, keys: set[Key]) -> set[Key]:
    errors = relative_errors(seen, eager, dict.fromkeys(seen, 1.0)) if keys else {}
    return {key for key in keys if errors.get(key, math.inf)}


def _error_ratio(found: TensorErrors, rounding: TensorErrors) -> float:
    floor = errors_at_state(rounding)
    return max((floor_ratio(found[key], floor.get(key)) for key in found), default=0.0)


def errors_at_state(rounding: TensorErrors) -> TensorErrors:
    """Returns possible rounding errors; of an update's length also a share of the update's error."""
    return rounding | {
        ("size of update", name): max(rounding.get(("size of update", name), 0.0), _PATH_SHARE * error)
        for (what, name), error in rounding.items()
        if what == "update" and error < math.inf
    }


def floor_ratio(error: float, floor: float | None) -> float:
    """Returns an error in multiples of the floor, which is at least one rounding."""
    if floor == math.inf:  # not even baselines can be compared; `StepErrors.unequal` has the differences
        return 0.0
    return error / max(floor or 0.0, FLOAT32_UNIT)
