"""Results of races and searches in the user's cache folder, and what they say about the plans of a run.

One file for each plan, Task, machine and versions. Ratios to the plain baseline are compared, since times of different
days aren't comparable. Permanent failures are cached, too; a lack of memory, disk space or a compiler is not. Further
files count the trained steps of the Task, and store its searches that ended with the baseline.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.files.user_folders import cache_folder, key_digest
from hotloop.core.number_formats import REDUCED
from hotloop.core.records.race import TRUSTED_CLASSES, Timing, Verdict
from hotloop.core.records.training import Record
from hotloop.errors import HotloopError, PlanError
from hotloop.plan import BASELINE, Plan
from hotloop.tuning.economics import PROOF_STEPS, Budget, saved_steps
from hotloop.tuning.races.statistics import MIN_PAIRS

_DEPENDS_ON = ("hotloop", "torch", "nvidia_driver", "compiler", "allocator")

_UNLESS_DEFAULT = ("switches",)
"""Part of the key, if not torch's defaults."""

_FILE_TIME_RESOLUTION_S = 2.0
"""Seconds of the file system's time resolution, at most."""

_MAX_FUTURE_RUNS = 10
"""Most expected future runs, so that a short run doesn't wait for the sake of long earlier runs."""

_LONGER_RUN_FACTOR = 1.5
"""Factor of a longer run that is worth another search."""


class CachedRace(Record):
    """A plan's result in one race.

    Attributes:
        key: Task, machine, versions, and the axes of plan and baseline.
        timing, baseline: of the plan, and of the race's baseline.
        compiled: files without which a compilation takes as long as the first.
    """

    version: int = 1
    key: dict[str, Any]
    timing: Timing
    baseline: Timing
    compiled: list[str] = Field(default_factory=list)

    @property
    def is_compiled(self) -> bool:
        """Whether the compiled files still exist."""
        return bool(self.compiled) and all(map(os.path.isfile, self.compiled))

    def as_verdict(self, task: str, steps: int | None) -> Verdict:
        """Returns the result as a race of two plans, which the plan wins."""
        return Verdict(
            task=task,
            fingerprint=self.key["task"],
            plans=[self.baseline, self.timing],
            baseline=self.baseline.name,
            winner=self.timing.name,
            steps=steps,
            notes=["a stored result of an earlier search: this run raced and proved nothing"],
            machine=self.key["machine"],
            versions={name: str(version) for name, version in self.key["versions"].items() if version is not None},
            seconds=0.0,
        )

    def saves_s(self, steps: int | None, step_ms: float) -> float:
        """Returns the seconds that the plan saves, startup included, in a run of `steps` steps; in a step if None.

        Args:
            step_ms: of the baseline.
        """
        baseline = self.baseline.model_copy(update={"step_ms": step_ms})
        own = self.timing.model_copy(update={"step_ms": step_ms / (self.timing.ratio or 1.0)})
        return baseline.finishes(steps) - own.finishes(steps)


def races_folder() -> Path:
    return cache_folder() / "races"


def save_races(verdict: Verdict) -> list[str]:
    """Caches the results of a race unless the machine was busy; returns a note on failure."""
    base = verdict.plan(verdict.baseline)
    if base.as_plan.with_axes(device="cpu", workers=None) != BASELINE or base.step_ms is None or verdict.busy:
        return []
    where = _identity(verdict.fingerprint, verdict.machine, verdict.versions)
    try:
        for timing in map(_without_failed_proof, verdict.plans):
            timing = _with_interval(timing)
            if timing.plan and _is_worth_caching(timing):
                key, path = _key(where, timing, base), _path(where, timing, base)
                compiled = _compiled_files(timing, path.stem, time.time() - verdict.seconds)
                _save(CachedRace(key=key, timing=timing, baseline=base, compiled=compiled), path)
    except HotloopError as error:
        return [f"the result of the race couldn't be stored: {error.given}"]
    return []


def _compiled_files(timing: Timing, name: str, since: float) -> list[str]:
    """Returns the files of a compilation: packages used since the race began, or a file in torch's cache."""
    if timing.compile_warm_s is None:
        return []
    if timing.plan.get("compile") == "package":
        packages = (races_folder().parent / "packages").glob("*.pt2")
        return [str(path) for path in packages if _last_used_s(path) >= since - _FILE_TIME_RESOLUTION_S]
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # already imported by the compilation

    mark = Path(cache_dir()) / "hotloop" / name
    try:
        write_atomic(mark, "")
    except HotloopError:
        return []
    return [str(mark)]


def _last_used_s(path: Path) -> float:
    """Returns the time of the last use; 0 if another process removed the package."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _without_failed_proof(timing: Timing) -> Timing:
    """Returns the Timing without a parity that only says that memory or disk space was short."""
    if timing.failure is not None or not timing.short_of_memory:
        return timing
    return timing.model_copy(update={"parity": None, "parity_reason": None, "states": 0, "short_of_memory": False})


def _with_interval(timing: Timing) -> Timing:
    """Returns the Timing without a verdict that has no interval: few windows don't decide."""
    if timing.ratio_low is not None:
        return timing
    return timing.model_copy(update={"verdict": None, "left_out": False})


def _is_worth_caching(timing: Timing) -> bool:
    """Whether the Timing has a verdict, a parity or a permanent failure."""
    if timing.failure is not None:
        return not timing.short_of_memory
    return timing.verdict is not None or timing.left_out or timing.parity is not None


def _save(new: CachedRace, path: Path) -> None:
    """Writes a result merged with the earlier one."""
    try:
        before = CachedRace.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = new
    kept = new if before.key != new.key else _merge(before, new)
    write_atomic(path, kept.model_dump_json(indent=2))


def _merge(before: CachedRace, new: CachedRace) -> CachedRace:
    """Returns the newer times, unless only the earlier ones are decided; and the newer proof."""
    if before.timing.failure is not None or new.timing.failure is not None:
        return new
    figures = before if _certainty(new.timing) < _certainty(before.timing) else new
    settled = before.timing.parity not in (None, "unproven") and new.timing.parity not in ("unproven", "broken")
    shorter = settled and new.timing.states < before.timing.states
    proof = before.timing if new.timing.parity is None or shorter else new.timing
    cold = [one.timing.compile_s for one in (before, new) if one.timing.compile_s is not None]
    known: dict[str, Any] = {"parity": proof.parity, "parity_reason": proof.parity_reason, "states": proof.states}
    known["compile_s"] = max(cold, default=None)  # later compilations used torch's cache
    return figures.model_copy(update={"timing": figures.timing.model_copy(update=known)})


def _certainty(timing: Timing) -> int:
    return 2 if timing.decided else 1 if timing.verdict is not None or timing.left_out else 0


def load_races(fingerprint: str, machine: str, versions: Mapping[str, str]) -> tuple[list[CachedRace], list[str]]:
    """Returns the cached results for a Task, machine and versions, and a note for each invalid file."""
    where, found, notes = _identity(fingerprint, machine, versions), [], []
    for path in sorted(_race_folder(where).glob("*.json")):
        try:
            kept = CachedRace.model_validate_json(path.read_text(encoding="utf-8"))
            if kept.key != _key(where, kept.timing, kept.baseline):
                raise ValueError("its content does not match its name")
            _ = kept.timing.as_plan, kept.baseline.as_plan  # another version may have other axes
        except (OSError, ValueError, PlanError) as error:  # pydantic's ValidationError is a ValueError
            why = "not what hotloop wrote" if isinstance(error, ValidationError) else error
            notes.append(f"the result stored in {path} can't be used ({why}), and is ignored")
            continue
        found.append(kept if kept.is_compiled else _without_compiled_files(kept))
    return found, notes


def _without_compiled_files(kept: CachedRace) -> CachedRace:
    return kept.model_copy(update={"timing": kept.timing.model_copy(update={"compile_warm_s": None})})


def best_race(
    kept: Sequence[CachedRace], steps: int | None, accepted: Collection[str] = TRUSTED_CLASSES, to_come: int = 0
) -> CachedRace | None:
    """Returns the plan of an accepted parity that finishes a run of `steps` steps before the baseline and the others.

    All ratios refer to the median time of the measured baselines.

    Args:
        to_come: steps of runs that may follow, which also profit from a new compilation.
    """
    able = _acceptable(kept, steps, accepted)
    wins = {number: one.saves_s(*_expected_run(one, able, steps, to_come)) for number, one in enumerate(able)}
    first = max(wins, key=lambda number: wins[number], default=None)
    return able[first] if first is not None and wins[first] > 0 else None


def unprofitable_plans(
    kept: Sequence[CachedRace], steps: int | None, accepted: Collection[str] = TRUSTED_CLASSES, to_come: int = 0
) -> list[Plan]:
    """Returns plans that are faster and proven, and whose startup takes longer than they save."""
    able = _acceptable(kept, steps, accepted)
    return [one.timing.as_plan for one in able if one.saves_s(*_expected_run(one, able, steps, to_come)) <= 0]


def _acceptable(kept: Sequence[CachedRace], steps: int | None, accepted: Collection[str]) -> list[CachedRace]:
    faster = [one for one in kept if one.timing.verdict == "faster" and one.timing.parity in accepted]
    return [one for one in faster if one.timing.proven_for(steps)]


def _expected_run(
    one: CachedRace, able: Sequence[CachedRace], steps: int | None, to_come: int
) -> tuple[int | None, float]:
    """Returns steps and the baseline's `step_ms`; future steps count if a compilation is shorter than this run."""
    step_ms = statistics.median(each.baseline.step_ms or 0.0 for each in able)
    compile_s = one.timing.compile_s if one.timing.compile_warm_s is None else None
    if steps is not None and compile_s and compile_s < steps * step_ms / 1e3:
        return steps + to_come, step_ms
    return steps, step_ms


def load_trained_steps(fingerprint: str, machine: str, versions: Mapping[str, str], device: str) -> int:
    """Returns the trained steps of this Task on the device since the last reset; 0 without a file."""
    try:
        return max(0, int(_steps_file(_identity(fingerprint, machine, versions), device).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return 0


def save_trained_steps(
    fingerprint: str, machine: str, versions: Mapping[str, str], device: str, steps: int
) -> list[str]:
    """Stores the steps; returns a note on failure. Of two runs that end at once, one may be lost."""
    try:
        write_atomic(_steps_file(_identity(fingerprint, machine, versions), device), f"{steps}\n")
    except HotloopError as error:
        return [f"the run's steps couldn't be stored for later runs: {error.given}"]
    return []


def _steps_file(where: dict[str, Any], device: str) -> Path:
    return _race_folder(where) / f"steps-{device.partition(':')[0]}"


def _identity(fingerprint: str, machine: str, versions: Mapping[str, str]) -> dict[str, Any]:
    known = {name: versions.get(name) for name in _DEPENDS_ON}
    known |= {name: versions[name] for name in _UNLESS_DEFAULT if name in versions}
    return {"task": fingerprint, "machine": machine, "versions": known}


def _race_folder(where: dict[str, Any]) -> Path:
    return races_folder() / key_digest(where)


def _key(where: dict[str, Any], timing: Timing, baseline: Timing) -> dict[str, Any]:
    return {**where, "plan": timing.plan, "baseline": baseline.plan}


def _path(where: dict[str, Any], timing: Timing, baseline: Timing) -> Path:
    return _race_folder(where) / f"{key_digest(_key(where, timing, baseline))}.json"


def accepted_parities(asked: Plan) -> tuple[str, ...]:
    """Returns the parity classes that a winner may have; `reduced-precision` if the user's plan reduces it."""
    return (*TRUSTED_CLASSES, "reduced-precision") if asked.precision in REDUCED else TRUSTED_CLASSES


def expected_future_steps(trained: int, steps: int | None) -> int:
    """Returns the steps of runs that may follow a run of `steps` steps: as many as there were (the ski rental rule)."""
    return 0 if steps is None else min(max(0, trained), _MAX_FUTURE_RUNS * steps)


@dataclass(frozen=True)
class RaceHistory:
    """Earlier races of a Task with the baseline of this run.

    Attributes:
        races: their results.
        steps: that remain in this run; None if unknown.
        future_steps: of runs that may follow, which profit from a new compilation, too.
        accepted: parity classes that a plan may have.
    """

    races: Sequence[CachedRace] = ()
    steps: int | None = None
    future_steps: int = 0
    accepted: Collection[str] = TRUSTED_CLASSES

    @property
    def best(self) -> CachedRace | None:
        """The proven plan that finishes this run first; None if the baseline does."""
        return best_race(self.races, self.steps, self.accepted, self.future_steps)

    def _timing(self, plan: Plan) -> Timing | None:
        return next((one.timing for one in reversed(self.races) if one.timing.as_plan == plan), None)

    def why_refused(self, plan: Plan) -> str:
        """Returns why a plan is excluded; empty if it isn't."""
        timing = self._timing(plan)
        if timing is not None and timing.parity == "broken":
            return "it was found broken"
        return "it was found slower than the baseline" if timing is not None and timing.behind else ""

    def has_lost(self, plan: Plan) -> bool:
        """Whether a race found the plan no faster than the baseline."""
        timing = self._timing(plan)
        return timing is not None and timing.failure is None and (timing.behind or timing.verdict == "no difference")

    def why_not_again(self, plan: Plan, eager: Plan) -> str:
        """Returns why a compiled plan isn't tried again beside an eager plan; empty if it may be."""
        timing, other = self._timing(plan), self._timing(eager)
        if timing is None:
            return ""
        if plan in unprofitable_plans(self.races, self.steps, self.accepted, self.future_steps):
            return "it is faster and proven, and takes longer to start than it saves"
        if timing.failure is not None:
            return f"it failed before ({timing.failure})"
        if timing.parity is not None and timing.parity not in self.accepted:
            return f"it was found {timing.parity}: {timing.parity_reason}"
        ratio, beside = timing.ratio or 0.0, (None if other is None else other.ratio) or 1.0
        if (timing.decided or timing.left_out) and ratio <= beside:
            return "it was raced before, and isn't faster"
        if timing.verdict == "no difference" and timing.windows >= MIN_PAIRS:
            return "it was raced before for as long as a search races, and isn't clearly faster"
        steps = None if self.steps is None else self.steps + self.future_steps
        unproven = timing.verdict == "faster" and timing.parity is None
        if unproven and saved_steps(steps, timing.gain, beside) <= PROOF_STEPS:
            return "it was raced before, and its proof takes longer than it saves"
        return ""


class FailedSearch(Record):
    """A search without a better plan.

    Attributes:
        key: Task, machine, versions and the axes that are set.
        steps: of the run; None for a stream.
        step_s: seconds of the baseline's step.
        time_limit_s: the user's; None without one.
        left_open: whether the plan of the rules is undecided.
    """

    version: int = 1
    key: dict[str, Any]
    steps: int | None
    step_s: float
    time_limit_s: float | None
    left_open: bool

    def covers(self, steps: int | None) -> bool:
        """Whether a search for a run of `steps` steps would have no more time."""
        if self.time_limit_s is not None:
            return self.time_limit_s >= Budget.of(self.step_s, steps, None).racing_s
        if steps is None or self.steps is None:
            return steps == self.steps
        return steps <= _LONGER_RUN_FACTOR * self.steps


def search_key(fingerprint: str, machine: str, versions: Mapping[str, str], axes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the key of a search; `axes` are those that are set, with the device."""
    where = {"task": fingerprint, "machine": machine, "versions": dict(versions)}
    return {**where, "axes": dict(sorted(axes.items()))}


def save_failed_search(search: FailedSearch) -> None:
    """Caches a search; on failure the next one searches again."""
    with suppress(HotloopError):
        write_atomic(_search_path(search.key), search.model_dump_json(indent=2))


def delete_failed_search(key: dict[str, Any]) -> None:
    with suppress(OSError):
        _search_path(key).unlink(missing_ok=True)


def load_failed_search(key: dict[str, Any]) -> FailedSearch | None:
    """Returns the failed search with this key; None without a valid one."""
    try:
        found = FailedSearch.model_validate_json(_search_path(key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if found.key == json.loads(json.dumps(key)) else None


def _search_path(key: dict[str, Any]) -> Path:
    return races_folder().parent / "searches" / f"{key_digest(key)}.json"
