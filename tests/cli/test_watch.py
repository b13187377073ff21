"""`hotloop watch` and `train --watch` as commands: who may read the page, when the page ends, wrong calls."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import psutil
import pytest

from tests.support.processes.forked_server import Server
from tests.support.processes.in_process_command import SMALL, Hotloop
from tests.support.processes.live_pages import Served, address_in, until, watching
from tests.support.stored_runs import write_run


def test_two_pages_at_once_and_a_port_that_is_taken(hotloop: Hotloop, tmp_path: Path) -> None:
    write_run(tmp_path / "runs/first")
    with watching(tmp_path, "runs") as one, watching(tmp_path, "runs/first") as other:
        assert one.port != other.port
        assert [[row["task"] for row in page.runs()] for page in (one, other)] == [["tiny"]] * 2
        assert one.get("/", token=other.token)[0] == 403
        done = hotloop("watch", "runs", "--port", one.port)
    assert done.code == 1 and len(done.err.splitlines()) == 1
    assert "another port" in done.err


def test_it_ends_without_a_page_and_a_training(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with watching(tmp_path, "runs", idle="1s") as watch:
        code, said = watch.wait()
    assert code == 0 and "ended" in said


def test_ctrl_c_ends_it(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with watching(tmp_path, "runs") as watch:
        assert watch.get("/")[0] == 200
        code, said = watch.end(signal.SIGINT)
    assert code == 130 and "Traceback" not in said


def test_other_hosts_are_refused_unless_asked_for(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/first")
    with watching(tmp_path, "runs") as watch:
        assert watch.address.startswith("http://127.0.0.1:")
        assert watch.get("/", host=f"10.1.2.3:{watch.port}")[0] == 403
    with watching(tmp_path, "runs", "--host", "0.0.0.0") as watch:
        assert watch.get("/", host=f"10.1.2.3:{watch.port}")[0] == 200  # an address of this machine, as far as known
        assert watch.get("/", host=f"evil.example:{watch.port}")[0] == 403
        assert watch.get("/", host=f"{socket.gethostname()}:{watch.port}")[0] == 200
        assert watch.get("/", token="")[0] == 403


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["none"], "doesn't exist"),
        (["file"], "is a file"),
        ([".", "--host", "999.1.1.1"], "can't be served"),
        ([".", "--port", "99999999"], "can't be served"),
        ([".", "--idle", "soon"], "idle='soon'"),
    ],
)
def test_a_wrong_call_is_one_line(hotloop: Hotloop, tmp_path: Path, arguments: list[str], expected: str) -> None:
    (tmp_path / "file").touch()
    done = hotloop("watch", *arguments)
    assert done.code == 1 and expected in done.err and len(done.err.splitlines()) == 1


def test_the_page_of_a_training_ends_after_it(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTLOOP_WATCH_IDLE", "2s")
    (tmp_path / "task.py").write_text(f"{SMALL}task = make(epochs=3)\n")
    (tmp_path / "token.py").write_text("raise RuntimeError('a module of the standard library has this name')")
    with (tmp_path / "said").open("w") as said:
        training = server.start("train", "task.py", "--run", "run", "--watch", cwd=tmp_path, stderr=said)
    address = address_in(tmp_path / "said")
    assert training.wait(120) == 0
    page = Served(address)
    until(lambda: not page.is_there(), "the page goes on")
    assert not [one for one in psutil.process_iter(["cmdline"]) if str(tmp_path) in str(one.info["cmdline"])]


def test_a_page_that_cannot_be_served_ends_no_training(hotloop: Hotloop, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(f"{SMALL}task = make()\n")
    done = hotloop("train", "task.py", "--run", "run", "--watch", "--host", "999.1.1.1")
    assert done.code == 0 and "the live page can't be served" in done.err


def test_a_page_that_ends_early_is_one_line(hotloop: Hotloop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTLOOP_WATCH_IDLE", "soon")
    late = "def slow(view):\n    import time\n    if view.event == 'epoch':\n        time.sleep(1)\n"
    (tmp_path / "task.py").write_text(f"{SMALL}{late}slow.read_only = True\ntask = make(epochs=20, callbacks=[slow])\n")
    done = hotloop("train", "task.py", "--run", "run", "--watch", "--stop-after", "15s")
    assert done.code == 0 and done.err.count("the live page ended with exit code 1") == 1
