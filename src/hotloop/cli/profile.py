"""`hotloop profile`: where the time of a training step goes, what bounds the step, and what would help."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotloop.cli.options import (
    INTERRUPTED,
    DeviceOption,
    JsonOption,
    ParamOption,
    SetOption,
    axes_of_options,
    console,
    exit_if_failed,
    exit_on_error,
    exit_with_launcher,
    is_data_parallel_default,
    parse_pairs,
    print_json,
    say,
    stdout_for,
    try_write,
)
from hotloop.core.files.atomic_files import check_writable
from hotloop.core.files.source_files import defines_task, file_of_reference, split_reference

if TYPE_CHECKING:
    from hotloop.core.records.profile import Profile
    from hotloop.profiler.base.steps import ProfileSettings

_TASK_OPTIONS = ("plan", "settings", "device", "param", "batch_size", "ranks")


@exit_on_error
def profile(
    file: Annotated[
        str,
        typer.Argument(help="A Task (file.py, file.py:name, package.module:name), or any script.", show_default=False),
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script, after --.", show_default=False)
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(help="Plan of a Task: auto, baseline or a TOML file.", show_default="baseline"),
    ] = None,
    settings: SetOption = None,
    device: DeviceOption = None,
    param: ParamOption = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples in a step, instead of the Task's.")] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Processes that share each step, with --set parallel=...; without --set they share it by "
            "parallel=data.",
            show_default="as many as there are devices",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps to measure.", show_default="60, fewer if these take over 30 s")
    ] = None,
    stop_after: Annotated[
        str | None,
        typer.Option(help="Stop a script after this time, such as 60s: first by Ctrl-C, 60 s later by SIGTERM."),
    ] = None,
    try_remedies: Annotated[
        bool,
        typer.Option(
            "--try",
            help="Race the remedies that a plan can express, or the compiled network of a script, and print the gains.",
        ),
    ] = False,
    time_limit: Annotated[
        str | None,
        typer.Option(
            help="Time limit of the whole profile of a Task with --try, or of the race of a script's network.",
            show_default="30s for the races of --try",
        ),
    ] = None,
    module: Annotated[str | None, typer.Option(help="Show only the operators of this module.")] = None,
    as_module: Annotated[
        bool, typer.Option("-m", help="FILE is the name of a module to run as a script, as with python -m.")
    ] = False,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace of a few steps to this file.")] = None,
    pictures: Annotated[Path | None, typer.Option(help="Write pages with pictures into this folder.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Profile training: where the time goes, what bounds a step, and what would help.

    \b
    hotloop profile examples/fashion.py                     a Task
    hotloop profile examples/fashion.py --try               race the remedies
    hotloop profile examples/fashion.py --ranks 2           two processes that share each step
    hotloop profile train.py -- --epochs 1 --lr 0.1         any PyTorch script with its own arguments
    hotloop profile -m package.train -- --epochs 1          a module, as under python -m
    hotloop profile train.py --try                          measure the gain of compiling its network
    hotloop profile train.py --stop-after 60s --pictures profile

    A file that imports hotloop and defines a Task is profiled as a Task; everything else, and everything with arguments
    behind --, runs as a script, unmodified, as it would alone. Its exit code becomes this command's.
    """
    given: dict[str, Any] = dict(
        plan=plan,
        settings=settings,
        device=device,
        param=param,
        batch_size=batch_size,
        ranks=ranks,
        try_remedies=try_remedies,
    )
    path = file if as_module else _script_path(file, bool(arguments))
    if steps is not None and steps < 1:
        raise typer.BadParameter(f"--steps is {steps}; expected 1 or more")
    for option, output in {"--trace": trace, "--pictures": pictures and pictures / "phases.html"}.items():
        if output is not None:
            check_writable(output, option)  # before the run
    if path is not None:
        refused = [name for name in _TASK_OPTIONS if given[name]]
        if refused:
            option = {"settings": "set"}.get(refused[0], refused[0]).replace("_", "-")
            reason = f"{file} is run as a script: it imports no hotloop, or defines no task"
            raise typer.BadParameter(f"--{option} is for a Task, and {reason}")
        from hotloop.profiler.base.steps import ProfileSettings

        asked = ProfileSettings.of(steps, trace, tries=try_remedies, time_limit=time_limit)
        found = _profile_script(path, arguments or [], asked, stop_after, as_json)
    else:
        if stop_after is not None:
            raise typer.BadParameter("--stop-after ends a script; a Task is run for --steps steps")
        task_profile = _profile_task(file, given, steps, trace, time_limit, as_json)
        if task_profile is None:
            return  # rank 0 prints the result
        found = task_profile
    _show(found, module, pictures, as_json)

    from hotloop.core.records.profile import CTRL_C

    if found.stopped == CTRL_C:
        raise typer.Exit(INTERRUPTED)
    if found.exit_code:
        raise typer.Exit(found.exit_code if found.exit_code > 0 else 128 - found.exit_code)


def _script_path(file: str, arguments: bool) -> Path | None:
    """Returns the script of a reference; None for a Task."""
    where, name = split_reference(file)
    if where == file and Path(file).is_file() and not file.endswith(".py"):
        return Path(file)  # such as a command written in Python
    path = file_of_reference(where)
    if arguments and (path is None or where != file):
        raise typer.BadParameter(f"{file} names a Task, and arguments after -- are for a script; pass -p name=value")
    if path is None or where != file or (not arguments and defines_task(path, name)):
        return None
    return path


def _profile_script(
    path: Path | str, arguments: list[str], settings: ProfileSettings, stop_after: str | None, as_json: bool
) -> Profile:
    from hotloop.core.format import parse_seconds

    stop_after_s = None if stop_after is None else parse_seconds(stop_after, "stop-after")
    stdout = sys.stderr.fileno() if as_json else None

    from hotloop.profiler.profile import profile_script

    return profile_script(
        path, arguments, settings=settings, stop_after_s=stop_after_s, stdout=stdout, progress=_say_first()
    )


def _say_first() -> Callable[[str, float], None]:
    """Returns a progress callback that prints one line: a bar would mix with the script's output."""
    is_reported = False

    def progress(doing: str, share: float) -> None:
        nonlocal is_reported
        if not is_reported and doing.startswith("measuring"):
            is_reported = True
            say("measuring this machine's limits, once")

    return progress


def _profile_task(
    file: str, given: Mapping[str, Any], steps: int | None, trace: Path | None, time_limit: str | None, as_json: bool
) -> Profile | None:
    began, axes = time.monotonic(), axes_of_options(given["settings"], device=given["device"], ranks=given["ranks"])
    parameters = parse_pairs(given["param"] or [])

    from hotloop.core.plan_request import PlanRequest

    wanted = PlanRequest.from_value(given["plan"], axes)  # reports a wrong plan before the import of torch
    if is_data_parallel_default(given["ranks"], wanted.plan):
        axes["parallel"] = "data"
        wanted = PlanRequest.from_value(given["plan"], axes)

    exit_with_launcher()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hotloop reports a worker's end itself
    from hotloop.core.records.profile import CTRL_C
    from hotloop.distributed.join import plan_to_launch
    from hotloop.distributed.launch import launch, local_rank_count, own_command
    from hotloop.distributed.world import World
    from hotloop.profiler import profile as profiler_profile
    from hotloop.task import override_fields
    from hotloop.task_file import load_task

    profiler_profile.refuse_for_ranks(wanted.plan, try_remedies=given["try_remedies"])
    if (ranked := plan_to_launch(given["plan"], axes)) is not None:
        raise typer.Exit(launch(local_rank_count(ranked), own_command(), say, restarts=0)[1])
    overrides = {} if given["batch_size"] is None else {"batch_size": given["batch_size"]}
    with stdout_for(as_json):
        loaded = load_task(file, parameters)  # reports a rank's error before the other ranks wait
        with profiler_profile.join_as_rank(wanted, console) as progress:
            common: dict[str, Any] = dict(overrides=overrides, say=say, progress=progress)
            chosen = profiler_profile.resolve_plan(override_fields(loaded.task, overrides), wanted)
            found = profiler_profile.profile_task(loaded, chosen, steps=steps, trace=trace, keeps=True, **common)
            if given["try_remedies"] and found.stopped != CTRL_C:
                found = profiler_profile.race_remedies(
                    loaded, found, chosen, time_limit=time_limit, began=began, **common
                )
            return found if World.from_group(chosen).is_rank_zero else None


def _show(found: Profile, module: str | None, pictures: Path | None, as_json: bool) -> None:
    from hotloop.report.profile import profile_page, write_charts

    pages: list[Path] | None = []
    unwritten = None
    if pictures is not None:
        pages, unwritten = try_write(lambda: write_charts(found, pictures))
    if as_json:
        print_json({**found.model_dump(), "pages": [str(path) for path in pages or []]})
    else:
        console.print(profile_page(found, module))
        for path in pages or []:
            say(f"picture: {path}")
    exit_if_failed(unwritten)
