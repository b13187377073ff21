"""Profiles a Task or a script: records steps, measures the machine's limits and load, diagnoses, races remedies."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from hotloop.core.feasibility import violations
from hotloop.core.format import parse_seconds
from hotloop.core.hardware.devices import resolve_device
from hotloop.core.hardware.machine import machine_name, speed_versions
from hotloop.core.hardware.machine_load import is_busy, wait_until_quiet
from hotloop.core.hardware.probe import measure_hardware
from hotloop.core.plan_request import PlanRequest
from hotloop.core.records.profile import HardwareLimits, Profile, Remedy, ThreadUse
from hotloop.core.records.race import Verdict
from hotloop.core.reporter import Say
from hotloop.core.terminal import Terminal
from hotloop.distributed.fork_safety import check_cuda
from hotloop.distributed.join import RankEnv, join_ranks, plan_to_launch
from hotloop.distributed.launch import launch, local_rank_count
from hotloop.distributed.world import World
from hotloop.errors import DeviceError, PlanError, TimeOverError
from hotloop.plan import Plan
from hotloop.profiler.base.steps import DEFAULT_SETTINGS, REMEDY_RACE_S, ProfileFacts, ProfileSettings
from hotloop.profiler.detectors import diagnose
from hotloop.profiler.operator_cost import device_limits, with_limit_shares
from hotloop.profiler.summary import summarize
from hotloop.profiler.task_profile import record_task
from hotloop.report.race import race_progress_bar
from hotloop.scripts.script_process import run_script
from hotloop.task import Task, override_fields
from hotloop.task_file import LoadedTask
from hotloop.tuning.auto import feasibility_facts, list_options
from hotloop.tuning.contenders import RaceSpec
from hotloop.tuning.race import PROVE, Prove, race_loaded

Progress = Callable[[str, float], None]

NO_PLAN = "a script has no plan to change; make the training a Task, and --try races remedies that a plan can express"
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
        plan: for the Task: a `Plan`, a TOML file, `auto` or `baseline`; default the baseline.
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
        if plan is not None:
            raise PlanError("a plan for a script", expected="a Task", fix=NO_PLAN)
        settings = ProfileSettings.of(steps, trace, tries=try_remedies, time_limit=time_limit)
        limit_s = None if stop_after is None else parse_seconds(stop_after, "stop-after")
        with race_progress_bar(console) as moved:
            return profile_script(Path(task), arguments, settings, stop_after_s=limit_s, progress=moved)
    loaded, wanted = LoadedTask(task, None, {}), PlanRequest.from_value(plan)
    refuse_for_ranks(wanted.plan, try_remedies=try_remedies)

    began = time.monotonic()

    def inspect() -> Profile:
        with join_as_rank(wanted, console) as moved:
            chosen = resolve_plan(task, wanted)
            found = profile_task(loaded, chosen, steps=steps, trace=trace, progress=moved)
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


def profile_script(
    path: Path | str,
    arguments: Sequence[str] = (),
    settings: ProfileSettings = DEFAULT_SETTINGS,
    *,
    stop_after_s: float | None = None,
    stdout: int | None = None,
    progress: Progress = lambda doing, share: None,
) -> Profile:
    """Profiles a script; see `profile` and `record_script`."""
    return _diagnose(record_script(path, arguments, settings, stop_after_s=stop_after_s, stdout=stdout), progress)


def profile_task(
    loaded: LoadedTask,
    plan: Plan,
    *,
    overrides: Mapping[str, Any] | None = None,
    steps: int | None = None,
    trace: Path | None = None,
    say: Say = lambda line: None,
    progress: Progress = lambda doing, share: None,
    keeps: bool = False,
) -> Profile:
    """Profiles a loaded Task; see `profile`, and `record_task` for `keeps`.

    Of several ranks, rank 0 returns the diagnosed profile of all, the others their own records.
    """
    task = override_fields(loaded.task, overrides)
    plan = resolve_device(plan)
    wait_until_quiet()
    progress("recording", 0.0)
    source = task.name if loaded.record is None else loaded.record.reference
    recorded = record_task(task, plan, steps=steps, trace=trace, source=source, say=say, keeps=keeps)
    if not World.from_group(plan).is_rank_zero:
        return recorded
    if recorded.ranks:  # cores that one rank leaves idle are used by another
        recorded = _with_notes(recorded.model_copy(update={"threads": None}), [SHARED_LIMITS_NOTE])
    found = _diagnose(recorded, progress)
    update = {
        name: [_with_feasible_axes(one, task, plan) for one in getattr(found, name)]
        for name in ("remedies", "candidates")
    }
    return found.model_copy(update=update)


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
        slowdown = slowdown_notes(recorded.threads) if recorded.device == "cpu" else []
        return {"limits": limits, "threads": with_oversubscription(recorded.threads)}, [*notes, *slowdown]
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
    say: Say = lambda line: None,
    progress: Progress = lambda doing, share: None,
) -> Profile:
    """Races the remedies that a plan can express against `plan`, and returns the profile with the results.

    Args:
        time_limit: for preparing, racing and proving; default `REMEDY_RACE_S` of racing alone.
        began: start of the time limit, by `time.monotonic()`; default now.
    """
    base = resolve_device(plan)
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
    measured = [_with_race_result(one, base, timed) for one in found.candidates]
    won = [one.model_copy(update={"gain": 1 - 1 / one.won[0]}) for one in measured if one.won and one.won[1] > 1]

    found = found.model_copy(
        update={
            "remedies": sorted([*remedies, *won], key=lambda one: (one.note, -one.gain)),
            "candidates": [],
            "advice": [_why_not_won(one) for one in measured if not (one.won and one.won[1] > 1)],
        }
    )
    failures = [f"{timing.name} couldn't be raced: {timing.failure}" for timing in verdict.plans if timing.failure]
    return _with_notes(found, [*failures, *verdict.remarks])


def _with_notes(found: Profile, notes: Sequence[str]) -> Profile:
    return found.model_copy(update={"notes": [*found.notes, *notes]})


def _why_not_won(candidate: Remedy) -> str:
    axes = " ".join(f"{axis}={value}" for axis, value in candidate.axes.items())
    if candidate.won is None:
        return f"Whether {axes} is faster was not measured. hotloop tune finds the fastest plan."
    ratio, low, high = candidate.won
    found = f"raced, it is {ratio:.2f} times as fast ({low:.2f} to {high:.2f})"
    return f"{axes} is no remedy here: {found}. hotloop tune tries other plans."


def _with_race_result(remedy: Remedy, base: Plan, verdict: Verdict) -> Remedy:
    raced = base.with_axes(**remedy.axes).model_dump() if remedy.axes else None
    timing = next((timing for timing in verdict.plans if timing.plan == raced), None)
    if timing is None or timing.ratio is None or timing.ratio_low is None or timing.ratio_high is None:
        return remedy
    proven = f"; its result is {timing.parity}: {timing.parity_reason}" if timing.parity else ""
    won = (timing.ratio, timing.ratio_low, timing.ratio_high)
    evidence = f"{remedy.evidence}{proven}".removeprefix("; ")
    return remedy.model_copy(update={"won": won, "evidence": evidence})


def record_script(
    path: Path | str,
    arguments: Sequence[str] = (),
    settings: ProfileSettings = DEFAULT_SETTINGS,
    *,
    stop_after_s: float | None = None,
    stdout: int | None = None,
) -> Profile:
    """Runs a script to its end and profiles its training steps; see `run_script`.

    After Ctrl-C or SIGTERM the profile has the records until then.

    Raises:
        TaskError: the file doesn't exist.
    """
    wait_until_quiet()
    inside = "hotloop.profiler.script_child:wait_for_torch"
    end = run_script(
        path, arguments, inside=inside, settings=asdict(settings), stop_after_s=stop_after_s, stdout=stdout
    )
    if end.result is None:
        notes, closed = ["the script ended before anything was recorded"], ""
        profile = Profile(source=str(path), steps=0, step_ms=None, notes=notes)
    else:
        facts = ProfileFacts.of(end.result)
        profile, closed = summarize(facts, str(path)), facts.closed
    update = {"exit_code": end.exit_code, "stopped": end.stopped or closed, "seconds": end.seconds}
    return profile.model_copy(update=update)


_NOTABLE_SLOWDOWN = 1.2
"""Smallest reported slowdown: duration of operations over their duration on an idle machine."""

_MATRIX_SIZES = (256, 512)

_ROUNDS = 12

_MAX_S = 2.0


def busy_warning(threads: ThreadUse | None) -> str:
    """Returns the warning that other programs use the cores; empty if they use almost none."""
    if threads is None or not is_busy(threads.others, threads.cores):
        return ""
    free, again = max(1, threads.cores - round(threads.others)), "run again when the machine is quiet"
    if threads.torch > free:
        again = f"set OMP_NUM_THREADS={free} and run again, best when the machine is quiet"
    return (
        f"The machine is busy: other programs kept {threads.others:.1f} of {threads.cores} cores busy. Times are too long, "
        f"and advice that depends on how fast operations are is left out: {again}."
    )


def with_oversubscription(threads: ThreadUse | None) -> ThreadUse | None:
    """Returns the threads, with the measured slowdown if torch has more threads than the machine has cores."""
    if threads is None or threads.torch <= threads.cores:
        return threads
    return threads.model_copy(update={"slower": oversubscription(threads.torch, threads.cores)})


def slowdown_notes(threads: ThreadUse | None) -> list[str]:
    """Returns a note with the current slowdown if torch's threads wait for cores that other programs use."""
    if threads is None or threads.torch > threads.cores:
        return []
    free = max(1, threads.cores - round(threads.others))
    slower = oversubscription(threads.torch, free) if threads.torch > free else 1.0
    if slower < _NOTABLE_SLOWDOWN:
        return []
    return [
        f"other programs kept {threads.others:.1f} of {threads.cores} cores busy, and the pieces of an operation wait for "
        f"each other: cut for {threads.torch} threads, operations take {slower:.1f} times as long as with {free} while "
        f"they run (OMP_NUM_THREADS={free}); times and limits are those of a shared machine"
    ]


def oversubscription(threads: int, cores: int) -> float:
    """Returns the slowdown of operations with `threads` threads relative to one per core or one alone; at least 1.

    The faster of the two counts: on busy cores that is one thread. The result is the median of many rounds, within
    2 s.
    """
    before = torch.get_num_threads()
    ratios: list[float] = []
    until = time.monotonic() + _MAX_S
    try:
        with torch.inference_mode():
            inputs = [torch.rand(size, size) for size in _MATRIX_SIZES]
            while len(ratios) < _ROUNDS and (not ratios or time.monotonic() < until):
                one, few, many = (_time_matmuls(inputs, count) for count in (1, cores, threads))
                ratios.append(many / min(one, few))
    finally:
        torch.set_num_threads(before)
    return max(1.0, statistics.median(ratios))


def _time_matmuls(inputs: list[torch.Tensor], threads: int) -> float:
    torch.set_num_threads(threads)
    for one in inputs:  # the first operation wakes the threads
        one @ one
    began = time.perf_counter()
    for one in inputs:
        for _ in range(3):
            (one @ one).relu()
    return time.perf_counter() - began
