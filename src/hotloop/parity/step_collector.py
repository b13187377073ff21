"""Walks the baseline's path and writes down how far each baseline and each candidate is from the truth."""

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
    Key,
    StepTensors,
    missing_tensors,
    relative_errors,
    run_one_step,
    tensor_scales,
)
from hotloop.parity.evidence import Evidence, StepErrors, TensorErrors
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
"""Times what rounding did at a state: from here on, more nudges there tell whether it could do that too."""

_NUDGES = 8
"""How many, and as many farther off."""

_MAX_FRUITLESS = 6
"""States at which a plan stays suspicious after that, until no more are looked at because of it."""

_PATH_SHARE = 1 / 8
"""Of what rounding does to an update at a state, that may change its size there. Where it switches a ReLU it changes whole
gradients, by chance along them or across; a size that is off at most states is seen by its median."""

_SAME_SHARE = 1e-2
"""Float64 and the baseline compute the same thing if their losses agree so far; rounding is orders below."""


_HARMLESS, _ALIKE_IN_PRECISION = 1e-4, 1.0
"""By how much of the loss a harmless change is off from float64 at most; samples in another order may be none, as where
each is mixed with the one before it."""

_MAX_UNITS = 8.0
"""Times the rounding of the baseline's own format that its loss may be off, where torch's settings reduce its precision."""


class StepCollector:
    """Takes the same step with everyone, state by state; a witness alone stays alone.

    Args:
        ahead: steps that are run on from the last State.
        nudging: who is asked where a candidate is far off.
    """

    def __init__(
        self,
        truth: Float64Reference,
        witnesses: Sequence[ReferenceRun],
        peers: Sequence[ReferenceRun],
        candidates: Sequence[Program],
        ahead: int = 0,
        nudging: ReferenceRun | None = None,
    ) -> None:
        self.truth, self.candidates, self._ahead, self._nudging = truth, candidates, ahead, nudging
        self.witnesses, self.peers = list(witnesses), list(peers)
        self.walker = witnesses[0].program
        self._looked = 0
        self._coarse = _MAX_UNITS * max((one.unit for one in witnesses), default=0.0)
        self._harmless = max(_HARMLESS, self._coarse)
        accounts = [StepErrors(program.parts.plan.brief()) for program in candidates]
        self.evidence = Evidence(_active_errors(witnesses), _active_errors(peers), accounts, self.walker.state())

    def collect(self, progress: Callable[[int], None] = lambda states: None) -> Evidence:
        """Goes along the path, until it ends or nothing can be proven."""
        evidence = self.evidence
        for number, stop in enumerate(walk_states(self.walker)):
            here = replace(stop.state, position=self.walker.position)
            left = self.walker.steps_left()
            evidence.last = here if left is None or left >= self._ahead else evidence.last
            evidence.unproven = (number < 2 and self._unrepeatable(stop)) or self._compare(stop, number)
            if evidence.unproven:
                break
            self.walker.restore(here)
            progress(number + 1)
        return evidence

    def _compare(self, stop: PathState, number: int) -> str | None:
        """One step with everyone; a reason if that shows that nothing can be proven."""
        evidence = self.evidence
        # First: what the Task keeps for later steps is the baseline's then. Other witnesses may step with the same Program.
        nudged_too = self._nudging is not None and self._nudging.program is self.walker and len(self.candidates) > 1
        lent = len(self.witnesses) == 1 and not nudged_too
        plain, after = _record_step(
            self.walker, self.witnesses[0].errors, lambda: self._baseline(stop, number, lent=lent)
        )
        try:
            true = self.truth.step(stop.state, stop.batch)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return f"the step can't be run in float64: {error_summary(error)[0]}"
        if self.truth.watch.narrowed:
            return f"there is no float64 truth to compare with: {self.truth.watch.narrowed}"
        if not number and len(self.witnesses) > 1 and not self.truth.watch.draws:
            self.witnesses.append(reordered_reference(self.walker))
        sizes = tensor_scales(true, stop.state)
        found = relative_errors(plain, true, sizes)
        if _step_error(found) > max(_SAME_SHARE, self._coarse):
            # Two steps may have been alike by chance.
            return self._unrepeatable(stop) or (
                f"the baseline's loss is off by {found[_LOSS]:.0%} in float64, so they compute different things"
            )
        self.witnesses[0].errors.errors.append(found)
        for witness in self.witnesses[1:]:
            self._record_draws(witness, self._harmless, stop, number, (true, sizes), lent=True)
        heard = [self._record_draws(peer, _ALIKE_IN_PRECISION, stop, number, (true, sizes)) for peer in self.peers]
        evidence.baselines, evidence.peers = _active_errors(self.witnesses), _active_errors(self.peers)
        if self.peers and not evidence.peers:
            return "the eager step in that precision can't be run"
        evidence.steps.append(stop.state.position.step)
        evidence.rounding.append(largest_errors([account.errors[-1] for account in evidence.judges]))
        evidence.has_closer_look.append(dict(evidence.rounding[-1]))
        eager = next((seen for seen in heard if seen), plain)
        for program, account in zip(self.candidates, evidence.candidates, strict=True):
            if account.is_able:
                self._try(program, account, stop, (true, sizes, eager, after))
        return None

    def _baseline(self, stop: PathState, number: int, *, lent: bool = False) -> tuple[StepTensors, State]:
        with translate_baseline_errors(self.walker):
            return self.witnesses[0].step(stop.state, stop.batch, number, lent=lent)

    def _record_draws(
        self,
        witness: ReferenceRun,
        most: float,
        stop: PathState,
        number: int,
        known: tuple[StepTensors, TensorErrors],
        *,
        lent: bool = False,
    ) -> StepTensors | None:
        """One step of it; if it fails, or changes the loss by more than that, it is not harmless and goes."""
        if not witness.is_active:
            return None
        try:
            seen = witness.step(stop.state, stop.batch, number, lent=lent)[0]
            found = relative_errors(seen, *known)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            found = {_LOSS: float("inf")}  # whatever else it is, it says nothing of the plan that is proven
        if not witness.is_in_order:  # a buffer that keeps samples has them in another order then, which is no rounding
            found = {key: error for key, error in found.items() if key[0] != "buffer" or error <= _SAME_SHARE}
        witness.is_active = _step_error(found) <= most
        if not witness.is_active:
            return None
        witness.errors.errors.append(found)
        return seen

    def _try(
        self,
        program: Program,
        account: StepErrors,
        stop: PathState,
        known: tuple[StepTensors, TensorErrors, StepTensors, State],
    ) -> None:
        true, sizes, eager, expected = known
        ran = program.compiled_steps
        try:
            seen, after = _record_step(
                program, account, lambda: run_one_step(program, stop.state, stop.batch, lent=True)
            )
        except Exception as error:
            if is_out_of_memory(error):
                account.unproven = f"there was no memory for its step in the proof ({describe_error(error)})"
                account.short_of_memory = True
            else:
                account.failed = f"step {stop.state.position.step + 1} raised {describe_error(error)}"
            return
        found = relative_errors(seen, true, sizes) | dict.fromkeys(missing_tensors(seen, true), float("inf"))
        if ran is not None and program.compiled_steps == ran:
            account.is_eager.add(len(account.errors))
        account.errors.append(found)
        if account.differs is None and (paths := differing_paths(after, expected)):
            account.differs = f"{paths[0].strip('/')} after step {stop.state.position.step + 1}"
        account.unequal |= _unequal_keys(
            seen, eager, {key for key in found if self.evidence.rounding[-1].get(key) == math.inf}
        )
        rounding = self.evidence.has_closer_look[-1]
        if account.has_unseen_draws < _MAX_FRUITLESS and _error_ratio(found, rounding) > _SUSPICIOUS_RATIO:
            self._take_closer_look(stop, true, sizes, found)
            account.has_unseen_draws += _error_ratio(found, rounding) > _SUSPICIOUS_RATIO

    def _take_closer_look(self, stop: PathState, true: StepTensors, sizes: TensorErrors, found: TensorErrors) -> None:
        """Finds out better what rounding does at this state, once for all candidates.

        A plan may round more than a nudge does, and so switch a ReLU that no nudge of this size has switched by chance.
        """
        nudging = self._nudging
        if nudging is None or not nudging.is_active or self._looked == len(self.evidence.rounding):
            return
        self._looked, rounding = len(self.evidence.rounding), self.evidence.has_closer_look[-1]
        if nudging not in self.witnesses + self.peers:  # as one of those it was asked already
            most = _ALIKE_IN_PRECISION if self.peers else self._harmless
            if self._record_draws(nudging, most, stop, self._looked, (true, sizes), lent=True) is None:
                return
        first = 1000 * stop.state.position.step
        for number in range(first, first + _NUDGES):
            if (off := self._run_nudged(stop, number, nudging.unit, true, sizes)) is None:
                return
            rounding |= largest_errors([rounding, off])
        if _error_ratio(found, rounding) <= _SUSPICIOUS_RATIO:
            return
        near = dict(rounding)
        for number in range(first + _NUDGES, first + 2 * _NUDGES):
            if (off := self._run_nudged(stop, number, FARTHER * nudging.unit, true, sizes)) is None:
                return
            may = {key: rounding_error(error, max(near.get(key, 0.0), FLOAT32_UNIT)) for key, error in off.items()}
            rounding |= largest_errors([rounding, may])

    def _run_nudged(
        self, stop: PathState, number: int, unit: float, true: StepTensors, sizes: TensorErrors
    ) -> TensorErrors | None:
        """The errors of a step from there with parameters that are off by so much; None if it fails."""
        assert self._nudging is not None
        try:
            state = nudge_state(stop.state, number, unit)
            with self._nudging.around():
                seen = run_one_step(self._nudging.program, state, stop.batch, lent=True)[0]
            return relative_errors(seen, true, sizes)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return None

    def _unrepeatable(self, stop: PathState) -> str | None:
        """Why the baseline itself isn't the same when it is run twice, if it isn't."""
        with warnings.catch_warnings(record=True) as told, _warn_of_nondeterminism():
            warnings.simplefilter("always")
            first = self._baseline(stop, 0)[1]
            second = self._baseline(stop, 0, lent=True)[1]
        paths = differing_paths(first, second)
        if not paths:
            return None
        names = [str(one.message).partition(" ")[0] for one in told if "deterministic" in str(one.message)]
        if names:
            return f"{names[0]} gives another result each time, so there is nothing to compare with"
        return (
            "the step is too random to compare: run twice from the same State, with the generators of Python, NumPy and"
            f" torch seeded alike, the baseline gives another {paths[0].strip('/')}"
        )


StepFunction = Callable[[], tuple[StepTensors, State]]


def _record_step(program: Program, account: StepErrors, step: StepFunction) -> tuple[StepTensors, State]:
    """Takes a step; the first one that an account is of also tells which products it computes, and in which formats."""
    if account.arithmetic is not None or account.errors:
        return step()
    pieces, captured = program.parts.plan.accumulation, program.captured
    if captured is not None:
        with program.around():
            account.arithmetic = Arithmetic(count_products(captured, read_switches()), pieces)
        return step()
    try:
        with ProductCounter() as products:
            found = step()
    except (
        Exception
    ) as error:  # torch shows some operations to no mode: without it, the step says what is wrong with it
        if is_out_of_memory(error):
            raise
        return step()
    account.arithmetic = Arithmetic(products.counts, pieces)
    return found


_LOSS = ("loss", "loss")


def _step_error(found: TensorErrors) -> float:
    """By how much a whole step is off: by that of its loss, or where that cancels to next to nothing, of its gradients."""
    gradients = [error for (what, _), error in found.items() if what == "gradient"]
    return min(found[_LOSS], max(gradients, default=math.inf))


def _active_errors(witnesses: Sequence[ReferenceRun]) -> list[StepErrors]:
    return [one.errors for one in witnesses if one.is_active]


@contextmanager
def _warn_of_nondeterminism() -> Iterator[None]:
    """Has torch warn of operations that have no deterministic implementation."""
    enabled, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def largest_errors(found: Sequence[TensorErrors]) -> TensorErrors:
    """The largest error of each tensor."""
    return {key: max(one.get(key, 0.0) for one in found) for key in {key for one in found for key in one}}


def _unequal_keys(seen: StepTensors, eager: StepTensors, keys: set[Key]) -> set[Key]:
    """Which of them aren't bitwise the eager step's."""
    off = relative_errors(seen, eager, dict.fromkeys(seen, 1.0)) if keys else {}
    return {key for key in keys if off.get(key, math.inf)}


def _error_ratio(found: TensorErrors, rounding: TensorErrors) -> float:
    floor = errors_at_state(rounding)
    return max((floor_ratio(found[key], floor.get(key)) for key in found), default=0.0)


def errors_at_state(rounding: TensorErrors) -> TensorErrors:
    """What rounding may do to each tensor there; to the size of an update a share of what it does to the update."""
    return rounding | {
        ("size of update", name): max(rounding.get(("size of update", name), 0.0), _PATH_SHARE * off)
        for (what, name), off in rounding.items()
        if what == "update" and off < math.inf
    }


def floor_ratio(error: float, floor: float | None) -> float:
    """An error in multiples of the floor, which is no lower than rounding a number once."""
    if floor == math.inf:  # even the baselines can't be compared here; `StepErrors.unequal` has what isn't theirs
        return 0.0
    return error / max(floor or 0.0, FLOAT32_UNIT)
