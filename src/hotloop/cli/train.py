"""`hotloop train`: trains a Task, or continues a run."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hotloop.core.callback import Callback
    from hotloop.plan import Plan
    from hotloop.report.progress import TrainingDisplay
    from hotloop.task_file import LoadedTask
    from hotloop.tuning.run_context import RunContext

from hotloop.cli.options import (
    JsonOption,
    ParamOption,
    SetOption,
    TrustOption,
    axes_of_options,
    console,
    exit_on_error,
    exit_with_launcher,
    is_data_parallel_default,
    launched_ranks,
    parse_pairs,
    print_json,
    say,
    stdout_for,
)
from hotloop.core.files.source_files import file_of_reference, split_reference


@exit_on_error
def train(
    task: Annotated[
        str | None,
        typer.Argument(
            help="file.py, file.py:name or package.module:name; the name is `task` if left out.", show_default=False
        ),
    ] = None,
    run: Annotated[Path | None, typer.Option(help="New folder for the run; default runs/<name>-<date>-<time>.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue this run exactly where it was stopped or killed.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data, instead of the Task's.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples in a step, instead of the Task's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random, instead of the Task's.")] = None,
    param: ParamOption = None,
    plan: Annotated[
        str | None,
        typer.Option(
            help="Plan of the training: auto, baseline (eager), a TOML file, or replay:RUN.",
            show_default="a stored plan or the rules', with --set the baseline, or the run's own",
        ),
    ] = None,
    settings: SetOption = None,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="First find the fastest plan that is proven equal, unless a result is stored."),
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, mps, xpu; default the accelerator, else cpu.")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that load samples of a map-style data set.")] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            help="Processes that share the training, with --set parallel=...; without --set they share it by "
            "parallel=data.",
            show_default="as many as there are devices",
        ),
    ] = None,
    rank_timeout: Annotated[
        str | None,
        typer.Option(
            help="Longest time that ranks wait for each other, such as 5m; after it the run ends with the place of "
            "each rank.",
            show_default="60s, or 20 times the longest step",
        ),
    ] = None,
    stop_after: Annotated[
        str | None, typer.Option(help="Stop cleanly after this time, such as 90s, 5m or 11h.")
    ] = None,
    checkpoint_every: Annotated[
        str | None,
        typer.Option(
            help="auto (at most 1 % of the time), a number of steps, or a time such as 5m.", show_default="auto"
        ),
    ] = None,
    rehearse: Annotated[
        str,
        typer.Option(
            help="How often a second process resumes the run while the run goes on, and compares its steps bit by bit: "
            "auto (at most 1 % of the time), no, or a number."
        ),
    ] = "auto",
    log: Annotated[
        list[str] | None,
        typer.Option(
            help="Record figures by tensorboard, mlflow, wandb, trackio or csv; repeatable.", show_default=False
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Serve a page on this machine that updates while training goes on.")
    ] = False,
    host: Annotated[
        str | None, typer.Option(help="With --watch: the address to serve on.", show_default="127.0.0.1")
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="With --watch: open the page in a browser.")] = False,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Train a Task, or continue a run.

    \b
    hotloop train examples/fashion.py --epochs 5 --run runs/first
    hotloop train --resume runs/first
    hotloop train examples/fashion.py --stop-after 11h      stops cleanly, resumable
    hotloop train examples/fashion.py -p width=0.5          sets a parameter of the file's task(width=...)
    hotloop train examples/fashion.py --plan baseline       eager, like a plain training loop
    hotloop train examples/fashion.py --set compile=step    the same, with one axis of the plan set
    hotloop train examples/fashion.py --tune                hotloop tune and hotloop train in one
    hotloop train examples/fashion.py --ranks 2             two processes share each batch
    hotloop train examples/fashion.py --ranks 2 --set workforce=ray    the same, where Ray places them

    \b
    Which plan does a run use?
    option       plan                       compiles            searches first    proven
    (none)       stored result, else rules  only a stored plan  no                a stored plan
    --plan auto  stored result, else rules  beside the          no: in the run's  a stored or a
                 and compiled plans later   training            own steps         compiled plan
    --tune       stored result, else the    if the search       yes, unless a     a stored plan,
                 winner of a search         expects a gain      result is stored  the winner

    A stored result is the fastest plan that an earlier search proved equal, for a Task in a file, this machine and
    these versions. The rules choose by facts of Task and machine, without a measurement; their plan isn't proven:
    hotloop check proves it. A search without a winner leaves the baseline, or the rules if too little was measured.
    Where a search beside the training isn't possible, as on an accelerator, --plan auto doesn't search, and one line
    says why. --plan replay:RUN repeats a run of --plan auto, bit by bit. With --set alone a run uses the baseline with
    these axes. hotloop plan shows the choice.

    Ctrl-C, SIGTERM and SIGHUP save and stop. Exit code 0: finished, or stopped by --stop-after.
    """
    if (task is None) == (resume is None):
        raise typer.BadParameter("give either a Task, or --resume with a run's folder")
    if resume is not None and (run is not None or param):
        raise typer.BadParameter("--run and --param are for a new run; --resume keeps those of the run")
    if tune and (resume is not None or plan not in (None, "auto")):
        raise typer.BadParameter("--tune searches a plan for a new run: leave out --resume and --plan")
    if (host is not None or open_page) and not watch:
        raise typer.BadParameter("--host and --open are for the page of --watch")
    if trust and resume is None:
        raise typer.BadParameter("--trust is for the code in a run's folder: give it with --resume")
    given = parse_pairs(param or [])
    axes = axes_of_options(settings, device=device, workers=workers, ranks=ranks)
    if tune and (axes.keys() & {"parallel", "ranks"} or launched_ranks() > 1):
        raise typer.BadParameter("--tune searches a plan for one process: leave out --ranks and parallel")
    if task is not None:
        file_of_reference(
            split_reference(task)[0]
        )  # reports a wrong path before the import of torch, which takes seconds

    from hotloop.core.plan_request import AUTO, PlanRequest, plan_origin, replayed_run

    if (replay := replayed_run(plan, axes)) is not None:
        if resume is not None:
            raise typer.BadParameter("--plan replay:RUN is for a new run; a resumed run follows its own journal")
        plan = None
    wanted = PlanRequest.from_value(plan, axes)  # reports a wrong plan before the import of torch
    if is_data_parallel_default(ranks, wanted.plan) and (
        resume is None or plan is not None or _has_single_process_plan(resume)
    ):
        axes["parallel"] = "data"

    exit_with_launcher()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # hotloop reports a worker's end itself
    from hotloop import api
    from hotloop.distributed.join import plan_to_launch
    from hotloop.distributed.launch import launch, local_rank_count, own_command
    from hotloop.report.progress import TrainingDisplay, summary
    from hotloop.task import override_fields
    from hotloop.task_file import load_task
    from hotloop.training.run import Run
    from hotloop.training.start import check_options
    from hotloop.tuning.run_context import RunContext

    if (ranked := plan_to_launch(plan, axes, resume)) is not None:
        if ranked.workforce == "ray":
            from hotloop.distributed.ray.ray_launch import launch_on_ray

            raise typer.Exit(launch_on_ray(ranked, own_command(), say)[1])
        raise typer.Exit(launch(local_rank_count(ranked), own_command(), say)[1])
    display = TrainingDisplay(console)
    overrides = {
        key: v for key, v in dict(epochs=epochs, batch_size=batch_size, seed=seed, loggers=log).items() if v is not None
    }
    context = RunContext(
        plan=plan,
        axes=axes,
        is_live=plan == AUTO and not tune,
        replay=replay,
        overrides=overrides,
        stop_after=stop_after,
        checkpoint_every=checkpoint_every,
        rank_timeout=rank_timeout,
        rehearse=rehearse,
        trust=trust,
        callbacks=[display, *_live_page(watch, host, open_page, display)],
        reporter=display.reporter,
    )
    with stdout_for(as_json):
        try:
            if resume is not None:
                handle, ended = api.resume_run(context, resume)
            else:
                assert task is not None
                loaded, began = load_task(task, given), time.monotonic()
                if tune:
                    known_task = override_fields(loaded.task, overrides)
                    until = began + check_options(known_task, stop_after, checkpoint_every or "auto")
                    if run is not None:
                        Run.check_new(run)
                    if (found := _find_plan(loaded, context, until, display)) is not None:
                        context = replace(context, plan=found, axes={})
                handle, ended = api.start_run(replace(context, loaded=loaded), run, began)
        finally:
            display.close()
    if not handle.writes:
        return  # rank 0 prints the result
    origin = "" if resume is not None or replay is not None else " (--tune)" if tune else plan_origin(plan, axes)
    for line in summary(handle.path, handle.plan.brief() + origin, ended.final):
        display.say(line)
    if as_json:
        print_json(
            {
                "run": str(handle.path),
                "plan": handle.plan.model_dump(),
                "epochs": handle.epochs,
                "final": ended.final,
                "reason": ended.reason,
            }
        )
    if ended.reason in signal.Signals.__members__:
        raise typer.Exit(128 + signal.Signals[ended.reason])


def _live_page(is_asked: bool, host: str | None, opens: bool, display: TrainingDisplay) -> list[Callback]:
    if not is_asked:
        return []
    from hotloop.training.live_page import LivePage

    return [LivePage(display.say, host=host or "127.0.0.1", opens=opens)]


def _has_single_process_plan(run: Path) -> bool:
    """Returns whether the run's own plan, the default with --resume, is for a single process."""
    from hotloop.plan import Plan

    own = run / "plan.toml"
    return own.is_file() and Plan.read(own).parallel == "none"


def _find_plan(loaded: LoadedTask, context: RunContext, until: float, display: TrainingDisplay) -> Plan | None:
    """Returns the stored plan for this Task, or the result of a search; None leaves the choice to the rules."""
    from hotloop.core.plan_request import PlanRequest
    from hotloop.report.race import race_progress_bar
    from hotloop.tuning import tune as tuning_tune

    with race_progress_bar(console) as progress:
        plan, reason = tuning_tune.cached_or_tuned_plan(
            loaded,
            PlanRequest.from_value("auto", context.axes),
            overrides=context.overrides,
            say=display.say,
            progress=progress,
            until=until,
            searches=context.plan_searches,
        )
    display.say(reason)
    return plan
