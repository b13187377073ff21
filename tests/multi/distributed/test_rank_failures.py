"""Ranks that are killed, stopped, or fail: real signals to real processes, each in a training of its own."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hotloop
from hotloop.distributed.join import BEGAN
from hotloop.errors import MemoryExhausted, TrainingError
from hotloop.plan import Plan
from hotloop.training.run import Run
from tests.support.processes import rank_processes  # noqa: F401 - imports what each fork would
from tests.support.processes.resumed_training import disagreements
from tests.support.tasks.rank_tasks import images

PLAN = Plan(parallel="data", ranks=3)
CULPRIT, STEP = 1, 13


def task(
    trouble: Callable[[], Any] = lambda: None,
    marker: Path | None = None,
    culprit: int = CULPRIT,
    step: int = STEP,
    *,
    evaluating: bool = False,
) -> hotloop.Task:
    """Comes to trouble once, on one rank, in one of its steps; the marker remembers that it was there.

    Args:
        evaluating: in the first validation after that step instead.
    """
    updates = [0]  # the loss alone is tried before training, too

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        ranked = torch.distributed.is_initialized() and torch.distributed.get_rank() == culprit
        done = updates[0] + 1
        now = done > step and not torch.is_grad_enabled() if evaluating else torch.is_grad_enabled() and done == step
        if marker is not None and ranked and now and not marker.exists():
            marker.touch()
            trouble()
        return nn.functional.cross_entropy(output, target)

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        def counted(*_: Any) -> None:
            updates[0] += 1

        made = torch.optim.Adam(parameters, lr=0.01)
        made.register_step_post_hook(counted)
        return made

    return images(torch.float32, samples=150, batch_size=16, validation=30, loss=loss, optimizer=optimizer, epochs=3)


def fit(path: Path, given: hotloop.Task, **options: Any) -> Run:
    return hotloop.fit(given, run=path, plan=PLAN, checkpoint_every="5", **options)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(seconds: int = 7) -> None:
    """Until a process of its own wakes it up."""
    subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(2.5)  # there are two signs of it before the training, which is short, can be over


def kill_an_hour_later(run: Path) -> None:
    """As if the ranks had begun an hour ago: the store has them begin then."""
    store = torch.distributed.distributed_c10d._get_default_store()
    while isinstance(store, torch.distributed.PrefixStore):
        store = store.underlying_store
    key = f"{BEGAN}/{run}"
    store.set(key, str(float(store.get(key)) - 3600))
    kill()


def raise_error() -> None:
    raise ValueError("the culprit has had enough")


def allocate() -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return fit(tmp_path_factory.mktemp("whole") / "run", task(), progress=False)


@pytest.mark.more
def test_only_the_first_rank_writes_and_speaks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = fit(tmp_path / "run", task())
    out, err = capfd.readouterr()
    assert err.count("epoch 1/3") == 1
    assert out == ""
    assert len([event for event in run.journal() if event["event"] == "start"]) == 1
    assert run.plan == PLAN
    assert run.task is not None
    (cost,) = [event for event in run.journal() if event["event"] == "ranks"]
    assert len(cost["waiting"]) == len(cost["communication"]) == PLAN.ranks
    assert err.count("in waiting and in communication: rank 0 ") == 1
    each = [event for event in run.journal() if event["event"] == "waiting"]
    assert [event["epoch"] for event in each] == [1, 2, 3]
    assert all(len(event["waiting_ms"]) == len(event["communication_ms"]) == PLAN.ranks for event in each)


def test_a_killed_rank_is_named_and_the_run_ends_as_if_nothing_had_happened(
    whole: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = fit(tmp_path / "run", task(kill, tmp_path / "killed"))
    assert (tmp_path / "killed").exists()
    assert "rank 1 was killed (SIGKILL): all 3 start again from the last checkpoint (1 of 3)" in capfd.readouterr().err
    events = [(event["event"], event.get("step")) for event in run.journal() if event["event"] in ("start", "resume")]
    assert events == [("start", 0), ("resume", 10)]
    assert disagreements(whole.path, run.path) == []


def layers() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 4))


def few_steps(*trouble: Any) -> hotloop.Task:
    """Six of them, of a model that every way of sharing takes; trouble comes in the fifth."""
    changes: dict[str, Any] = dict(model=layers, average=None, validation=None, batch_size=50, epochs=2)
    return dataclasses.replace(task(*trouble, step=5), **changes)


@pytest.mark.more
@pytest.mark.parametrize(
    "way", ["sharded", "towers", *(pytest.param(way, marks=pytest.mark.more) for way in ("tensor", "local"))]
)
def test_each_way_goes_on_bit_by_bit_after_a_rank_was_killed(way: Any, tmp_path: Path) -> None:
    plan = Plan(parallel=way, ranks=2, **{"sync_every": 2} if way == "local" else {})
    common: dict[str, Any] = dict(plan=plan, checkpoint_every="2", progress=False)
    whole = hotloop.fit(few_steps(), run=tmp_path / "whole", **common)
    run = hotloop.fit(few_steps(kill, tmp_path / "killed"), run=tmp_path / "run", **common)
    assert (tmp_path / "killed").exists()
    assert [event["step"] for event in run.journal() if event["event"] == "resume"] == [4]
    assert disagreements(whole.path, run.path) == []


@pytest.mark.more
def test_the_time_before_a_rank_was_killed_counts_for_stop_after(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run = fit(path, task(lambda: kill_an_hour_later(path), tmp_path / "killed"), stop_after="30m", progress=False)
    assert (tmp_path / "killed").exists()
    assert run.final is None
    assert run.journal()[-1]["reason"] == "stop-after"


@pytest.mark.more
@pytest.mark.parametrize("culprit", [pytest.param(CULPRIT, marks=pytest.mark.more), 0])
def test_a_stopped_rank_is_waited_for_and_named(
    whole: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str], culprit: int
) -> None:
    """The first rank, which speaks for all, is spoken of by the command itself."""
    run = fit(tmp_path / "run", task(stop, tmp_path / "stopped", culprit))
    err = capfd.readouterr().err
    assert f"waiting for rank {culprit}: no sign of life for" in err
    assert f"rank {culprit} goes on" in err
    assert "for rank 2" not in err and "rank 2 goes on" not in err
    assert disagreements(whole.path, run.path) == []


@pytest.mark.more
@pytest.mark.parametrize(
    ("trouble", "kind", "says"),
    [
        (
            raise_error,
            TrainingError,
            r"^rank 1: .*ValueError: the culprit has had enough \(test_rank_failures.py:\d+\)",
        ),
        (allocate, MemoryExhausted, r"^rank 1: step 13 .* ran out of memory"),
    ],
)
def test_an_error_of_one_rank_is_what_the_user_sees(
    whole: Run, tmp_path: Path, trouble: Callable[[], Any], kind: type, says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    given = task(trouble, tmp_path / "marker")
    with pytest.raises(hotloop.HotloopError, match=says) as caught:
        fit(tmp_path / "run", given)
    assert "Traceback" not in capfd.readouterr().err
    assert isinstance(caught.value, hotloop.HotloopError)
    assert len(str(caught.value).splitlines()) == 1
    if kind is MemoryExhausted:
        assert isinstance(caught.value, kind)
    else:
        run = hotloop.fit(given, run=tmp_path / "run", resume=True, progress=False)
        assert disagreements(whole.path, run.path) == []
