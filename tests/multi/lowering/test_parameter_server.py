"""Asynchronous training with real worker processes, and real signals to them."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.core.state import differing_paths
from hotloop.errors import HotloopError, TrainingError
from hotloop.lowering.build import lower
from hotloop.lowering.parameter_server import server_program
from hotloop.lowering.parameter_server.server_program import ParameterServerProgram
from hotloop.lowering.parameter_server.workers import process_pool
from hotloop.lowering.parameter_server.workers.process_pool import ProcessPool
from hotloop.lowering.parameter_server.workers.worker import RemoteTask
from hotloop.lowering.parameter_server.workers.worker_start import single_worker_plan
from hotloop.lowering.program import Program
from hotloop.plan import Plan
from hotloop.training.run import Run
from tests.conftest import RunCli
from tests.support.processes.process_tree import no_process_of_ray_is_left  # noqa: F401 - a fixture of this module

SAMPLES, BATCH = 203, 8
PLAN = Plan(parallel="async", ranks=3)

FILE = """
import torch, hotloop
from torch import nn

def task(fails: bool = False) -> hotloop.Task:
    x = torch.randn(203, 4, generator=torch.Generator().manual_seed(0))
    loss = nn.MSELoss()

    def step(model, batch):
        if fails and model.training and bool((batch == x[5]).all(1).any()):
            raise ValueError("a mistake of my own")
        return loss(model(batch), batch)

    return hotloop.Task(model=lambda: nn.Linear(4, 4), step=step, optimizer=lambda p: torch.optim.Adam(p, 1e-2),
                        data=x, validation=40, batch_size=8, epochs=2, seed=0)
"""


def task(step_s: float = 0.0) -> hotloop.Task:
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0))
    loss = nn.MSELoss()

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        time.sleep(step_s)
        result: Tensor = loss(model(batch), batch)
        return result

    return hotloop.Task(
        model=lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2)),
        step=step,
        optimizer=lambda p: torch.optim.Adam(p, 1e-2),
        data=x,
        batch_size=BATCH,
        epochs=2,
    )


@contextmanager
def trained_by(
    workers: int, given: hotloop.Task, say: Callable[[str], None] = print
) -> Iterator[ParameterServerProgram]:
    program = lower(given, PLAN, say)
    assert isinstance(program, ParameterServerProgram)
    try:
        program.set_workers(
            ProcessPool(RemoteTask.from_task(given, Path(), None, {}), single_worker_plan(PLAN), workers)
        )
        yield program
    finally:
        program.close()


def an_epoch(program: Program) -> dict[str, float]:
    while not program.advance(3).ended:
        pass
    sums = program.read_sums()
    program.end_epoch()
    return sums


def test_one_worker_process_comes_bitwise_to_what_one_process_comes_to() -> None:
    here = lower(task(), Plan())
    with trained_by(1, task()) as program:
        for _ in range(2):
            assert an_epoch(program) == an_epoch(here)
        assert differing_paths(program.state(), here.state()) == []


def test_a_killed_and_a_stopped_worker_cost_no_sample_and_hold_nobody_up() -> None:
    lines: list[str] = []
    with trained_by(3, task(step_s=0.02), lines.append) as program:
        crew = program.feed.crew
        assert isinstance(crew, ProcessPool)
        pids = crew.pids()
        program.advance(6)
        os.kill(pids[0], signal.SIGKILL)
        os.kill(pids[1], signal.SIGSTOP)
        for _ in range(2):
            while not program.advance(3).ended:
                pass
            assert program.read_sums()["samples"] == SAMPLES
            assert sorted(program.feed.ledger.counted) == list(range(-(-SAMPLES // BATCH)))
            program.end_epoch()
        assert set(program.feed.ledger.counted.values()) == {2}
        assert any(line.startswith("worker 0 was killed by SIGKILL") for line in lines)
    assert not any(psutil.pid_exists(pid) and _lives(pid) for pid in pids.values())


@pytest.mark.more
def test_a_signal_is_heard_though_all_workers_have_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_program, "_PATIENCE_S", 0.5)
    here, loss = os.getpid(), nn.MSELoss()

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        if os.getpid() != here:
            (tmp_path / f"stopped-{os.getpid()}").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
        return cast(Tensor, loss(model(batch), batch))

    def signalling() -> None:
        while len(list(tmp_path.glob("stopped-*"))) < 2:
            time.sleep(0.05)
        os.kill(here, signal.SIGTERM)

    thread = threading.Thread(target=signalling, daemon=True)
    thread.start()
    given = replace(task(), step=step)
    with pytest.raises(TrainingError, match=r"^stopped \(SIGTERM\) without saving: no worker has answered for \d+s"):
        hotloop.fit(given, run=tmp_path / "run", plan=Plan(parallel="async", ranks=2), progress=False)


@pytest.mark.more
def test_a_training_whose_workers_have_all_stopped_ends_within_the_limit(tmp_path: Path) -> None:
    here, loss = os.getpid(), nn.MSELoss()

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGSTOP)
        return cast(Tensor, loss(model(batch), batch))

    given, plan = replace(task(), step=step), Plan(parallel="async", ranks=2)
    with pytest.raises(TrainingError, match=r"^no worker has answered for 3s; expected a gradient of any worker\. "):
        hotloop.fit(given, run=tmp_path / "run", plan=plan, rank_timeout="3s", progress=False)


@pytest.mark.more
def test_a_worker_that_dies_while_it_is_sent_something_costs_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever words RPC has for that."""
    ask, lines, killed = process_pool.rpc.rpc_async, list[str](), list[str]()

    def dying(name: str, *args: Any, **how: Any) -> Any:
        if killed or not name.startswith("worker-0-"):
            return ask(name, *args, **how)
        killed.append(name)
        os.kill(pids[0], signal.SIGKILL)
        broken: torch.futures.Future[Any] = torch.futures.Future()
        broken.set_exception(RuntimeError("async error on socket: Connection reset by peer"))
        return broken

    with trained_by(2, task(), lines.append) as program:
        crew = program.feed.crew
        assert isinstance(crew, ProcessPool)
        pids = crew.pids()
        monkeypatch.setattr(process_pool.rpc, "rpc_async", dying)
        assert an_epoch(program)["samples"] == SAMPLES
    assert killed
    assert any(line.startswith("worker 0 was killed by SIGKILL") for line in lines)


@pytest.mark.more
def test_a_worker_that_is_killed_before_all_have_joined_ends_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    join = process_pool._join_rpc

    def late(*args: Any, **options: Any) -> None:
        (victim,) = (one for one in multiprocessing.active_children() if one.name == "hotloop worker 0")
        victim.kill()
        victim.join()
        join(*args, **options)

    monkeypatch.setattr(process_pool, "_join_rpc", late)
    monkeypatch.setattr(process_pool, "_JOIN_S", 2.0)
    with (
        pytest.raises(TrainingError, match=r"^worker 0 was killed by SIGKILL before its first batch"),
        trained_by(2, task()),
    ):
        pass


@pytest.mark.more
def test_a_worker_that_stops_while_it_builds_its_model_ends_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    here = os.getpid()

    def model() -> nn.Module:
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGSTOP)
        return nn.Linear(4, 4)

    monkeypatch.setattr(process_pool, "LONGEST_WAIT_S", 2.0)
    with (
        pytest.raises(TrainingError, match=r"^not all workers have built the model within 2s\. "),
        trained_by(2, replace(task(), model=model)),
    ):
        pass


@pytest.mark.more
def test_a_worker_that_lives_and_cannot_be_reached_ends_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **how: Any) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_exception(RuntimeError("no route to host"))
        return future

    monkeypatch.setattr(process_pool, "_EXIT_WAIT_S", 0.01)
    with trained_by(1, task()) as program:
        monkeypatch.setattr(process_pool.rpc, "rpc_async", broken)
        with pytest.raises(TrainingError, match="worker 0 can't be reached: RuntimeError: no route to host"):
            an_epoch(program)


@pytest.mark.parametrize(
    ("device", "here", "expected"),
    [
        ("cuda:0", ["cpu", "cuda:0", "cuda:1"], ["cuda:0", "cuda:1", "cuda:0"]),
        ("cuda:0", ["cpu", "cuda:0"], ["cuda:0"] * 3),
        ("cpu", ["cpu", "cuda:0", "cuda:1"], ["cpu"] * 3),
    ],
)
def test_workers_have_the_devices_of_the_plans_kind_in_turn(device: str, here: list[str], expected: list[str]) -> None:
    assert [process_pool.worker_device(worker, device, here) for worker in range(3)] == expected


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.more
def test_an_actor_that_is_killed_comes_back() -> None:
    pytest.importorskip("ray", reason="needs hotloop[ray]")
    from hotloop.lowering.parameter_server.workers.ray_workers import ActorPool

    given, lines = task(step_s=0.05), list[str]()
    program = lower(given, PLAN, lines.append)
    assert isinstance(program, ParameterServerProgram)
    try:
        program.set_workers(
            crew := ActorPool(RemoteTask.from_task(given, Path(), None, {}), single_worker_plan(PLAN), 2)
        )
        before = crew.pids()
        program.advance(6)
        os.kill(before[0], signal.SIGKILL)
        back = False
        while not back:
            while not program.advance(3).ended:
                pass
            assert program.read_sums()["samples"] == SAMPLES
            back = bool(program.feed.lost) and 0 in program.feed.ledger.counted.values()
            program.end_epoch()
        assert crew.pids()[0] != before[0] and crew.pids()[1] == before[1]
        assert [line for line in lines if "died" in line] == lines
    finally:
        program.close()


@pytest.mark.more
def test_when_all_workers_are_killed_it_says_so_and_new_ones_can_be_employed() -> None:
    for _ in range(2):
        with trained_by(1, task(step_s=0.02)) as program:
            crew = program.feed.crew
            assert isinstance(crew, ProcessPool)
            program.advance(2)
            os.kill(crew.pids()[0], signal.SIGKILL)
            with pytest.raises(TrainingError, match="all workers have ended"):
                an_epoch(program)


def test_what_cannot_be_sent_is_told() -> None:
    lock = threading.Lock()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        with lock:
            return (output - target).square().mean()

    given = hotloop.Task(
        model=lambda: nn.Linear(1, 1),
        loss=loss,
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        data=(torch.ones(8, 1), torch.ones(8, 1)),
    )
    with pytest.raises(HotloopError, match="can't be sent to other processes"):
        RemoteTask.from_task(given, Path(), None, {})


@pytest.mark.more
def test_the_command_trains_stops_and_goes_on(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(FILE)
    run = tmp_path / "run"
    axes = ("--set", "parallel=async", "--ranks", "2", "--set", "staleness=3")
    first = run_cli("train", "small.py", *axes, "--run", run, "--epochs", "1", "--json")
    assert first.returncode == 0, first.stderr
    document = json.loads(first.stdout)
    assert document["plan"]["parallel"] == "async" and document["plan"]["staleness"] == 3
    assert [(row["step"], row["samples"]) for row in document["epochs"]] == [(21, 163)]
    then = run_cli("train", "--resume", run, "--epochs", "2", "--set", "parallel=none", "--json")
    assert then.returncode == 0, then.stderr
    assert [(row["step"], row["samples"]) for row in json.loads(then.stdout)["epochs"]] == [(21, 163), (42, 163)]
    assert len(Run.open(run).epochs) == 2


@pytest.mark.more
def test_the_error_of_a_worker_is_what_the_user_sees(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(FILE)
    failed = run_cli("train", "small.py", "--set", "parallel=async", "--ranks", "2", "-p", "fails=true")
    assert failed.returncode == 1
    assert "a mistake of my own (small.py:11)" in failed.stderr
    assert "Traceback" not in failed.stderr
