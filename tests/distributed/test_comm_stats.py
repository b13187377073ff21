"""What ranks tell of each other: who waits for whom, what that costs, and who is silent or lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
import torch

import hotloop
from hotloop.distributed.comm_stats import CommMeter, CommReport, CommTime
from hotloop.distributed.watchdog import Heartbeat, LaunchWatch
from hotloop.distributed.world import SINGLE_RANK, World, is_rank_loss


@dataclass(frozen=True)
class Three(World):
    """Of three ranks the first; what the others say each time is made up."""

    others: Any = None

    def all_gather(self, value: Any) -> list[Any]:
        return [value, *next(self.others)]


class Told:
    """What is logged and said."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.lines: list[str] = []

    def waits(self, *said: Any) -> CommReport:
        """Of the first of three ranks, the others of which say these pairs in turn."""
        world = Three(0, 3, iter(said))
        return CommReport(world, lambda event, **fields: self.events.append((event, fields)), self.lines.append)


def test_the_slowest_rank_is_the_one_that_waits_least() -> None:
    told = Told()
    others = CommTime(0.5, 0.2), CommTime(2.5, 0.2)
    told.waits(others).add_epoch(1, CommTime(3.0, 0.1), 10.0, 100)
    assert told.lines == ["rank 1 is the slowest: others waited 24% of the epoch for it"]
    per_step = {"waiting_ms": [30.0, 5.0, 25.0], "communication_ms": [1.0, 2.0, 2.0]}
    assert told.events == [("waiting", {"epoch": 1, **per_step, "slowest": 1})]
    told.waits(others).add_epoch(1, CommTime(3.0), 13.0, 100)
    assert len(told.lines) == 1 and len(told.events) == 2


def test_what_ranks_cost_each_other_is_of_all_steps() -> None:
    told = Told()
    waits = told.waits((CommTime(), CommTime()), (CommTime(1.0, 6.0), CommTime(5.0, 6.0)))
    waits.add_epoch(1, CommTime(2.0, 1.0), 10.0, 40)
    waits.report(CommTime(4.0, 5.0), 10.0, 60)
    assert told.events[-1] == (
        "ranks",
        {
            "waiting": [0.3, 0.05, 0.25],
            "communication": [0.3, 0.3, 0.3],
            "slowest": 1,
            "step_ms": 200.0,
            "waiting_ms": [60.0, 10.0, 50.0],
            "communication_ms": [60.0, 60.0, 60.0],
        },
    )
    assert told.lines[-1] == (
        "of a step's 200 ms in waiting and in communication: rank 0 30% and 30%, rank 1 5% and 30%, rank 2 25% and 30%;"
        " the slowest is rank 1"
    )


@pytest.mark.parametrize(
    ("column", "other", "spent"),
    [("waiting", "communication", CommTime), ("communication", "waiting", lambda seconds: CommTime(0.0, seconds))],
)
def test_what_cannot_be_told_apart_is_told_as_one(column: str, other: str, spent: Callable[[float], CommTime]) -> None:
    told = Told()
    told.waits((spent(0.5), spent(2.5))).report(spent(3.0), 10.0, 50)
    assert told.lines[-1] == (
        f"of a step's 200 ms in {column}, with {other} in it: rank 0 30%, rank 1 5%, rank 2 25%; the slowest is rank 1"
    )


def test_of_one_process_and_of_what_nobody_counts_nothing_is_told() -> None:
    told = Told()
    alone = CommReport(SINGLE_RANK, lambda event, **fields: told.events.append((event, fields)), told.lines.append)
    alone.add_epoch(1, CommTime(3.0), 1.0, 10)
    alone.report(CommTime(3.0), 1.0, 10)
    told.waits((CommTime(), CommTime())).report(CommTime(), 1.0, 10)
    told.waits((CommTime(1.0), CommTime())).report(CommTime(), 0.0, 0)
    assert told.events == [] and told.lines == []


def test_what_goes_on_at_the_same_time_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 4.0, 10.0, 12.0])  # the first begins, the last ends; then one wait
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    meter = CommMeter()
    meter.begin()
    meter.begin()
    meter.end()
    meter.end()
    with meter.measure_waiting():
        pass
    assert meter.take() == CommTime(waited_s=2.0, communicated_s=4.0)
    assert meter.take() == CommTime()


def test_what_an_engine_sends_within_a_wait_is_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Work:
        def wait(self) -> str:
            return "sent"

    own = Work.wait
    monkeypatch.setattr(torch.distributed, "Work", Work)
    clock = iter([0.0, 2.0, 10.0, 15.0, 20.0, 27.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    meter = CommMeter()
    with meter.measure_engines(relayed=False):
        with meter.measure_waiting():
            assert Work().wait() == "sent"
        Work().wait()
    with meter.measure_engines(relayed=True):
        Work().wait()
    assert Work.wait is own
    assert meter.take() == CommTime(waited_s=2.0 + 7.0, communicated_s=5.0)


def test_a_silent_rank_is_told_once_and_its_return_too() -> None:
    store = torch.distributed.HashStore()
    told: list[str] = []
    beats = Heartbeat(store, "launch", 0, 3, told.append)

    def sign(rank: int, count: int) -> None:
        store.set(f"hotloop/beat/launch/{rank}", str(count))

    for second in range(9):
        sign(2, second)
        if second < 2 or second > 7:
            sign(1, second)
        beats.check(float(second))
    assert told == ["waiting for rank 1: no sign of life for 5s", "rank 1 continues"]


def test_only_the_first_that_is_well_speaks() -> None:
    store = torch.distributed.HashStore()
    told: list[str] = []
    beats = Heartbeat(store, "launch", 1, 3, told.append)
    for second in range(9):  # rank 2 is silent, and rank 0 would say so
        store.set("hotloop/beat/launch/0", str(second))
        beats.check(float(second))
    assert told == []
    for second in range(9, 16):  # now both are
        beats.check(float(second))
    assert told == ["waiting for rank 0: no sign of life for 5s"]


def test_a_silent_first_rank_is_told_from_outside() -> None:
    store = torch.distributed.HashStore()
    told: list[str] = []
    outside = LaunchWatch(store, "launch", told.append)
    for second in range(6):  # it hasn't joined yet
        outside.check(float(second))
    assert told == []
    for second in range(6, 16):
        if second < 8 or second > 13:
            store.set("hotloop/beat/launch/0", str(second))
        outside.check(float(second))
    assert told == ["waiting for rank 0: no sign of life for 5s", "rank 0 continues"]
    with Heartbeat(store, "launch", 0, 1, told.append).beat():
        pass
    for second in range(16, 30):  # it has left, and owes nobody a sign
        outside.check(float(second))
    assert len(told) == 2


def test_a_rank_that_is_stopped_while_the_ranks_start_is_reported_once() -> None:
    told: list[str] = []
    outside = LaunchWatch(torch.distributed.HashStore(), "launch", told.append)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as rank:
        try:
            outside.check(0.0)
            rank.send_signal(signal.SIGSTOP)
            while psutil.Process(rank.pid).status() != psutil.STATUS_STOPPED:
                time.sleep(0.01)
            for second in range(1, 12):
                outside.check(float(second))
        finally:
            rank.kill()
    assert told == [f"waiting for a rank that is stopped: kill -CONT {rank.pid} lets its process continue"]


def test_the_loss_of_a_rank_is_known_by_what_torch_says() -> None:
    lost = RuntimeError(
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4242"
    )
    wrapped = hotloop.HotloopError("step 3 raised RuntimeError")
    wrapped.__cause__ = lost
    assert is_rank_loss(lost) and is_rank_loss(wrapped)
    assert not is_rank_loss(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_rank_loss(ConnectionResetError("connection reset by peer"))  # of the user's own
