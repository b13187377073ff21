"""A run's folder holds code: that of runs that this user started runs, that of others only after a word."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import hotloop as library
from hotloop.core.files.source_files import files_of, source_digest
from hotloop.errors import RunError
from hotloop.training.run import Run
from tests.support.processes.in_process_command import Hotloop, commands
from tests.support.tasks.task_sources import put

TASK = """
from pathlib import Path
task = make(epochs=2)
if Path("watching").exists():
    Path("ran").touch()
"""
READERS = {
    "evaluate": ("evaluate", "run", "--on", "train"),
    "predict": ("predict", "run", "x.npy"),
    "export": ("export", "run", "--to", "model.safetensors"),
    "resume": ("train", "--resume", "run", "--epochs", "3"),
}


@pytest.fixture
def hotloop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Hotloop]:
    """The user who starts runs; `elsewhere` changes to another one."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "mine"))
    monkeypatch.delenv("HOTLOOP_TRUST", raising=False)
    with commands(tmp_path, monkeypatch, capfd) as run:
        put(tmp_path, TASK)
        np.save(tmp_path / "x.npy", np.ones((2, 4), "float32"))
        assert run("train", "task.py", "--device", "cpu", "--run", "run").code == 0
        (tmp_path / "watching").touch()
        yield run


def elsewhere(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(folder / "theirs"))


@pytest.mark.few("evaluate", "resume")
@pytest.mark.parametrize("reader", READERS)
def test_a_foreign_runs_code_does_not_run_until_it_is_trusted_once(
    hotloop: Hotloop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    elsewhere(tmp_path, monkeypatch)
    done = hotloop(*READERS[reader])
    assert done.code == 1
    assert "run is a foreign run" in done.err
    assert "--trust" in done.err
    assert not (tmp_path / "ran").exists()
    assert hotloop(*READERS[reader], "--trust").code == 0
    assert (tmp_path / "ran").exists()
    for other in READERS.values():
        assert hotloop(*other).code == 0, "once is enough, for all commands"


@pytest.mark.few("evaluate", "resume")
@pytest.mark.parametrize("reader", READERS)
def test_ones_own_runs_and_their_copies_need_no_word(hotloop: Hotloop, tmp_path: Path, reader: str) -> None:
    shutil.copytree(tmp_path / "run", tmp_path / "kept")
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "kept").rename(tmp_path / "run")
    assert hotloop(*READERS[reader]).code == 0
    assert (tmp_path / "ran").exists()


@pytest.mark.more
def test_the_environment_trusts_where_nobody_attends(
    hotloop: Hotloop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere(tmp_path, monkeypatch)
    monkeypatch.setenv("HOTLOOP_TRUST", "1")
    assert hotloop(*READERS["resume"]).code == 0
    monkeypatch.setenv("HOTLOOP_TRUST", "0")
    assert hotloop(*READERS["evaluate"]).code == 1


def test_other_code_under_a_trusted_id_is_foreign(hotloop: Hotloop, tmp_path: Path) -> None:
    """Whoever gets a copy and sends it back with other code has the id, and the digest is his to write."""
    source = tmp_path / "run" / "source" / "task.py"
    source.write_text(source.read_text() + "\nPath('stolen').touch()\n")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    record["source"]["digest"] = source_digest(files_of(tmp_path / "run" / "source"))
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    done = hotloop(*READERS["evaluate"])
    assert done.code == 1
    assert "foreign" in done.err
    assert not (tmp_path / "stolen").exists()


def test_a_run_of_a_version_without_ids_is_trusted_once(hotloop: Hotloop, tmp_path: Path) -> None:
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    del record["id"], record["seal"]
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    done = hotloop(*READERS["evaluate"])
    assert done.code == 1
    assert "or by a version of hotloop that stored no ids" in done.err
    assert hotloop(*READERS["evaluate"], "--trust").code == 0
    assert hotloop(*READERS["predict"]).code == 0


@pytest.mark.few("nothing")
@pytest.mark.parametrize("home", ["a file", "nothing"])
def test_where_trust_can_not_be_stored_a_line_says_so(
    hotloop: Hotloop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    if home == "a file":
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    else:
        monkeypatch.delenv("XDG_DATA_HOME")
        monkeypatch.setattr("os.path.expanduser", lambda path: path)
    done = hotloop("train", "task.py", "--device", "cpu", "--run", "other")
    assert done.code == 0
    assert len(re.findall("the run can't be stored as yours", done.err)) == 1
    assert hotloop("evaluate", "other", "--on", "train").code == 1
    done = hotloop("evaluate", "other", "--on", "train", "--trust")
    assert done.code == 0
    assert "the run can't be stored as yours" in done.err


def test_in_python_it_is_an_argument(hotloop: Hotloop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere(tmp_path, monkeypatch)
    with pytest.raises(RunError, match="foreign"):
        library.evaluate("run", on="train", device="cpu")
    assert not (tmp_path / "ran").exists()
    assert library.evaluate(Run.open("run"), on="train", device="cpu", trust=True).samples == 20
