"""`hotloop profile` as a command: what is a Task and what a script, whose output is whose, and what can't be asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotloop.core.records.profile import Profile
from hotloop.profiler import profile
from tests.support.processes.in_process_command import SMALL, Hotloop, commands
from tests.support.profiler.handmade_profiles import made

SCRIPT = "import sys\nprint('from the script', sys.argv[1:])\nsys.exit(3)\n"


class Asked:
    """Stands in for what profiles; keeps what it was asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.found = made()

    def of(self, name: str) -> Any:
        def asked(*args: Any, **options: Any) -> Profile:
            self.calls.append((name, args, options))
            return self.found

        return asked


@pytest.fixture
def hotloop(tmp_path: Path, monkeypatch, capfd) -> Iterator[Hotloop]:
    (tmp_path / "task.py").write_text(f"{SMALL}task = make()\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    with commands(tmp_path, monkeypatch, capfd) as run:
        yield run


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    stand_in = Asked()
    for name in ("profile_task", "profile_script", "race_remedies"):
        monkeypatch.setattr(profile, name, stand_in.of(name))
    return stand_in


def test_a_script_keeps_its_arguments_its_output_and_its_exit_code(hotloop: Hotloop) -> None:
    done = hotloop("profile", "script.py", "--", "--lr", "0.1", "--json")
    assert done.code == 3
    assert done.out == "from the script ['--lr', '0.1', '--json']\n"
    assert "no single training steps were found" in done.err
    assert "exit code 3" in done.err


def test_with_json_the_scripts_output_goes_to_stderr(hotloop: Hotloop) -> None:
    done = hotloop("profile", "script.py", "--json")
    assert done.code == 3
    assert "from the script []" in done.err
    assert (done.document["exit_code"], done.document["step_ms"]) == (3, None)
    for name in ("phases", "attributed", "modules", "bound", "remedies"):
        assert name in done.document


def test_which_files_are_tasks(hotloop: Hotloop, asked: Asked) -> None:
    for arguments in (("task.py",), ("task.py:task",), ("script.py",), ("task.py", "--", "--x")):
        assert hotloop("profile", *arguments).code == 0
    assert [name for name, _, _ in asked.calls] == [
        "profile_task",
        "profile_task",
        "profile_script",
        "profile_script",
    ]
    assert asked.calls[-1][1] == (Path("task.py"), ["--x"])


INTERRUPTED = """
import itertools
import signal
import time

calls = itertools.count(1)  # of which some 25 are warm-up; going back to a State puts no iterator back


class Late(torch.nn.Linear):
    def forward(self, x):
        if next(calls) == {at}:
            signal.raise_signal(signal.SIGINT)
        time.sleep(0.02)
        return super().forward(x)


task = make(model=lambda: Late(4, 3))
"""


@pytest.mark.more
def test_ctrl_c_in_a_task_shows_what_was_measured(hotloop: Hotloop, tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(SMALL + INTERRUPTED.format(at=80))
    done = hotloop("profile", "late.py", "--steps", 1000, "--json", "--try")
    assert done.code == 130
    assert 0 < done.document["steps"] < 80 and done.document["phases"] and done.document["stopped"] == "Ctrl-C"
    (tmp_path / "late.py").write_text(SMALL + INTERRUPTED.format(at=90))
    done = hotloop("profile", "late.py", "--steps", 1000)
    assert done.code == 130 and "Measuring ended early: Ctrl-C." in done.err and "a step takes" in done.err


def test_ctrl_c_before_a_step_was_measured_is_one_line(hotloop: Hotloop, tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(SMALL + INTERRUPTED.format(at=2))
    done = hotloop("profile", "late.py", "--json")
    assert (done.code, done.document["error"]["message"]) == (130, "stopped by Ctrl-C")


def test_a_module_with_relative_imports_and_a_file_of_any_name(hotloop: Hotloop, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "said.py").write_text("import sys\nWORDS = sys.argv[1:]\n")
    (tmp_path / "package" / "train.py").write_text("from .said import WORDS\nprint(__name__, WORDS)\n")
    assert hotloop("profile", "-m", "package.train", "--", "--lr", "1").out == "__main__ ['--lr', '1']\n"
    (tmp_path / "command").write_text("#!/usr/bin/env python\nprint('from the command')\n")
    assert hotloop("profile", "command").out == "from the command\n"


def test_options_arrive(hotloop: Hotloop, asked: Asked, tmp_path: Path) -> None:
    hotloop("profile", "task.py", "--set", "optimizer=fused", "--batch-size", "4", "--steps", "7", "--try")
    (_, (_, plan), options), (name, (_, found, base), more) = asked.calls
    assert plan.optimizer == base.optimizer == "fused"
    assert (options["overrides"], options["steps"]) == ({"batch_size": 4}, 7)
    assert (name, found, more["time_limit"]) == ("race_remedies", asked.found, None)

    hotloop("profile", "script.py", "--try", "--time-limit", "7s")
    assert asked.calls[-1][2]["settings"].try_s == 7
    hotloop("profile", "script.py", "--stop-after", "5m", "--trace", "trace.json", "--json")
    _, _, options = asked.calls[-1]
    assert (options["stop_after_s"], options["settings"].trace) == (300, str(Path("trace.json").resolve()))
    assert os.fstat(options["stdout"])


def test_in_words_with_pictures(hotloop: Hotloop, asked: Asked, tmp_path: Path) -> None:
    done = hotloop("profile", "task.py", "--pictures", "seen", "--module", "head")
    assert done.out == ""
    assert "Limit of the step: arithmetic." in done.err
    assert "operators in head" in done.err
    assert {path.name for path in (tmp_path / "seen").iterdir()} == {"phases.html", "modules.html", "roofline.html"}
    assert "picture: seen" in done.err


def test_json_names_the_pages(hotloop: Hotloop, asked: Asked) -> None:
    done = hotloop("profile", "task.py", "--pictures", "seen", "--json")
    assert [Path(page).name for page in done.document["pages"]] == ["phases.html", "modules.html", "roofline.html"]
    assert done.document["remedies"][0]["gain"] == pytest.approx(0.31)


@pytest.mark.parametrize("option", [("--pictures", "file"), ("--trace", "file/t.json")])
def test_a_place_that_can_t_be_written_shows_before_anything_is_run(
    option: tuple[str, str], hotloop: Hotloop, asked: Asked
) -> None:
    Path("file").touch()
    done = hotloop("profile", "task.py", *option)
    assert done.code == 1 and done.err.count("\n") == 1 and "can't be written" in done.err
    assert asked.calls == []


def test_pictures_that_can_t_be_written_at_the_end_cost_nothing_but_themselves(
    hotloop: Hotloop, asked: Asked, monkeypatch
) -> None:
    monkeypatch.setattr("hotloop.cli.profile.check_writable", lambda path, option: Path("file").touch())
    done = hotloop("profile", "task.py", "--pictures", "file")
    assert done.code == 1 and "Limit of the step" in done.err
    assert done.err.splitlines()[-1].startswith("error: file can't be made a folder")
    done = hotloop("profile", "task.py", "--pictures", "file", "--json")
    assert done.code == 1 and done.document["pages"] == [] and done.document["remedies"]


def test_a_script_that_was_killed_ends_as_shells_report_it(hotloop: Hotloop, asked: Asked) -> None:
    asked.found = made(exit_code=-9)
    assert hotloop("profile", "script.py").code == 137


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("script.py", "--plan", "auto"), "--plan is for a Task, and script.py is run as a script"),
        (("script.py", "--set", "compile=step"), "--set is for a Task"),
        (("script.py", "--ranks", "2"), "--ranks is for a Task"),
        (("task.py", "--ranks", "2", "--try"), "--try with parallel=data"),
        (("task.py", "--set", "parallel=async"), "a profile of parallel=async"),
        (("task.py", "--set", "parallel=data"), "parallel=data on the CPU without a number of ranks"),
        (("script.py", "--steps", "0"), "--steps is 0; expected 1 or more"),
        (("task.py", "--stop-after", "5s"), "--stop-after ends a script"),
        (("task.py:task", "--", "--x"), "arguments after -- are for a script"),
        (("nowhere.py",), "no file nowhere.py"),
        (("script.py", "--stop-after", "soon"), "soon"),
        (("task.py", "--plan", "nowhere.toml"), "no plan at 'nowhere.toml'"),
    ],
)
def test_mistakes_are_one_line(arguments, says, hotloop: Hotloop, asked: Asked) -> None:
    before, behind = (arguments[:-2], arguments[-2:]) if "--" in arguments else (arguments, ())
    done = hotloop("profile", *before, "--json", *behind)
    assert done.code in (1, 2)
    assert says in done.document["error"]["message"]
    assert asked.calls == []
