"""Results of races, kept in the user's cache folder: one file for each plan of a Task on a machine with its versions.

Only ratios against the plain baseline are kept, since times of races on different days don't compare. What doesn't work
is kept as well, so that nobody tries it again before something has changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pooch
from pydantic import ValidationError

from hotloop.errors import HotloopError
from hotloop.files import write_atomic
from hotloop.plan import BASELINE, Plan
from hotloop.records import Record
from hotloop.verdicts import TRUSTED, Timing, Verdict

_DEPENDS_ON = ("hotloop", "torch", "nvidia_driver")


class Kept(Record):
    """A plan's result in one race.

    Attributes:
        key: what it depends on: Task, machine, versions, and the plan's axes.
        timing: the result; `ratio` is against the baseline, whose own is `baseline`.
    """

    version: int = 1
    key: dict[str, Any]
    timing: Timing
    baseline: Timing

    def run_s(self, steps: int | None) -> float:
        """Seconds that a run of so many steps takes, if the baseline is as fast as in the race; steps alone if None."""
        assert self.baseline.step_ms is not None
        step_ms = self.baseline.step_ms / (self.timing.ratio or 1.0)
        return self.timing.model_copy(update={"step_ms": step_ms}).finishes(steps)


def folder() -> Path:
    """Where this user's results are kept."""
    return Path(pooch.os_cache("hotloop")) / "races"


def remember(verdict: Verdict) -> list[str]:
    """Keeps what a race found; returns a note if that failed, which costs nothing but racing again."""
    base = verdict.plan(verdict.baseline)
    if Plan(**base.plan).with_axes(device="cpu", workers=None) != BASELINE or base.ratio_low is None:
        return []
    where = _about(verdict.fingerprint, verdict.machine, verdict.versions)
    try:
        for timing in verdict.plans:
            if timing.plan:
                path = _path(where, timing.plan)
                kept = Kept(key={**where, "plan": timing.plan}, timing=_with_parity(timing, path), baseline=base)
                write_atomic(path, kept.model_dump_json(indent=2))
    except HotloopError as error:
        return [f"what the race found couldn't be kept: {error.given}"]
    return []


def _with_parity(timing: Timing, path: Path) -> Timing:
    """A race without proofs leaves what was proven before as it is."""
    if timing.parity is not None or timing.failure is not None:
        return timing
    try:
        before = Kept.model_validate_json(path.read_text(encoding="utf-8")).timing
    except (OSError, ValueError):
        return timing
    return timing.model_copy(update={"parity": before.parity, "parity_reason": before.parity_reason})


def recall(fingerprint: str, machine: str, versions: Mapping[str, str]) -> tuple[list[Kept], list[str]]:
    """What was kept for this Task, machine and versions, failures too; and a note for each file that can't be read."""
    where, found, notes = _about(fingerprint, machine, versions), [], []
    for path in sorted(_place(where).glob("*.json")):
        try:
            kept = Kept.model_validate_json(path.read_text(encoding="utf-8"))
            if kept.key != {**where, "plan": kept.timing.plan}:
                raise ValueError("its content is not what its name says")
        except (OSError, ValueError) as error:  # pydantic's ValidationError is a ValueError
            why = "not what hotloop wrote" if isinstance(error, ValidationError) else error
            notes.append(f"the result kept in {path} can't be used ({why}), and is passed over")
            continue
        found.append(kept)
    return found, notes


def best(kept: Sequence[Kept], steps: int | None, accepted: Collection[str] = TRUSTED) -> Kept | None:
    """The plan of an accepted parity that was found faster than the baseline and finishes such a run first; or None."""
    able = [one for one in kept if one.timing.verdict == "faster" and one.timing.parity in accepted]
    finishing = [one for one in able if steps is None or one.run_s(steps) < one.baseline.finishes(steps)]
    return min(finishing, key=lambda one: one.run_s(steps), default=None)


def _about(fingerprint: str, machine: str, versions: Mapping[str, str]) -> dict[str, Any]:
    return {"task": fingerprint, "machine": machine, "versions": {name: versions.get(name) for name in _DEPENDS_ON}}


def _place(where: dict[str, Any]) -> Path:
    return folder() / _digest(where)


def _path(where: dict[str, Any], plan: dict[str, Any]) -> Path:
    return _place(where) / f"{_digest(plan)}.json"


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
