"""A search beside a training that goes wrong: the training goes on, and no process stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import hotloop
from hotloop.lowering.program import Program
from hotloop.plan import Plan
from hotloop.training import live_search
from hotloop.training.run import Run
from hotloop.tuning import candidate_process, window_race
from tests.support.live_runs import patch_search, switches
from tests.support.tasks.full_state_task import task

pytestmark = pytest.mark.usefixtures("one_thread")
winner = window_race.WindowRace.winner


def candidates(path: Path) -> list[dict[str, Any]]:
    return [row for row in Run.open(path).journal() if row["event"] == "plan_candidate"]


@pytest.mark.parametrize("fault", ["dies", "hangs", "fills the disk", "is wrong"])
def test_a_candidate_that_fails_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    def work(*arguments: Any) -> dict[str, Any]:
        if fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hangs":
            time.sleep(1000)
        if fault == "fills the disk":
            Path("/dev/full").write_bytes(b"0")
        parity = {"plan": "", "parity": "broken", "reason": "the weights differ", "states": 16}
        return {"gain": 2.0, "parity": parity}

    patch_search(monkeypatch.setattr, child=None)
    monkeypatch.setattr(candidate_process, "_prepare", work)
    if fault == "hangs":
        monkeypatch.setattr(candidate_process, "_MIN_LIMIT_S", 0.05)
        monkeypatch.setattr(candidate_process, "_LIMIT_FACTOR", 0.0)
    run = hotloop.fit(task(40), run=tmp_path / "run", plan="auto", progress=False)
    assert run.reason == "finished" and len(run.epochs) == 40
    expected = {"dies": "died", "hangs": "did not end within", "is wrong": "the weights differ"}
    expected |= {"fills the disk": "No space left on device"}
    found = candidates(tmp_path / "run")
    assert found and all(expected[fault] in row["reason"] and not row["used"] for row in found)
    assert len(switches(tmp_path / "run")) == 1


def test_a_candidate_that_becomes_slower_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first plan is slow until its rival has won; then the rival is."""
    slow: list[str] = [""]
    advance = Program.advance

    def sleeping(self: Program, steps: int) -> Any:
        if self.parts.plan.precision == "bf16" and slow[0] == "rival":
            time.sleep(0.03 * steps)
        if self.parts.plan.precision == "default" and slow[0] == "first":
            time.sleep(0.03 * steps)
        return advance(self, steps)

    patch_search(monkeypatch.setattr)
    monkeypatch.setattr(window_race.WindowRace, "winner", winner)
    monkeypatch.setattr(window_race, "_MAX_PAIRS", 12)
    monkeypatch.setattr(Program, "advance", sleeping)
    monkeypatch.setattr(live_search, "_RECENT_SPANS", 5)
    monkeypatch.setattr(live_search, "_MIN_REST_S", 0.0)
    only_bf16 = lambda options, wanted, history, eager, say: [eager.with_axes(precision="bf16")]  # noqa: E731
    monkeypatch.setattr("hotloop.tuning.auto.live_candidates", only_bf16)

    def turn(view: hotloop.View) -> None:
        slow[0] = "first" if view.step < 200 else "rival"

    turn.read_only = True  # type: ignore[attr-defined]
    hotloop.fit(task(40), run=tmp_path / "run", plan="auto", progress=False, callbacks=[turn])
    in_use = [plan for _, plan, window in switches(tmp_path / "run") if not window]
    assert "bf16" in "".join(in_use), "the rival never won"
    assert "bf16" not in in_use[-1], "the slower plan stayed in use"
    assert [row["used"] for row in candidates(tmp_path / "run")][:1] == [True]


HANGING = """
import os, sys, time
from pathlib import Path
import hotloop
from hotloop.tuning import candidate_process
from tests.support.live_runs import patch_search
from tests.support.tasks.full_state_task import task

def hang(*arguments):
    Path(sys.argv[2]).write_text(str(os.getpid()))
    time.sleep(1000)

patch_search(setattr, child=None)
candidate_process._prepare = hang
hotloop.fit(task(10_000), run=sys.argv[1], plan="auto", progress=False)
"""


@pytest.mark.parametrize("paused", [False, True], ids=["running", "paused"])
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.more)]
)
def test_the_child_ends_with_the_training(tmp_path: Path, number: signal.Signals, paused: bool) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    file = tmp_path / "pid"
    command = [sys.executable, "-c", HANGING, str(tmp_path / "run"), str(file)]
    process = subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[3])
    try:
        until = time.monotonic() + 120
        while not (file.is_file() and file.read_text()) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        pid = int(file.read_text())
        if paused:
            os.killpg(pid, signal.SIGSTOP)
        assert psutil.pid_exists(pid)
        process.send_signal(number)
        process.wait(120)
        until = time.monotonic() + 30
        while _is_alive(pid) and time.monotonic() < until:
            time.sleep(0.05)
        assert not _is_alive(pid)
    finally:
        process.kill()


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_plan_that_wins_is_the_runs_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch_search(monkeypatch.setattr)
    run = hotloop.fit(task(10), run=tmp_path / "run", plan="auto", progress=False)
    assert Plan.read(tmp_path / "run" / "plan.toml") == run.plan
    assert run.plan.optimizer == "forloop"  # the last of the candidates
