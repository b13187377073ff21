"""A run's folder holds code: that of runs that this user started runs, that of others only after a word."""

from __future__ import annotations

import importlib.util
import json
import py_compile
import re
import shutil
import zipfile
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
    assert "was changed since you started or trusted the run" in done.err
    assert not (tmp_path / "stolen").exists()


PAYLOAD = "import pathlib\npathlib.Path('stolen').touch()\n"


def _entry(run: Path, **fields: object) -> None:
    record = json.loads((run / "run.json").read_text())
    record["source"] |= fields
    (run / "run.json").write_text(json.dumps(record))


def _bytecode(run: Path) -> None:
    (run / "x.py").write_text(PAYLOAD)
    for name in ("sklearn", "pandas", "PIL", "sitecustomize"):
        py_compile.compile(str(run / "x.py"), cfile=str(run / "source" / f"{name}.pyc"))
    cached = importlib.util.cache_from_source(str(run / "source" / "task.py"))
    py_compile.compile(str(run / "x.py"), cfile=cached, invalidation_mode=UNCHECKED)


def _link(run: Path, name: str) -> None:
    (run / "package").mkdir()
    (run / "package" / "__init__.py").write_text(PAYLOAD)
    (run / "source" / name).symlink_to("../package")


def _whole_source_is_a_link(run: Path) -> None:
    (run / "source").rename(run / "elsewhere")
    (run / "source").symlink_to("elsewhere")


def _archive(run: Path) -> None:
    with zipfile.ZipFile(run / "source" / "sklearn.zip", "w") as file:
        file.writestr("sklearn/__init__.py", PAYLOAD)


UNCHECKED = py_compile.PycInvalidationMode.UNCHECKED_HASH
CHANGED, LINK = "was changed since you started or trusted the run", "is a link"
ATTACKS = {
    "a parent folder": (lambda run: ((run / "a.py").write_text(PAYLOAD), _entry(run, file="../a.py")), CHANGED),
    "an absolute path": (
        lambda run: ((run / "a.py").write_text(PAYLOAD), _entry(run, file=str(run / "a.py"))),
        CHANGED,
    ),
    "bytecode": (_bytecode, None),
    "a linked package": (lambda run: _link(run, "sklearn"), LINK),
    "a linked file": (lambda run: (run / "source" / "PIL.py").symlink_to("../a.py"), LINK),
    "a linked source": (_whole_source_is_a_link, LINK),
    "another torch": (lambda run: (run / "source" / "torch.py").write_text(PAYLOAD), CHANGED),
    "sitecustomize": (lambda run: (run / "source" / "sitecustomize.py").write_text(PAYLOAD), CHANGED),
    "a path file": (lambda run: (run / "source" / "a.pth").write_text(PAYLOAD), CHANGED),
    "a shared object": (lambda run: (run / "source" / "sklearn.so").write_bytes(b"\x7fELF"), CHANGED),
    "another case": (lambda run: (run / "source" / "Task.PY").write_text(PAYLOAD), CHANGED),
    "a package without __init__": (
        lambda run: ((run / "source/pandas").mkdir(), (run / "source/pandas/io.py").write_text(PAYLOAD)),
        CHANGED,
    ),
    "an archive": (_archive, CHANGED),
    "a pickle": (lambda run: (run / "source" / "weights.pt").write_bytes(b"cos\nsystem\n."), CHANGED),
    "another origin": (lambda run: _entry(run, origin=str(run)), CHANGED),
    "another module": (lambda run: _entry(run, module="torch"), CHANGED),
    "another name": (lambda run: _entry(run, attribute="make"), CHANGED),
    "other arguments": (lambda run: _entry(run, parameters={"path": "a.pt"}), CHANGED),
}
"""Changes of a trusted run, and a part of the line that refuses the code; None where the change is without effect."""


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_changed_copy_of_a_trusted_run_executes_nothing(hotloop: Hotloop, tmp_path: Path, attack: str) -> None:
    change, refusal = ATTACKS[attack]
    change(tmp_path / "run")
    done = hotloop(*READERS["evaluate"])
    assert not (tmp_path / "stolen").exists()
    if refusal is None:
        assert done.code == 0, done.err
    else:
        assert (done.code, done.err.count("\n")) == (1, 1), done.err
        assert refusal in done.err
        assert not (tmp_path / "ran").exists(), "the run's own code ran before the check"


def test_a_name_outside_of_the_folder_is_refused_also_where_all_runs_are_trusted(
    hotloop: Hotloop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run" / "a.py").write_text(PAYLOAD)
    _entry(tmp_path / "run", file="../a.py")
    monkeypatch.setenv("HOTLOOP_TRUST", "1")
    done = hotloop(*READERS["evaluate"])
    assert (done.code, "the run names ../a.py" in done.err) == (1, True), done.err
    assert not (tmp_path / "stolen").exists()


def test_trust_in_a_folder_that_others_can_write_is_refused(hotloop: Hotloop, tmp_path: Path) -> None:
    (tmp_path / "mine" / "hotloop" / "trusted").chmod(0o777)
    done = hotloop(*READERS["evaluate"])
    assert (done.code, "other users can write" in done.err) == (1, True), done.err
    assert not (tmp_path / "ran").exists()


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
