"""`hotloop study`: its table, its document, and one line for each mistake."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.support.processes.in_process_command import Hotloop
from tests.support.tasks.studied_task import STUDIED

MISTAKES = {
    "reversed": (["-p", "lr=1..0.1"], "error: -p lr=1..0.1: the range is reversed"),
    "log of 0": (["-p", "lr=0..1:log"], "error: -p lr=0..1:log: a log range begins above 0"),
    "no space": (["--space", "none.toml"], "error: no space at 'none.toml'"),
    "sampler": (["-p", "lr=0.1,1", "--sampler", "tpr"], "error: --sampler tpr; expected one of tpe"),
    "pruner": (["-p", "lr=0.1,1", "--prune", "halvin"], "error: --prune halvin; expected one of none"),
    "trials": (["-p", "lr=0.1,1", "--trials", "0"], "error: --trials 0; expected 1 or more"),
    "limit": (["-p", "lr=0.1,1", "--require", "time < 3"], "error: --require 'time < 3'; expected a limit such as"),
    "number": (["-p", "lr=0.1,1", "--require", "memory < 1.2.3GB"], "error: --require 'memory < 1.2.3GB'; expected a"),
    "time": (["-p", "lr=0.1,1", "--time-limit", "soon"], "error: time-limit='soon'"),
    "plan": (["-p", "lr=0.1,1", "--plan", "none.toml"], "error: no plan at 'none.toml'"),
    "jobs on": (["-p", "lr=0.1,1", "--jobs-on", "rya"], "error: --jobs-on rya; expected one of processes, ray"),
    "two values": (["-p", "width=2,2"], "error: -p width=2,2: 2 is there twice"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_before_anything_starts(hotloop: Hotloop, case: str) -> None:
    Path("task.py").write_text(STUDIED)
    arguments, line = MISTAKES[case]
    done = hotloop("study", "task.py", *arguments, "--study", "s")
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(line) and len(done.err.splitlines()) == 1
    assert not Path("s").exists()


def test_without_ray_there_is_one_line(hotloop: Hotloop, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("task.py").write_text(STUDIED)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "ray" else find(name, *more))
    done = hotloop("study", "task.py", "-p", "lr=0.1,1", "--jobs-on", "ray", "--study", "s")
    assert (done.code, len(done.err.splitlines())) == (1, 1)
    assert done.err.startswith("error: --jobs-on ray, and Ray isn't installed; ")
    assert not Path("s").exists()


USAGE = {
    "nothing": ([], "give either a Task, or --resume"),
    "both": (["task.py", "--resume", "s"], "give either a Task, or --resume"),
    "folder": (["--resume", "s", "--study", "t"], "--study is for a new study"),
    "continue": (["task.py", "--continue", "1"], "--continue is for a trial of a study"),
    "trust": (["task.py", "--trust"], "--trust is for the code in a study's folder"),
    "find": (["task.py", "--find", "lr", "--trials", "4"], "--trials has no effect beside --find: leave it out"),
    "continue with jobs": (
        ["--resume", "s", "--continue", "1", "--jobs", "2"],
        "--jobs has no effect beside --continue",
    ),
    "packs": (
        ["task.py", "--pack", "auto"],
        "error: --pack was removed: use --jobs 2 to train trials at the same time. See: hotloop study --help",
    ),
}


@pytest.mark.parametrize("case", USAGE)
def test_a_wrong_call_is_one_line(hotloop: Hotloop, case: str) -> None:
    arguments, line = USAGE[case]
    done = hotloop("study", *arguments)
    assert done.code == 2 and line in done.err


def test_a_folder_without_a_study_is_one_line(hotloop: Hotloop) -> None:
    assert hotloop("study", "--resume", "none").err.startswith("error: none is no study")
    Path("other").mkdir()
    Path("other/notes.txt").touch()
    Path("task.py").write_text(STUDIED)
    done = hotloop("study", "task.py", "-p", "lr=0.1,1", "--study", "other")
    assert done.err.startswith("error: other exists and is no study")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "line"),
    [
        ("lrr=0.1,1", "-p lrr=0.1,1: task() has no parameter 'lrr'; expected one of lr, "),
        pytest.param("lr=0.1,fast", "-p lr=0.1,fast: lr=fast; expected a number", marks=pytest.mark.more),
        pytest.param("mode=1..2", "-p mode=1..2: mode takes no numbers", marks=pytest.mark.more),
    ],
)
def test_a_name_or_a_type_of_no_argument_is_one_line_and_leaves_no_folder(
    hotloop: Hotloop, values: str, line: str
) -> None:
    Path("task.py").write_text(STUDIED)
    done = hotloop("study", "task.py", "-p", values, "--study", "s", "--json")
    assert done.code == 1
    assert done.document["error"]["message"].startswith(line)
    assert not Path("s").exists()


@pytest.mark.slow
def test_a_missing_device_is_one_line_and_leaves_no_folder(hotloop: Hotloop) -> None:
    Path("task.py").write_text(STUDIED)
    done = hotloop("study", "task.py", "-p", "lr=0.1,1", "--device", "cuda:77", "--study", "s")
    assert done.code == 1
    assert done.err.startswith("error: device 'cuda:77' isn't on this machine") and len(done.err.splitlines()) == 1
    assert not Path("s").exists()


@pytest.mark.slow
def test_a_study_without_a_winner_ends_with_an_error_and_its_document(hotloop: Hotloop) -> None:
    Path("task.py").write_text(STUDIED)
    done = hotloop("study", "task.py", "-p", "mode=raising,exit", "--sampler", "grid", "--study", "s", "--json")
    assert done.code == 1
    assert [one["state"] for one in done.document["trials"]] == ["failed", "failed"]
    assert "no winner: no trial is complete" in done.err


@pytest.mark.slow
def test_a_damaged_study_is_one_line_and_trains_no_trial(hotloop: Hotloop) -> None:
    Path("task.py").write_text(STUDIED)
    arguments = ["-p", "lr=0.1,1", "-p", "epochs=1", "--sampler", "grid", "--trials", "1", "--study", "s"]
    assert hotloop("study", "task.py", *arguments).code == 0
    stored = Path("s/study.db").read_bytes()
    Path("s/study.db").write_bytes(b"text" * 500)
    done = hotloop("study", "--resume", "s", "--trials", "2")
    assert (done.code, len(done.err.splitlines())) == (1, 1) and "study.db is damaged" in done.err
    Path("s/study.db").write_bytes(stored)
    Path("s/source/task.py").unlink()
    done = hotloop("study", "--resume", "s", "--trials", "2")
    assert (done.code, len(done.err.splitlines())) == (1, 1) and "the Task's source in s/source was changed" in done.err
    assert not Path("s/trials/0001").exists()


OTHERS = {
    "--seed 1": "--seed 1, and the study has 0",
    "--round 2": "--round 2, and the study has 8",
    "--prune median": "--prune median, and the study has none",
    "--require step_ms<5": "--require step_ms<5, and the study has none",
    "--plan baseline": "--plan baseline, and the study has rules",
    "--device cpu": "--set device=cpu, and the study has no value for it",
    "-p lr=0.01..0.2:log": "-p lr=0.01..0.2:log, and the study has space.toml: lr = '0.01..0.1:log'",
    "--space space.toml": "no 'epochs', and the study has -p epochs=2",
}
"""Options of --resume that aren't those of the study."""


@pytest.mark.slow
def test_the_document_has_the_trials_and_the_folder_can_be_used(hotloop: Hotloop) -> None:
    Path("task.py").write_text(STUDIED)
    Path("space.toml").write_text('lr = "0.01..0.1:log"\nwidth = [2, 4]\n')
    arguments = ["task.py", "--space", "space.toml", "-p", "epochs=2", "--study", "s", "--json"]
    found = hotloop("study", *arguments, "--trials", "2").document
    assert [set(one) >= {"params", "value", "state"} for one in found["trials"]] == [True, True]
    assert all(one["state"] == "complete" and one["params"]["epochs"] == 2 for one in found["trials"])
    assert found["command"].startswith("hotloop train task.py -p lr=0.")
    again = hotloop("study", *arguments)
    assert "s holds a study already" in again.document["error"]["message"]
    for options, line in OTHERS.items():
        other = hotloop("study", "--resume", "s", *options.split())
        assert (other.code, len(other.err.splitlines())) == (1, 1)
        assert line in other.err, other.err
    same = ["--space", "space.toml", "-p", "epochs=2", "--seed", "0", "--sampler", "tpe"]
    more = hotloop("study", "--resume", "s", *same, "--trials", "3")
    assert more.code == 0
    assert "winner: trial" in more.err and "repeat: hotloop train task.py" in more.err
    assert hotloop("evaluate", "s/best", "--on", "validation", "--json").code == 0
    assert Path("s/study.html").stat().st_size > 1e6


@pytest.mark.slow
def test_a_learning_rate_is_found_with_its_line_and_page(hotloop: Hotloop) -> None:
    Path("task.py").write_text(STUDIED)
    done = hotloop("study", "task.py", "--find", "lr", "-p", "width=8")
    assert done.code == 0
    assert "recommended: " in done.err and "train: hotloop train task.py -p width=8 -p lr=" in done.err
    assert Path("task-lr.html").stat().st_size > 1e6


@pytest.mark.slow
def test_a_batch_size_is_found(hotloop: Hotloop) -> None:
    Path("task.py").write_text(STUDIED)
    found = hotloop("study", "task.py", "--find", "batch-size", "--json").document
    assert [one["batch_size"] for one in found["sizes"]] == [8, 16, 32]
    assert found["largest"] == 32 and found["limit"] == "the data has 45 samples"


@pytest.mark.parametrize("arguments", [["--find", "rl"], ["--find", "lr", "-p", "lr=0.1,1"]])
def test_a_wrong_search_for_a_single_value_is_one_line(hotloop: Hotloop, arguments: list[str]) -> None:
    Path("task.py").write_text(STUDIED)
    done = hotloop("study", "task.py", *arguments)
    assert done.code == 1 and len(done.err.splitlines()) == 1 and done.err.startswith("error: ")
