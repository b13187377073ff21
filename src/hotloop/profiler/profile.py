"""Profiles a Task or a script: records steps, measures the machine's limits, diagnoses, races remedies."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from hotloop.core.feasibility.violations import violations
from hotloop.core.format import parse_seconds
from hotloop.core.hardware.devices import resolve_device
from hotloop.core.hardware.machine_load import wait_until_quiet
from hotloop.core.hardware.probe import measure_hardware
from hotloop.core.hardware.versions import machine_name, speed_versions
from hotloop.core.plan_request import PlanRequest
from hotloop.core.records.profile import HardwareLimits, Profile, Remedy
from hotloop.core.records.race import Verdict
from hotloop.core.reporter import Report
from hotloop.core.terminal import Terminal
from hotloop.distributed.fork_safety import check_cuda
from hotloop.distributed.join import join_ranks, plan_to_launch
from hotloop.distributed.launch import launch, local_rank_count
from hotloop.distributed.process_group import RankEnv
from hotloop.distributed.world import World
from hotloop.errors import DeviceError, PlanError, TimeOverError
from hotloop.plan import Plan
from hotloop.profiler.busy_machine import busy_warning, slowdown_notes, with_oversubscription
from hotloop.profiler.costs.roofline import device_limits, with_limit_shares
from hotloop.profiler.detectors import diagnose
from hotloop.profiler.script import profile_script
from hotloop.profiler.task_profile import profile_task
from hotloop.report.race import race_progress_bar
from hotloop.task import Task, override_fields
from hotloop.task_file import LoadedTask
from hotloop.tuning.auto import feasibility_facts, list_options
from hotloop.tuning.contenders import RaceSpec
from hotloop.tuning.race import PROVE, Prove, race_loaded

Progress = Callable[[str, float], None]

UNTRIED_TORCH = (
    "only a race measures whether PyTorch takes less time for this step: --try, or hotloop race --plans arrays,auto"
)
NO_PLAN = "a script has no plan to change; make the training a Task, and --try races remedies that a plan can express"
REMEDY_RACE_S = 30.0
"""Seconds for racing remedies, or for compiling and racing a script's network, without a time limit."""

SHARED_LIMITS_NOTE = "limits are those of the whole machine, which the ranks on it share"


def profile(
    task: Task | str | Path,
    arguments: Sequence[str] = (),
    *,
    plan: Plan | str | Path | None = None,
    steps: int | None = None,
    stop_after: str | None = None,
    trace: Path | None = None,
    try_remedies: bool = False,
    time_limit: str | None = None,
    progress: bool = True,
) -> Profile:
    """Profiles training steps: where the time goes, what bounds it, and what would help.

    Args:
        task: a Task, or the path of any Python script that trains; the script runs as it would alone.
        arguments: the script's own.
        plan: for the Task: a `Plan`, a TOML file, `auto`, `baseline` or `arrays`; default the baseline.
            A plan for several ranks starts them as forks of this process.
        steps: number of measured steps; None for 60, fewer if these would take over 30 s.
        stop_after: duration such as `60s` after which the script is stopped; default at its end.
        trace: a file for the Chrome trace of a few steps.
        try_remedies: race the remedies that a plan can express; for a script, race its network compiled against eager.
        time_limit: for a Task's profile with its races, or for the race of a script's network; default 30 s of racing.
        progress: show a progress bar.

    Raises:
        PlanError: a plan for a script.
        TaskError: arguments for a Task; or the script doesn't exist.
        HotloopError: the Task can't run under the plan.
    """
    console = Terminal() if progress else Terminal(quiet=True)
    if not isinstance(task, Task):
        refuse_for_script(plan=plan is not None)
        try_s = None
        if try_remedies:
            try_s = REMEDY_RACE_S if time_limit is None else parse_seconds(time_limit, "time-limit")
        limit_s = None if stop_after is None else parse_seconds(stop_after, "stop-after")
        with race_progress_bar(console) as moved:
            return profile_and_diagnose_script(
                Path(task), arguments, steps=steps, stop_after_s=limit_s, trace=trace, try_s=try_s, progress=moved
            )
    loaded, wanted = LoadedTask(task, None, {}), PlanRequest.from_value(plan)
    refuse_for_ranks(wanted.plan, try_remedies=try_remedies)

    began = time.monotonic()

    def inspect() -> Profile:
        with join_as_rank(wanted, console) as moved:
            chosen = resolve_plan(task, wanted)
            found = profile_and_diagnose_task(loaded, chosen, steps=steps, trace=trace, progress=moved)
            if not try_remedies:
                return found
            return race_remedies(loaded, found, chosen, time_limit=time_limit, began=began, progress=moved)

    if (ranked := plan_to_launch(plan, {})) is None:
        return inspect()
    check_cuda(ranked)
    return _profile_forked_ranks(local_rank_count(ranked), inspect)


@contextmanager
def join_as_rank(wanted: PlanRequest, console: Terminal) -> Iterator[Progress]:
    """Joins the other ranks, if any; rank 0 shows the progress."""

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    with (
        join_ranks(wanted.plan, say, wanted.plan.ranks) as ranks,
        race_progress_bar(console if ranks.world.is_rank_zero else Terminal(quiet=True)) as moved,
    ):
        yield moved


def _profile_forked_ranks(ranks: int, inspect: Callable[[], Profile]) -> Profile:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "profile.json"

        def entry() -> None:
            found = inspect()
            if (rank := RankEnv.from_env()) is not None and rank.rank == 0:
                file.write_text(found.model_dump_json(), encoding="utf-8")

        launch(ranks, entry, lambda line: None, restarts=0)
        if not file.exists():
            raise KeyboardInterrupt  # the ranks received Ctrl-C
        return Profile.model_validate_json(file.read_text(encoding="utf-8"))


def resolve_plan(task: Task, wanted: PlanRequest) -> Plan:
    """Returns the requested plan; for `auto`, its first choice without compilation, which pays in long runs only."""
    if not wanted.is_auto:
        return wanted.plan
    return list_options(task, wanted.plan).uncompiled[0].plan


def refuse_for_script(*, plan: bool) -> None:
    """Raises PlanError if a plan is given for a script."""
    if plan:
        raise PlanError("a plan for a script", expected="a Task", fix=NO_PLAN)


def refuse_for_ranks(plan: Plan, *, try_remedies: bool) -> None:
    """Raises PlanError if an option needs one process, or ranks of this machine."""
    if plan.parallel == "async":
        raise PlanError(
            "a profile of parallel=async, whose server and workers take no common steps",
            expected="steps of one process, or of ranks that share each step",
            fix="leave parallel out: a worker computes its gradients as one process does",
        )
    if plan.ranked and plan.workforce == "ray":
        raise PlanError(
            f"a profile of parallel={plan.parallel} with workforce=ray",
            expected="ranks of this machine",
            fix="use workforce=processes",
        )
    if plan.ranked and try_remedies:
        raise PlanError(
            f"--try with parallel={plan.parallel}; races compare plans of one process",
            expected="a plan of one process",
            fix="leave out --try, and compare by training: each epoch's line has its samples/s",
        )


def profile_and_diagnose_script(
    path: Path | str,
    arguments: Sequence[str] = (),
    *,
    steps: int | None = None,
    stop_after_s: float | None = None,
    stdout: int | None = None,
    trace: Path | None = None,
    try_s: float | None = None,
    progress: Progress = lambda doing, share: None,
) -> Profile:
    """Profiles a script; see `profile` and `profile_script`."""
    options: dict[str, Any] = dict(steps=steps, stop_after_s=stop_after_s, stdout=stdout, trace=trace, try_s=try_s)
    return _diagnose(profile_script(path, arguments, **options), progress)


def profile_and_diagnose_task(
    loaded: LoadedTask,
    plan: Plan,
    *,
    overrides: Mapping[str, Any] | None = None,
    steps: int | None = None,
    trace: Path | None = None,
    say: Report = lambda line: None,
    progress: Progress = lambda doing, share: None,
    keeps: bool = False,
) -> Profile:
    """Profiles a loaded Task; see `profile`, and `profile_task` for `keeps`.

    Of several ranks, rank 0 returns the diagnosed profile of all, the others their own records.
    """
    task = override_fields(loaded.task, overrides)
    plan = resolve_device(plan)
    wait_until_quiet()
    progress("recording", 0.0)
    source = task.name if loaded.record is None else loaded.record.reference
    recorded = profile_task(task, plan, steps=steps, trace=trace, source=source, say=say, keeps=keeps)
    if not World.from_group(plan).is_rank_zero:
        return recorded
    if recorded.ranks:  # cores that one rank leaves idle are used by another
        recorded = _with_notes(recorded.model_copy(update={"threads": None}), [SHARED_LIMITS_NOTE])
    found = _diagnose(recorded, progress)
    update = {
        name: [_with_feasible_axes(one, task, plan) for one in getattr(found, name)]
        for name in ("remedies", "candidates")
    }
    return _with_notes(found.model_copy(update=update), [] if plan.engine == "eager" else [UNTRIED_TORCH])


def _diagnose(recorded: Profile, progress: Progress) -> Profile:
    update: dict[str, Any] = {"machine": machine_name(), "versions": speed_versions() | recorded.versions}
    if recorded.step_ms is None and not recorded.operators:
        return recorded.model_copy(update=update)
    limits, notes = _measure_limits(recorded, progress)
    busy = busy_warning(limits.get("threads", recorded.threads)) if recorded.device == "cpu" else ""
    profile = recorded.model_copy(update=update | limits | {"busy": busy})
    return diagnose(with_limit_shares(_with_notes(profile, notes)))


def _measure_limits(recorded: Profile, progress: Progress) -> tuple[dict[str, Any], list[str]]:
    """Returns the machine's limits and notes; a profile without limits is still valid."""
    try:
        limits, notes = _cached_limits(recorded.device, progress)
        eager = recorded.engine == "eager"
        threads = with_oversubscription(recorded.threads) if eager else recorded.threads
        slowdown = slowdown_notes(recorded.threads) if eager and recorded.device == "cpu" else []
        return {"limits": limits, "threads": threads}, [*notes, *slowdown]
    except DeviceError:
        return {}, [f"limits of {recorded.device} are unknown: hotloop can't measure such a device"]
    except KeyboardInterrupt:
        return {}, ["limits of this machine are unknown: Ctrl-C ended the measurement"]


def _cached_limits(device: str, progress: Progress) -> tuple[HardwareLimits, list[str]]:
    hardware = measure_hardware(
        device, progress=lambda figure, done, of: progress(f"measuring this machine: {figure}", done / of)
    )
    found = hardware.device(device)
    busy = device == "cpu" and bool(hardware.busy)
    limits = HardwareLimits() if found is None else device_limits(found).model_copy(update={"busy": busy})
    return limits, [*hardware.notes, *filter(None, [hardware.busy])]


def _with_feasible_axes(remedy: Remedy, task: Task, plan: Plan) -> Remedy:
    """Removes axes that the plan has already, or that the Task can't run with."""
    if not remedy.axes:
        return remedy
    wanted = plan.with_axes(**remedy.axes)
    facts, hardware = feasibility_facts(task, plan)
    if wanted == plan or violations(wanted, facts, hardware):
        return remedy.model_copy(update={"axes": {}})
    return remedy


def race_remedies(
    loaded: LoadedTask,
    found: Profile,
    plan: Plan,
    *,
    overrides: Mapping[str, Any] | None = None,
    time_limit: str | None = None,
    began: float | None = None,
    prove: Prove | None = PROVE,
    say: Report = lambda line: None,
    progress: Progress = lambda doing, share: None,
) -> Profile:
    """Races the remedies that a plan can express against `plan`, and returns the profile with the results.

    Args:
        time_limit: for preparing, racing and proving; default `REMEDY_RACE_S` of racing alone.
        began: start of the time limit, by `time.monotonic()`; default now.
    """
    base = resolve_device(plan)
    found = found.model_copy(update={"remedies": [*found.remedies, *_torch_remedies(base)]})
    asked = [one for one in [*found.remedies, *found.candidates] if one.axes]
    plans = list(dict.fromkeys(base.with_axes(**one.axes) for one in asked))
    if not plans:
        return _with_notes(found, ["none of the remedies can be expressed by a plan"])
    deadline = RaceSpec(plans, base, time_limit=time_limit).deadline(time.monotonic() if began is None else began)
    # A better plan is wanted: results of earlier races may not replace the race.
    alone, contest = replace(loaded, record=None), RaceSpec(plans, base)
    options: dict[str, Any] = dict(overrides=overrides, prove=prove, say=say, progress=progress)
    try:
        verdict = race_loaded(alone, contest, deadline=deadline, racing_s=REMEDY_RACE_S, **options)
    except TimeOverError as over:
        return _with_notes(found, [f"no remedy was raced: {over.given}"])
    timed = verdict.model_copy(update={"plans": []}) if verdict.busy else verdict
    remedies = [_with_race_result(one, base, timed) for one in found.remedies]
    lost = [one for one in remedies if "engine" in one.axes and (one.won is None or one.won[1] <= 1)]
    open_remedies = [one for one in remedies if one not in lost]
    measured = [_with_race_result(one, base, timed) for one in found.candidates]
    won = [one.model_copy(update={"gain": 1 - 1 / one.won[0]}) for one in measured if one.won and one.won[1] > 1]

    found = found.model_copy(
        update={
            "remedies": sorted([*open_remedies, *won], key=lambda one: (one.note, -one.gain)),
            "candidates": [],
            "advice": [_why_not_won(one) for one in measured if not (one.won and one.won[1] > 1)],
            "notes": [note for note in found.notes if note != UNTRIED_TORCH],
        }
    )
    failures = [f"{timing.name} couldn't be raced: {timing.failure}" for timing in verdict.plans if timing.failure]
    return _with_notes(found, [*map(_why_lost, lost), *failures, *verdict.remarks])


def _with_notes(found: Profile, notes: Sequence[str]) -> Profile:
    return found.model_copy(update={"notes": [*found.notes, *notes]})


def _why_not_won(candidate: Remedy) -> str:
    axes = " ".join(f"{axis}={value}" for axis, value in candidate.axes.items())
    if candidate.won is None:
        return f"Whether {axes} is faster was not measured. hotloop tune finds the fastest plan."
    ratio, low, high = candidate.won
    found = f"raced, it is {ratio:.2f} times as fast ({low:.2f} to {high:.2f})"
    return f"{axes} is no remedy here: {found}. hotloop tune tries other plans."


def _torch_remedies(base: Plan) -> list[Remedy]:
    if base.engine == "eager":
        return []
    what = "the step is written out in array operations"
    return [Remedy(cause=what, where="", remedy="let PyTorch compute it", gain=0.0, axes={"engine": "eager"})]


def _why_lost(remedy: Remedy) -> str:
    if remedy.won is None:
        return "whether PyTorch (engine=eager) takes less time for the step couldn't be raced"
    ratio, low, high = remedy.won
    return f"PyTorch (engine=eager) isn't faster here: {ratio:.2f} times as fast ({low:.2f} to {high:.2f})"


def _with_race_result(remedy: Remedy, base: Plan, verdict: Verdict) -> Remedy:
    raced = base.with_axes(**remedy.axes).model_dump() if remedy.axes else None
    timing = next((timing for timing in verdict.plans if timing.plan == raced), None)
    if timing is None or timing.ratio is None or timing.ratio_low is None or timing.ratio_high is None:
        return remedy
    proven = f"; its result is {timing.parity}: {timing.parity_reason}" if timing.parity else ""
    won = (timing.ratio, timing.ratio_low, timing.ratio_high)
    gain = max(0.0, 1 - 1 / timing.ratio) if "engine" in remedy.axes else remedy.gain
    evidence = f"{remedy.evidence}{proven}".removeprefix("; ")
    return remedy.model_copy(update={"won": won, "gain": gain, "evidence": evidence})
