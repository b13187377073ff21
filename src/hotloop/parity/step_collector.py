"""Walks the baseline's path and writes down how far each baseline and each candidate is from the truth."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from hotloop.core.float32_switches import read
from hotloop.core.number_formats import Arithmetic
from hotloop.core.state import State, differences
from hotloop.errors import blame, out_of_memory, told
from hotloop.lowering.product_counts import Products, products_of
from hotloop.lowering.program import Program
from hotloop.parity.comparison import UNIT, Key, Seen, errors, missing, one_step, scales
from hotloop.parity.evidence import Account, Errors, Evidence
from hotloop.parity.references import FARTHER, Truth, Witness, in_another_order, nudged, of_rounding
from hotloop.parity.trajectory import Stop, of_the_baseline, stops

_SUSPICIOUS = 8.0
"""Times what rounding did at a state: from here on, more nudges there tell whether it could do that too."""

_NUDGES = 8
"""How many, and as many farther off."""

_IN_VAIN = 6
"""States at which a plan stays suspicious after that, until no more are looked at because of it."""

_ALONG = 1 / 8
"""Of what rounding does to an update at a state, that may change its size there. Where it switches a ReLU it changes whole
gradients, by chance along them or across; a size that is off at most states is seen by its median."""

_ALIKE = 1e-2
"""Float64 and the baseline compute the same thing if their losses agree so far; rounding is orders below."""


_HARMLESS, _ALIKE_IN_PRECISION = 1e-4, 1.0
"""By how much of the loss a harmless change is off from float64 at most; samples in another order may be none, as where
each is mixed with the one before it."""

_UNITS_OFF = 8.0
"""Times the rounding of the baseline's own format that its loss may be off, where torch's settings reduce its precision."""


class Collector:
    """Takes the same step with everyone, state by state; a witness alone stays alone.

    Args:
        ahead: steps that are run on from the last State.
        nudging: who is asked where a candidate is far off.
    """

    def __init__(
        self,
        truth: Truth,
        witnesses: Sequence[Witness],
        peers: Sequence[Witness],
        candidates: Sequence[Program],
        ahead: int = 0,
        nudging: Witness | None = None,
    ) -> None:
        self.truth, self.candidates, self._ahead, self._nudging = truth, candidates, ahead, nudging
        self.witnesses, self.peers = list(witnesses), list(peers)
        self.walker = witnesses[0].program
        self._looked = 0
        self._coarse = _UNITS_OFF * max((one.unit for one in witnesses), default=0.0)
        self._harmless = max(_HARMLESS, self._coarse)
        accounts = [Account(program.parts.plan.brief()) for program in candidates]
        self.evidence = Evidence(_active(witnesses), _active(peers), accounts, self.walker.state())

    def collect(self, progress: Callable[[int], None] = lambda states: None) -> Evidence:
        """Goes along the path, until it ends or nothing can be proven."""
        evidence = self.evidence
        for number, stop in enumerate(stops(self.walker)):
            here = replace(stop.state, position=self.walker.position)
            left = self.walker.steps_left()
            evidence.last = here if left is None or left >= self._ahead else evidence.last
            evidence.unproven = (number < 2 and self._unrepeatable(stop)) or self._compare(stop, number)
            if evidence.unproven:
                break
            self.walker.restore(here)
            progress(number + 1)
        return evidence

    def _compare(self, stop: Stop, number: int) -> str | None:
        """One step with everyone; a reason if that shows that nothing can be proven."""
        evidence = self.evidence
        # First: what the Task keeps for later steps is the baseline's then. Other witnesses may step with the same Program.
        nudged_too = self._nudging is not None and self._nudging.program is self.walker and len(self.candidates) > 1
        lent = len(self.witnesses) == 1 and not nudged_too
        plain, after = _noting(self.walker, self.witnesses[0].account, lambda: self._baseline(stop, number, lent=lent))
        try:
            true = self.truth.step(stop.state, stop.batch)
        except Exception as error:
            if out_of_memory(error):
                raise
            return f"the step can't be run in float64: {told(error)[0]}"
        if self.truth.watch.narrowed:
            return f"there is no float64 truth to compare with: {self.truth.watch.narrowed}"
        if not number and len(self.witnesses) > 1 and not self.truth.watch.draws:
            self.witnesses.append(in_another_order(self.walker))
        sizes = scales(true, stop.state)
        found = errors(plain, true, sizes)
        if _off(found) > max(_ALIKE, self._coarse):
            # Two steps may have been alike by chance.
            return self._unrepeatable(stop) or (
                f"the baseline's loss is off by {found[_LOSS]:.0%} in float64, so they compute different things"
            )
        self.witnesses[0].account.errors.append(found)
        for witness in self.witnesses[1:]:
            self._listen(witness, self._harmless, stop, number, (true, sizes), lent=True)
        heard = [self._listen(peer, _ALIKE_IN_PRECISION, stop, number, (true, sizes)) for peer in self.peers]
        evidence.baselines, evidence.peers = _active(self.witnesses), _active(self.peers)
        if self.peers and not evidence.peers:
            return "the eager step in that precision can't be run"
        evidence.steps.append(stop.state.position.step)
        evidence.rounding.append(worst([account.errors[-1] for account in evidence.judges]))
        evidence.closer.append(dict(evidence.rounding[-1]))
        eager = next((seen for seen in heard if seen), plain)
        for program, account in zip(self.candidates, evidence.candidates, strict=True):
            if account.able:
                self._try(program, account, stop, (true, sizes, eager, after))
        return None

    def _baseline(self, stop: Stop, number: int, *, lent: bool = False) -> tuple[Seen, State]:
        with of_the_baseline(self.walker):
            return self.witnesses[0].step(stop.state, stop.batch, number, lent=lent)

    def _listen(
        self,
        witness: Witness,
        most: float,
        stop: Stop,
        number: int,
        known: tuple[Seen, Errors],
        *,
        lent: bool = False,
    ) -> Seen | None:
        """One step of it; if it fails, or changes the loss by more than that, it is not harmless and goes."""
        if not witness.active:
            return None
        try:
            seen = witness.step(stop.state, stop.batch, number, lent=lent)[0]
            found = errors(seen, *known)
        except Exception as error:
            if out_of_memory(error):
                raise
            found = {_LOSS: float("inf")}  # whatever else it is, it says nothing of the plan that is proven
        if not witness.in_order:  # a buffer that keeps samples has them in another order then, which is no rounding
            found = {key: error for key, error in found.items() if key[0] != "buffer" or error <= _ALIKE}
        witness.active = _off(found) <= most
        if not witness.active:
            return None
        witness.account.errors.append(found)
        return seen

    def _try(self, program: Program, account: Account, stop: Stop, known: tuple[Seen, Errors, Seen, State]) -> None:
        true, sizes, eager, expected = known
        ran = program.compiled_steps
        try:
            seen, after = _noting(program, account, lambda: one_step(program, stop.state, stop.batch, lent=True))
        except Exception as error:
            if out_of_memory(error):
                account.unproven = f"there was no memory for its step in the proof ({blame(error)})"
                account.short_of_memory = True
            else:
                account.failed = f"step {stop.state.position.step + 1} raised {blame(error)}"
            return
        found = errors(seen, true, sizes) | dict.fromkeys(missing(seen, true), float("inf"))
        if ran is not None and program.compiled_steps == ran:
            account.eagerly.add(len(account.errors))
        account.errors.append(found)
        if account.differs is None and (paths := differences(after, expected)):
            account.differs = f"{paths[0].strip('/')} after step {stop.state.position.step + 1}"
        account.unequal |= _unequal(
            seen, eager, {key for key in found if self.evidence.rounding[-1].get(key) == math.inf}
        )
        rounding = self.evidence.closer[-1]
        if account.looked_in_vain < _IN_VAIN and _ratio(found, rounding) > _SUSPICIOUS:
            self._look_closer(stop, true, sizes, found)
            account.looked_in_vain += _ratio(found, rounding) > _SUSPICIOUS

    def _look_closer(self, stop: Stop, true: Seen, sizes: Errors, found: Errors) -> None:
        """Finds out better what rounding does at this state, once for all candidates.

        A plan may round more than a nudge does, and so switch a ReLU that no nudge of this size has switched by chance.
        """
        nudging = self._nudging
        if nudging is None or not nudging.active or self._looked == len(self.evidence.rounding):
            return
        self._looked, rounding = len(self.evidence.rounding), self.evidence.closer[-1]
        if nudging not in self.witnesses + self.peers:  # as one of those it was asked already
            most = _ALIKE_IN_PRECISION if self.peers else self._harmless
            if self._listen(nudging, most, stop, self._looked, (true, sizes), lent=True) is None:
                return
        first = 1000 * stop.state.position.step
        for number in range(first, first + _NUDGES):
            if (off := self._nudged(stop, number, nudging.unit, true, sizes)) is None:
                return
            rounding |= worst([rounding, off])
        if _ratio(found, rounding) <= _SUSPICIOUS:
            return
        near = dict(rounding)
        for number in range(first + _NUDGES, first + 2 * _NUDGES):
            if (off := self._nudged(stop, number, FARTHER * nudging.unit, true, sizes)) is None:
                return
            may = {key: of_rounding(error, max(near.get(key, 0.0), UNIT)) for key, error in off.items()}
            rounding |= worst([rounding, may])

    def _nudged(self, stop: Stop, number: int, unit: float, true: Seen, sizes: Errors) -> Errors | None:
        """The errors of a step from there with parameters that are off by so much; None if it fails."""
        assert self._nudging is not None
        try:
            state = nudged(stop.state, number, unit)
            with self._nudging.around():
                seen = one_step(self._nudging.program, state, stop.batch, lent=True)[0]
            return errors(seen, true, sizes)
        except Exception as error:
            if out_of_memory(error):
                raise
            return None

    def _unrepeatable(self, stop: Stop) -> str | None:
        """Why the baseline itself isn't the same when it is run twice, if it isn't."""
        with warnings.catch_warnings(record=True) as told, _warning_of_chance():
            warnings.simplefilter("always")
            first = self._baseline(stop, 0)[1]
            second = self._baseline(stop, 0, lent=True)[1]
        paths = differences(first, second)
        if not paths:
            return None
        names = [str(one.message).partition(" ")[0] for one in told if "deterministic" in str(one.message)]
        if names:
            return f"{names[0]} gives another result each time, so there is nothing to compare with"
        return (
            "the step is too random to compare: run twice from the same State, with the generators of Python, NumPy and"
            f" torch seeded alike, the baseline gives another {paths[0].strip('/')}"
        )


Step = Callable[[], tuple[Seen, State]]


def _noting(program: Program, account: Account, step: Step) -> tuple[Seen, State]:
    """Takes a step; the first one that an account is of also tells which products it computes, and in which formats."""
    if account.arithmetic is not None or account.errors:
        return step()
    pieces, captured = program.parts.plan.accumulation, program.captured
    if captured is not None:
        with program.around():
            account.arithmetic = Arithmetic(products_of(captured, read()), pieces)
        return step()
    try:
        with Products() as products:
            found = step()
    except (
        Exception
    ) as error:  # torch shows some operations to no mode: without it, the step says what is wrong with it
        if out_of_memory(error):
            raise
        return step()
    account.arithmetic = Arithmetic(products.counts, pieces)
    return found


_LOSS = ("loss", "loss")


def _off(found: Errors) -> float:
    """By how much a whole step is off: by that of its loss, or where that cancels to next to nothing, of its gradients."""
    gradients = [error for (what, _), error in found.items() if what == "gradient"]
    return min(found[_LOSS], max(gradients, default=math.inf))


def _active(witnesses: Sequence[Witness]) -> list[Account]:
    return [one.account for one in witnesses if one.active]


@contextmanager
def _warning_of_chance() -> Iterator[None]:
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


def worst(found: Sequence[Errors]) -> Errors:
    """The largest error of each tensor."""
    return {key: max(one.get(key, 0.0) for one in found) for key in {key for one in found for key in one}}


def _unequal(seen: Seen, eager: Seen, keys: set[Key]) -> set[Key]:
    """Which of them aren't bitwise the eager step's."""
    off = errors(seen, eager, dict.fromkeys(seen, 1.0)) if keys else {}
    return {key for key in keys if off.get(key, math.inf)}


def _ratio(found: Errors, rounding: Errors) -> float:
    floor = at_one_state(rounding)
    return max((ratio(found[key], floor.get(key)) for key in found), default=0.0)


def at_one_state(rounding: Errors) -> Errors:
    """What rounding may do to each tensor there; to the size of an update a share of what it does to the update."""
    return rounding | {
        ("size of update", name): max(rounding.get(("size of update", name), 0.0), _ALONG * off)
        for (what, name), off in rounding.items()
        if what == "update" and off < math.inf
    }


def ratio(error: float, floor: float | None) -> float:
    """An error in multiples of the floor, which is no lower than rounding a number once."""
    if floor == math.inf:  # even the baselines can't be compared here; `Account.unequal` has what isn't theirs
        return 0.0
    return error / max(floor or 0.0, UNIT)
