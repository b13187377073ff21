"""`hotloop study`: searches hyper-parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hotloop.cli.options import (
    FAILED,
    DeviceOption,
    JsonOption,
    SetOption,
    TrustOption,
    axes_of_options,
    exit_on_error,
    print_json,
    print_result,
    say,
    stdout_for,
)


@exit_on_error
def study(
    task: Annotated[
        str | None, typer.Argument(help="file.py, file.py:name or package.module:name.", show_default=False)
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option("--param", "-p", help="name=values to search, such as lr=1e-4..1e-1:log; repeatable."),
    ] = None,
    space: Annotated[Path | None, typer.Option(help="A TOML file with the space; -p changes single names.")] = None,
    trials: Annotated[int | None, typer.Option(help="Number of trials.", show_default="20")] = None,
    sampler: Annotated[
        str | None, typer.Option(help="tpe, cmaes, gp, grid or random, all of Optuna.", show_default="tpe")
    ] = None,
    prune: Annotated[
        str | None, typer.Option(help="none, median, hyperband or halving, all of Optuna.", show_default="none")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            help="Trials that train at the same time, without effect on the result.",
            show_default="1, or the cores of Ray's cluster",
        ),
    ] = None,
    jobs_on: Annotated[
        str,
        typer.Option(help="processes of this machine, or ray for the machines of a cluster that share the folder."),
    ] = "processes",
    round_size: Annotated[
        int | None,
        typer.Option(
            "--round", help="Trials that are proposed together, from the results of earlier rounds.", show_default="8"
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the search; -p seed=... is the Task's.", show_default="0")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Seeds for each trial, whose value is the mean.", show_default="1")
    ] = None,
    require: Annotated[
        list[str] | None, typer.Option(help="A limit such as 'memory < 4GB' or 'step_ms < 5'; repeatable.")
    ] = None,
    time_limit: Annotated[
        str | None, typer.Option(help="A time such as 1h, after which no further round begins.")
    ] = None,
    plan: Annotated[
        str | None,
        typer.Option(
            help="auto (the fastest proven plan of each shape of network), baseline or a TOML file.",
            show_default="the rules' plan",
        ),
    ] = None,
    settings: SetOption = None,
    device: DeviceOption = None,
    folder: Annotated[
        Path | None, typer.Option("--study", help="New folder; default studies/<name>-<date>-<time>.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this study; --trials is the new total.")] = None,
    continued: Annotated[
        int | None, typer.Option("--continue", help="Train this pruned trial of --resume to its end.", metavar="TRIAL")
    ] = None,
    find: Annotated[
        str | None,
        typer.Option(
            help="lr (a learning-rate range test) or batch-size (the largest and the fastest), without a study."
        ),
    ] = None,
    trust: TrustOption = False,
    as_json: JsonOption = False,
) -> None:
    """Search hyper-parameters; the same seed gives the same trials and winner.

    \b
    hotloop study task.py -p lr=1e-4..1e-1:log -p width=0.5,1,2 --trials 40
    hotloop study task.py -p lr=1e-4..1e-1:log -p batch_size=16..256:int:log --prune hyperband
    hotloop study task.py --space space.toml --jobs 2 --time-limit 1h
    hotloop study --resume studies/first --trials 80       go on, with 80 trials in all
    hotloop study --resume studies/first --continue 7      train a pruned trial to its end
    hotloop study task.py --find lr                        test learning rates, and recommend one
    hotloop study task.py --find batch-size                the largest that fits, and the fastest

    \b
    lr=1e-4..1e-1:log     a range, by the logarithm
    layers=1..4:int       whole numbers
    dropout=0..0.5:step=0.1
    width=0.5,1,2         a choice
    optimizer=sgd         one value

    The names are parameters of the file's task(...), or batch_size, epochs and seed of the Task. Each trial is trained
    in a process of its own with one thread, and is a run folder. Ctrl-C saves; --resume goes on exactly.
    """
    if (task is None) == (resume is None):
        raise typer.BadParameter("give either a Task, or --resume with a study's folder")
    if resume is not None and folder is not None:
        raise typer.BadParameter("--study is for a new study; --resume names the folder of an existing study")
    if continued is not None and resume is None:
        raise typer.BadParameter("--continue is for a trial of a study: give it with --resume")
    if trust and resume is None:
        raise typer.BadParameter("--trust is for the code in a study's folder: give it with --resume")
    if find is not None and resume is not None:
        raise typer.BadParameter("--find is for a Task: give it without --resume")
    axes = axes_of_options(settings, device=device)
    alone = "--find" if find is not None else "--continue" if continued is not None else ""
    searched = {
        "--space": space, "--trials": trials, "--sampler": sampler, "--prune": prune, "--jobs": jobs,
        "--jobs-on": None if jobs_on == "processes" else jobs_on, "--round": round_size, "--seed": seed,
        "--repeats": repeats, "--require": require, "--time-limit": time_limit, "--plan": plan,
        "--study": folder, "--param": param if continued is not None else None,
        "--set": axes if continued is not None else None,
    }  # fmt: skip
    if alone and (unused := [option for option, value in searched.items() if value not in (None, [], {})]):
        raise typer.BadParameter(f"{unused[0]} has no effect beside {alone}: leave it out")
    if find is not None:
        assert task is not None
        _find(find, task, param or [], axes, as_json)
        return

    from hotloop.hyperparameters.space import parse_options, read_space
    from hotloop.hyperparameters.trial_processes import TaskSource, TrialProcesses

    given = {**(read_space(space) if space else {}), **parse_options(param or [])}
    with stdout_for(as_json), TrialProcesses() as processes:  # the processes import torch while this one imports Optuna
        from hotloop.hyperparameters import study as studies
        from hotloop.report.study import no_winner_line, study_lines, study_table

        options = studies.StudyOptions(
            trials, sampler, prune, round_size, jobs, seed, repeats, require, time_limit, plan, axes, jobs_on
        )
        if resume is not None and continued is not None:
            result = studies.continue_trial(resume, continued, None, processes, say, trust=trust)
        elif resume is not None:
            result = studies.resume_study(resume, given, options, None, processes, say, trust=trust)
        else:
            assert task is not None
            result = studies.start_study(TaskSource.from_value(task), given, options, folder, processes, say)
    print_result(as_json, result.model_dump(), lambda: study_table(result))
    for line in [] if as_json else study_lines(result):
        say(line)
    if result.winner is None and result.ended == "finished":
        if as_json:
            say(no_winner_line(result))
        raise typer.Exit(FAILED)


def _find(what: str, task: str, param: list[str], axes: dict[str, str], as_json: bool) -> None:
    from hotloop.core.files.source_files import split_reference
    from hotloop.core.records.study import LearningRateRange
    from hotloop.hyperparameters.space import parse_options

    space = parse_options(param)

    from hotloop.hyperparameters.finders import find
    from hotloop.hyperparameters.trial_processes import TaskSource
    from hotloop.report.learning_curves import learning_rate_lines

    page = Path(f"{Path(split_reference(task)[0]).stem}-lr.html")
    with stdout_for(as_json):
        found = find(what, TaskSource.from_value(task), space, axes, page, say)
    if as_json:
        print_json(found.model_dump())
    elif isinstance(found, LearningRateRange):
        for line in [*learning_rate_lines(found), f"page: {page}"]:
            say(line)
    else:
        fastest = "not sure" if found.busy else found.fastest
        say(f"largest that fits: {found.largest}   best samples/s: {fastest}   end: {found.limit}")
        if found.busy:
            say(found.busy)
