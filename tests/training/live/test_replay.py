"""A run whose plan changes while it trains: repeated by its journal, stopped and continued, to the last bit."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import hotloop
from hotloop.core.files.run_folder import SWITCH_EVENT
from hotloop.errors import PlanError, RunError
from hotloop.plan import Plan
from hotloop.training import live_search
from hotloop.training.run import Run
from hotloop.tuning import auto
from hotloop.tuning.spare_time import IdleCores
from hotloop.tuning.window_race import WindowRace
from tests.support.killed_training import Killed, at_step, kill
from tests.support.live_runs import ProvenAtOnce, differences, patch_search, switches
from tests.support.processes.forked_server import Process, Server
from tests.support.tasks.full_state_task import task

EPOCHS, LAST_KILL = 6, 26
"""Epochs of a run, and the step before which real processes are killed: the races end later."""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def searching(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_search(monkeypatch.setattr)


def trained(path: Path, plan: Any = "auto", **options: Any) -> Run:
    return hotloop.fit(task(EPOCHS), run=path, progress=False, checkpoint_every="7", plan=plan, **options)


def replayed(path: Path, of: Path) -> Run:
    return trained(path, plan=f"replay:{of}")


@pytest.mark.usefixtures("searching")
def test_a_run_that_switched_is_repeated_bit_by_bit(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    made = switches(tmp_path / "run")
    assert len(made) > 6 and len({name for _, name, _ in made}) == 3 and any(window for *_, window in made)
    replayed(tmp_path / "again", tmp_path / "run")
    assert differences(tmp_path / "run", tmp_path / "again") == []
    assert switches(tmp_path / "again") == made
    assert Run.open(tmp_path / "again").plan == Run.open(tmp_path / "run").plan != Plan()
    trained(tmp_path / "plain", plan=None)
    assert differences(tmp_path / "run", tmp_path / "plain") != [], "the switches change no bit: the test shows nothing"


def _spare_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves a core to each child; the plan for that has other bits, and the child is paused in turn."""

    def fewer(plan: Plan) -> Plan:
        return plan.with_axes(precision="bf16", threads=1)

    monkeypatch.setattr(live_search, "with_fewer_threads", fewer)
    monkeypatch.setattr(IdleCores, "measure", lambda self: 0.0)
    monkeypatch.setattr(WindowRace, "winner", property(lambda race: race.plan if race.rival.threads else race.rival))
    monkeypatch.setattr(ProvenAtOnce, "is_paused", property(lambda child: child._polls % 2))
    only_forloop = lambda options, wanted, history, eager, say: [eager.with_axes(optimizer="forloop")]  # noqa: E731
    monkeypatch.setattr(auto, "live_candidates", only_forloop)


@pytest.mark.usefixtures("searching")
@pytest.mark.parametrize("step", [None, 6, 7, *(pytest.param(step, marks=pytest.mark.more) for step in range(8, 16))])
def test_steps_that_leave_a_core_to_the_child_are_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int | None
) -> None:
    _spare_a_core(monkeypatch)
    if step is None:
        trained(tmp_path / "run")
    else:
        with pytest.raises(Killed):
            killer = at_step(step, kill)
            killer.read_only = True  # type: ignore[attr-defined]
            trained(tmp_path / "run", callbacks=[killer])
        hotloop.fit(task(EPOCHS), run=tmp_path / "run", resume=True, progress=False)
    rows = [row for row in Run.open(tmp_path / "run").journal() if row["event"] == SWITCH_EVENT]
    reasons = [row["reason"] for row in rows]
    assert all(row["window"] for row in rows if row["reason"].startswith("one thread fewer"))
    for reason in (
        "one thread fewer while the child runs",
        "all threads while the child is paused",
        "since no child runs",
    ):
        assert any(reason in one for one in reasons), reasons
    replayed(tmp_path / "again", tmp_path / "run")
    assert differences(tmp_path / "run", tmp_path / "again") == []
    assert Run.open(tmp_path / "run").plan.optimizer == "forloop"


@pytest.mark.usefixtures("searching")
def test_a_missed_switch_would_be_seen(tmp_path: Path) -> None:
    trained(tmp_path / "run")
    journal = tmp_path / "run" / "journal.jsonl"
    rows = [json.loads(line) for line in journal.read_text().splitlines()]
    changed = [
        row | {"step": row["step"] + 1} if row["event"] == SWITCH_EVENT and row["number"] == 2 else row for row in rows
    ]
    journal.write_text("".join(json.dumps(row) + "\n" for row in changed))
    replayed(tmp_path / "again", tmp_path / "run")
    assert differences(tmp_path / "run", tmp_path / "again") != []


@pytest.mark.usefixtures("searching")
@pytest.mark.parametrize(
    "step", [3, 13, 27, *(pytest.param(step, marks=pytest.mark.more) for step in (11, 12, 20, 33, 41))]
)
def test_a_killed_run_equals_its_own_replay(tmp_path: Path, step: int) -> None:
    with pytest.raises(Killed):
        killer = at_step(step, kill)
        killer.read_only = True  # type: ignore[attr-defined]
        trained(tmp_path / "run", callbacks=[killer])
    before = switches(tmp_path / "run")
    hotloop.fit(task(EPOCHS), run=tmp_path / "run", resume=True, progress=False)
    assert switches(tmp_path / "run")[: len(before)] == before
    replayed(tmp_path / "again", tmp_path / "run")
    assert differences(tmp_path / "run", tmp_path / "again") == []


@pytest.mark.usefixtures("searching")
def test_a_run_that_is_resumed_with_another_plan_is_repeated_too(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        killer = at_step(30, kill)
        killer.read_only = True  # type: ignore[attr-defined]
        trained(tmp_path / "run", callbacks=[killer])
    hotloop.fit(task(EPOCHS), run=tmp_path / "run", resume=True, progress=False, plan=Plan(optimizer="forloop"))
    assert switches(tmp_path / "run")[-1] == (28, "optimizer=forloop", False)
    replayed(tmp_path / "again", tmp_path / "run")
    assert differences(tmp_path / "run", tmp_path / "again") == []


@pytest.mark.usefixtures("searching")
def test_the_end_says_how_to_repeat_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hotloop.fit(task(EPOCHS), run=tmp_path / "run", plan="auto")
    assert f"plan='replay:{tmp_path / 'run'}'" in capsys.readouterr().err.replace("\n", "")


def test_another_task_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch_search(patch.setattr)
        trained(tmp_path / "run")
    plan = f"replay:{tmp_path / 'run'}"
    for changes, what in (({"batch_size": 8}, "Task"), ({"seed": 9}, "seed"), ({"epochs": 3}, "number of steps")):
        other = hotloop.task.override_fields(task(EPOCHS), changes)
        with pytest.raises(RunError, match=what):
            hotloop.fit(other, run=tmp_path / "other", plan=plan, progress=False)
        assert not (tmp_path / "other").exists()


def test_a_run_that_can_not_be_repeated_is_refused(tmp_path: Path) -> None:
    trained(tmp_path / "plain", plan=None)
    with pytest.raises(RunError, match="one plan throughout"):
        replayed(tmp_path / "again", tmp_path / "plain")
    with pytest.raises(PlanError, match="no run at"):
        replayed(tmp_path / "again", tmp_path / "nowhere")
    with pytest.raises(PlanError, match="Leave out the single axes"):
        trained(tmp_path / "again", plan=f"replay:{tmp_path / 'plain'}", device="cpu")
    (tmp_path / "plain" / "journal.jsonl").unlink()
    with pytest.raises(RunError, match="has no journal"):
        replayed(tmp_path / "again", tmp_path / "plain")


@pytest.mark.usefixtures("searching")
@pytest.mark.parametrize("damage", ["line", "removed"])
def test_a_damaged_journal_is_refused(tmp_path: Path, damage: str) -> None:
    trained(tmp_path / "run")
    journal = tmp_path / "run" / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    place = [number for number, line in enumerate(lines) if json.loads(line)["event"] == SWITCH_EVENT][1]
    lines[place : place + 1] = ['{"event": "plan_switch", "step": -1}\n'] if damage == "line" else []
    journal.write_text("".join(lines))
    with pytest.raises(RunError, match="damaged"):
        replayed(tmp_path / "again", tmp_path / "run")
    if damage == "removed":
        with pytest.raises(RunError, match="is missing"):
            hotloop.fit(task(EPOCHS + 1), run=tmp_path / "run", resume=True, progress=False)


def test_a_user_who_may_hold_the_model_gets_no_live_search(
    tmp_path: Path, searching: None, capsys: pytest.CaptureFixture[str]
) -> None:
    hotloop.fit(task(2), run=tmp_path / "run", plan="auto", callbacks=[lambda view: None])
    line = (
        "auto searches for no faster plan beside this training: a callback may use the model, and a search makes others"
    )
    said = capsys.readouterr().err.replace("\n", " ")
    assert f"{line}; hotloop.tune(task) searches before the training" in said
    assert switches(tmp_path / "run") == []


def _wait_for_step(run: Path, step: int, process: Process) -> None:
    """Waits until a process may have done so many steps of a run."""
    until = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < until:
        with suppress(OSError, ValueError):
            if int((run / "reached").read_bytes()) >= step:
                return
        time.sleep(0.002)


def _begin(folder: Path, server: Server) -> Process:
    """Starts or resumes the run in a real process."""
    root = Path(__file__).parents[3]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    script = folder / "training.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(root)!r})\nfrom tests.support import live_runs\nlive_runs.main()\n"
    )
    return server.start(script, folder / "run", str(EPOCHS), script=True, cwd=root, env=environment)


def _killed_and_resumed(folder: Path, rng: random.Random, kills: int, server: Server) -> None:
    """Kills real processes at random moments of the search, which goes on after each kill; the last one ends by itself."""
    windows = []
    for step in sorted(rng.randrange(1, LAST_KILL) for _ in range(kills)):
        process = _begin(folder, server)
        _wait_for_step(folder / "run", step, process)
        time.sleep(rng.uniform(0.0, 0.02))
        process.send_signal(signal.SIGKILL)
        assert process.wait(300) == -signal.SIGKILL
        windows.append(_count_windows(folder / "run"))
    process = _begin(folder, server)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert max(windows) < _count_windows(folder / "run"), "a kill was after the last race"


def _count_windows(path: Path) -> int:
    return sum(is_window for *_, is_window in switches(path))


@pytest.mark.more
@pytest.mark.parametrize("seed", range(20))
def test_a_run_killed_three_times_equals_its_own_replay(tmp_path: Path, server: Server, seed: int) -> None:
    _killed_and_resumed(tmp_path, random.Random(seed), 3, server)
    replayed(tmp_path / "again", tmp_path / "run")
    assert differences(tmp_path / "run", tmp_path / "again") == []


def test_a_run_killed_once_equals_its_own_replay(tmp_path: Path, server: Server) -> None:
    _killed_and_resumed(tmp_path, random.Random(99), 1, server)
    replayed(tmp_path / "again", tmp_path / "run")
    assert differences(tmp_path / "run", tmp_path / "again") == []
