"""A study's result depends on its seed alone: not on the number of jobs, not on kills, not on interruptions."""

from __future__ import annotations

import hashlib
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

import hotloop
from hotloop.core.records.study import StudyResult
from hotloop.errors import StudyError
from hotloop.hyperparameters.study import Study
from hotloop.training.run import Run
from tests.support.processes.resumed_training import disagreements
from tests.support.studies import stored_rows
from tests.support.tasks.studied_task import STUDIED

SPACE = {"lr": "1e-3..1:log", "width": [2, 4, 8], "batch_size": "5..15"}
ARGUMENTS = ["-p", "lr=1e-3..1:log", "-p", "width=2,4,8", "-p", "batch_size=5..15"]
HALVING = dict(trials=6, round_size=3, pruner="halving", progress=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("studies")
    (path / "task.py").write_text(STUDIED)
    return path


@pytest.fixture(scope="module")
def whole(folder: Path) -> Study:
    return hotloop.study(folder / "task.py", SPACE, folder=folder / "whole", **HALVING)


def figures(result: StudyResult) -> list[tuple]:
    return [(one.number, one.state, one.params, one.value, one.curve) for one in result.trials]


def check_same(one: Study | StudyResult, other: Study | StudyResult) -> None:
    first, second = (each.result if isinstance(each, Study) else each for each in (one, other))
    assert figures(first) == figures(second)
    assert stored_rows(Path(first.study)) == stored_rows(Path(second.study))
    assert (first.best, first.importance, first.exact) == (second.best, second.importance, second.exact)
    for a, b in zip(first.trials, second.trials, strict=True):
        for run, same in zip(a.runs, b.runs, strict=True):
            assert disagreements(Path(run), Path(same)) == []


@pytest.mark.slow
def test_several_jobs_change_nothing(folder: Path, whole: Study) -> None:
    check_same(whole, hotloop.study(folder / "task.py", SPACE, folder=folder / "jobs", jobs=3, **HALVING))
    assert {one.state for one in whole.trials} == {"complete", "pruned"}
    assert whole.result.exact


@pytest.mark.more
@pytest.mark.parametrize(("pruner", "repeats"), [("hyperband", 3), ("median", 1)])
def test_pruners_and_repeats_give_the_same_with_any_number_of_jobs(
    folder: Path, tmp_path: Path, pruner: str, repeats: int
) -> None:
    settings = dict(trials=12, round_size=6, pruner=pruner, repeats=repeats, progress=False)
    one, several = (
        hotloop.study(folder / "task.py", SPACE, folder=tmp_path / str(jobs), jobs=jobs, **settings) for jobs in (1, 3)
    )
    check_same(one, several)
    assert {trial.state for trial in one.trials} == {"complete", "pruned"}
    assert all(len(trial.runs) == repeats for trial in one.trials)
    assert (one.best.spread is not None) == (repeats > 1)


def start(folder: Path, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "hotloop", "study", *arguments], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )  # fmt: skip


def kill(command: subprocess.Popen, victim: str) -> bool:
    """Kills the command, the server of trials, or a trial; False if the command is over before there is one."""
    while command.poll() is None:
        try:
            servers = psutil.Process(command.pid).children()
            children = [child for server in servers for child in server.children()]
            trials = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
        except psutil.NoSuchProcess:
            continue
        found = {"command": [command.pid] * bool(trials), "server": [one.pid for one in servers]}.get(victim)
        for pid in ([one.pid for one in trials] if found is None else found)[:1]:
            os.kill(pid, signal.SIGKILL)
            return True
        time.sleep(0.01)
    return False


VICTIMS = ["trial", "server", "command"]


def random_victims(count: int) -> list[str]:
    return random.Random(count).choices(VICTIMS, weights=[4, 2, 2], k=count)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victims", "jobs"),
    [
        (VICTIMS, 2),
        pytest.param(random_victims(20), 1, marks=pytest.mark.more, id="20 kills, 1 job"),
        pytest.param(random_victims(20), 2, marks=pytest.mark.more, id="20 kills, 2 jobs"),
    ],
)
def test_kills_change_nothing(folder: Path, whole: Study, tmp_path: Path, victims: list[str], jobs: int) -> None:
    draws, path = random.Random(len(victims)), tmp_path / "killed"
    fresh = ["task.py", *ARGUMENTS, "--trials", "6", "--round", "3", "--prune", "halving", "--study", str(path)]
    command = start(folder, *fresh, "--jobs", str(jobs))
    killed = []
    while not list(path.glob("logs/0*.txt")):  # the first trial's
        time.sleep(0.01)
    for victim in victims:
        time.sleep(draws.uniform(0.0, 0.3))
        if kill(command, victim):
            killed.append(victim)
        if victim == "command":
            command.wait()
            command = start(folder, "--resume", str(path), "--jobs", str(jobs))
    assert command.communicate()[1].count("Traceback") == 0
    assert command.returncode == 0
    assert killed == victims
    check_same(whole, hotloop.study(folder / "task.py", resume=path, progress=False))
    assert winner_digest(path) == winner_digest(whole.path)


def winner_digest(study: Path) -> list[str]:
    """SHA-256 of each tensor of the winner's best weights; the files' headers have times."""
    (path,) = (study / "best" / "checkpoints" / "best").glob("*.safetensors")
    return [f"{name} {hashlib.sha256(value.numpy().tobytes()).hexdigest()}" for name, value in load_file(path).items()]


@pytest.mark.slow
def test_ctrl_c_saves_and_names_the_line_to_go_on(folder: Path, whole: Study, tmp_path: Path) -> None:
    path = tmp_path / "stopped"
    command = start(
        folder, "task.py", *ARGUMENTS, "--trials", "6", "--round", "3", "--prune", "halving", "--study", str(path)
    )
    while not list(path.glob("records/*.json")):
        assert command.poll() is None, command.communicate()[1]
        time.sleep(0.01)
    command.send_signal(signal.SIGINT)
    lines = command.communicate()[1]
    assert command.returncode == 130
    assert f"saved; go on with: hotloop study --resume {path}" in lines
    check_same(whole, hotloop.study(folder / "task.py", resume=path, jobs=2, progress=False))


@pytest.mark.slow
def test_a_pruned_trial_goes_on_exactly_and_the_winner_is_repeated_by_its_line(
    folder: Path, whole: Study, tmp_path: Path
) -> None:
    pruned = next(one for one in whole.trials if one.state == "pruned")
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-a", whole.path, copy], check=True)
    result = Study(hotloop.study(folder / "task.py", resume=copy, progress=False).result).continue_trial(pruned.number)
    continued = result.trials[pruned.number]
    assert (continued.state, continued.epochs, continued.curve[: pruned.epochs]) == ("continued", 5, pruned.curve)
    for trial, line in [(whole.best, whole.result.command), (continued, None)]:
        run = tmp_path / f"again-{trial.number}"
        texts = [f"-p {name}={trial.params[name]}" for name in ("lr", "width")] + [
            f"--batch-size {trial.params['batch_size']}"
        ]
        line = line or f"hotloop train task.py {' '.join(texts)} --plan {trial.runs[0]}/plan.toml"
        line = line.replace(str(folder / "task.py"), "task.py")
        subprocess.run(
            [sys.executable, "-m", *shlex.split(line), "--run", str(run)], cwd=folder, check=True, capture_output=True
        )
        assert disagreements(Path(trial.runs[0]), run) == []


@pytest.mark.slow
def test_failed_trials_are_recorded_and_end_nothing(folder: Path) -> None:
    space = {"mode": ["raising", "nan", "memory", "exit", "exit in the model", "plain"], "lr": 0.01, "epochs": 2}
    study = hotloop.study(
        folder / "task.py", space, folder=folder / "failed", sampler="grid", repeats=2, progress=False
    )
    by_mode = {one.params["mode"]: one for one in study.trials}
    assert {mode for mode, one in by_mode.items() if one.state == "complete"} == {"plain"}
    assert {one.state for one in study.trials} == {"complete", "failed"}
    assert "ValueError: no such mode (task.py:" in by_mode["raising"].error
    assert "not finite" in by_mode["nan"].error or "NaN" in by_mode["nan"].error or "infinite" in by_mode["nan"].error
    assert "memory" in by_mode["memory"].error and "killed" not in by_mode["memory"].error
    assert "exit(3)" in by_mode["exit"].error
    assert "exit('no model')" in by_mode["exit in the model"].error
    assert all(one.error and "\n" not in one.error for one in study.trials if one.state == "failed")
    assert study.best == by_mode["plain"]
    assert study.best.spread > 0
    assert (study.path / "best").resolve() == Path(study.best.runs[0]).resolve()


@pytest.mark.slow
def test_a_function_of_python_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(STUDIED, names)
    study = hotloop.study(names["task"], {"lr": "0.01..0.1"}, trials=2, jobs=2, progress=False)
    assert [one.state for one in study.trials] == ["complete", "complete"]
    assert hotloop.load_model(study.run)(__import__("torch").zeros(1, 4)).shape == (1, 2)
    assert study.result.command.startswith("hotloop.fit(make_task(lr=")


ARGUMENT = STUDIED.replace('mode: str = "plain"', 'mode: str = "plain", batch_size: int = 15').replace(
    "batch_size=15,", "batch_size=3 * batch_size,"
)


@pytest.mark.slow
def test_an_argument_comes_before_the_field_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(ARGUMENT)
    space = {"batch_size": [5, 9], "epochs": 1}
    study = hotloop.study(tmp_path / "task.py", space, folder=tmp_path / "s", trials=2, sampler="grid", progress=False)
    for trial in study.trials:
        run = Run.open(trial.runs[0])
        assert run.record.facts.batch_size == 3 * trial.params["batch_size"]
        assert len(run.epochs) == 1
    assert "-p batch_size=" in study.result.command and "--epochs 1" in study.result.command


OPTIONAL = STUDIED.replace('mode: str = "plain"', 'mode: str = "plain", share: float = 0.25').replace(
    "validation=0.25", "validation=share or None"
)


@pytest.mark.slow
def test_a_trial_without_the_figure_of_the_study_has_failed_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(OPTIONAL)
    space, settings = {"share": [0.25, 0.0], "epochs": 2}, dict(sampler="grid", pruner="median", progress=False)
    study = hotloop.study(tmp_path / "task.py", space, folder=tmp_path / "s", **settings)
    by_share = {one.params["share"]: one for one in study.trials}
    assert by_share[0.25] == study.best
    assert by_share[0.0].state == "failed"
    assert by_share[0.0].error == "the run has no validation loss, by which the study compares its trials"


@pytest.mark.slow
def test_a_limit_on_memory_leaves_out_trials_and_is_one_line(folder: Path, tmp_path: Path) -> None:
    space, limit = {"width": [2, 4], "epochs": 1}, "memory < 1MB"
    study = hotloop.study(
        folder / "task.py", space, folder=tmp_path / "s", sampler="grid", constraints=[limit], progress=False
    )
    assert [(one.state, one.feasible) for one in study.trials] == [("complete", False)] * 2
    assert study.best is None
    assert not study.result.exact
    assert study.result.inexact == [f"--require {limit}: measured time and memory"]


@pytest.mark.slow
def test_another_space_is_refused_in_python(folder: Path, whole: Study) -> None:
    for settings, line in [
        ({"space": {**SPACE, "lr": "1e-3..2:log"}}, "lr = '1e-3..2:log', and the study has lr = '1e-3..1:log'"),
        ({"space": {"lr": SPACE["lr"]}}, "no 'width', and the study has width = [2, 4, 8]"),
        ({"seed": 7}, "seed=7, and the study has 0"),
    ]:
        with pytest.raises(StudyError) as error:
            hotloop.study(folder / "task.py", resume=whole.path, progress=False, **settings)
        assert line in str(error.value)
