"""Any damage to any file of a run folder: training ends as it would have, or one line says what is wrong.

A plan or a record that was changed and is still valid is named, and used as it is: then only the line is asked for.
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotloop.errors import HotloopError
from hotloop.training.run import Run
from tests.support.killed_training import EPOCHS
from tests.support.processes.resumed_training import disagreements
from tests.support.programs import a_task
from tests.support.runs import resume_run, start_run

USED_AS_IT_IS = ("run.json", "plan.toml")


def trained(path: Path, said: list[str], stop: int | None = None) -> None:
    """Trains a small Task to its end, or goes on with it; or is killed after a step."""
    from hotloop.task_file import LoadedTask
    from hotloop.training.cadence import SpanPacer
    from tests.support.killed_training import Killed, at_step, kill

    task = a_task(epochs=EPOCHS, validation=0.2)
    callbacks = [at_step(stop, kill)] if stop else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpanPacer, "steps", lambda self: 1)
        patch.setattr("hotloop.report.learning_curves.draw_curves", lambda view: None)
        patch.setattr("hotloop.training.start.draw_curves", lambda view: None)
        patch.setattr("hotloop.training.tensorboard.is_installed", lambda: False)
        common = dict(axes={"device": "cpu"}, callbacks=callbacks, say=said.append)
        try:
            if path.exists():
                resume_run(path, task=task, **common)
            else:
                start_run(LoadedTask(task, None, {}), run=path, checkpoint_every="3", **common)
        except Killed:
            pass


@pytest.fixture(scope="module")
def killed_small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "run"
    trained(path, [], stop=8)
    return path


@pytest.fixture(scope="module")
def whole_small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "run"
    trained(path, [])
    return path


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """A hang is an error."""

    def over(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"it hung for {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


WRONG = [b"", b"\n", b"null", b"[]", b"{}", b"5", b'"x"', b"\xff\xfe\x00", b"{" * 50_000, b"9" * 5_000, "²".encode()]


def damage(draw: st.DrawFn, path: Path, files: list[Path]) -> str:
    """Damages a file in one way; says which."""
    content = path.read_bytes()
    kind = draw(st.sampled_from(["cut", "flip", "wrong", "key", "swap", "insert", "gone"]))
    if kind == "cut":
        path.write_bytes(content[: draw(st.integers(0, max(0, len(content) - 1)))])
    elif kind == "flip" and content:
        place = draw(st.integers(0, len(content) - 1))
        path.write_bytes(content[:place] + bytes([content[place] ^ draw(st.integers(1, 255))]) + content[place + 1 :])
    elif kind == "insert":
        place = draw(st.integers(0, len(content)))
        path.write_bytes(content[:place] + draw(st.binary(min_size=1, max_size=9)) + content[place:])
    elif kind == "wrong":
        path.write_bytes(draw(st.sampled_from(WRONG)))
    elif kind == "key":
        lines = content.splitlines(keepends=True)
        gone = draw(st.integers(0, max(0, len(lines) - 1)))
        path.write_bytes(b"".join(lines[:gone] + lines[gone + 1 :]))
    elif kind == "swap":
        other = draw(st.sampled_from(files))
        theirs = other.read_bytes()
        other.write_bytes(content)
        path.write_bytes(theirs)
        return f"swap of {path.name} and {other.name}"
    else:
        path.unlink()
    return f"{kind} of {path.name}"


def survives(data: st.DataObject, killed: Path, whole: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, at_most(120):
        path = Path(shutil.copytree(killed, Path(folder) / "run"))
        files = sorted(one for one in path.rglob("*") if one.is_file() and one.name != ".lock")
        done = data.draw(st.composite(lambda draw: damage(draw, draw(st.sampled_from(files)), files))())
        said: list[str] = []
        try:
            trained(path, said)
        except HotloopError as error:
            assert "\n" not in str(error), done
            return
        if any("was changed since hotloop wrote it" in line for line in said):
            assert any(name in done for name in USED_AS_IT_IS), done
            return
        assert disagreements(whole, path) == [], (done, said)
        assert Run.open(path).reason == "finished", done


COMMON = dict(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@settings(max_examples=25, **COMMON)  # type: ignore[arg-type]
@given(data=st.data())
def test_a_damaged_folder_is_right_or_says_so(data: st.DataObject, killed_small: Path, whole_small: Path) -> None:
    survives(data, killed_small, whole_small)


@pytest.mark.more
@settings(max_examples=200, **(COMMON | {"derandomize": False}))  # type: ignore[arg-type]
@given(data=st.data())
def test_so_does_each_of_many(data: st.DataObject, killed_small: Path, whole_small: Path) -> None:
    survives(data, killed_small, whole_small)
