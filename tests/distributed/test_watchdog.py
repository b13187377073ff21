"""How long a rank waits for others, by a made-up clock, and which signals count as signals to the rank."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, replace

import pytest
import torch.distributed as dist

from hotloop.core.processes import signal_handlers
from hotloop.distributed.watchdog import LONGEST_WAIT_S, RankPlace, Watchdog, last_place
from hotloop.errors import TrainingError

WAITING = RankPlace("training", 3, 4, 0, operation="all_reduce, operation 5", newest=5, line="task.py:7", signalled=0)
STARTING = replace(WAITING, phase="start", step=0, steps=0, operation="", newest=-1)


class Waiting:
    """The first of two ranks, which waits; `pass_s` lets the clock run, with two checks in a second.

    Args:
        other: the place of the second rank, which gives signs of life; None where it gives none.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit_s: float | None, other: RankPlace | None = None) -> None:
        monkeypatch.setattr(Watchdog, "_current_place", lambda _: WAITING)
        self.ended: list[str] = []
        self._store, self._other, self._now = dist.HashStore(), other, 1000.0
        self._watchdog = Watchdog(self._store, "launch", 0, 2, limit_s, lambda error, _: self.ended.append(str(error)))

    def pass_s(self, seconds: float, every_s: float = 0.5) -> None:
        for _ in range(int(seconds / every_s)):
            self._now += every_s
            if self._other is not None:
                self._store.set("hotloop/place/launch/1", json.dumps([self._now, asdict(self._other)]))
            self._watchdog.check(self._now)


def test_a_rank_ends_once_it_has_waited_for_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Waiting(monkeypatch, limit_s=10)
    rank.pass_s(10)
    assert rank.ended == []
    rank.pass_s(1)
    assert rank.ended[0].startswith("the ranks have waited 10s for each other: rank 0 in all_reduce, operation 5 (")
    assert "rank 1 gives no sign of life" in rank.ended[0]


def test_time_in_which_the_rank_itself_was_stopped_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after Ctrl-Z and `fg`, which stop and continue all ranks and the process of the store."""
    rank = Waiting(monkeypatch, limit_s=10)
    rank.pass_s(5)
    rank.pass_s(3600, every_s=3600)
    rank.pass_s(4)
    assert rank.ended == []
    rank.pass_s(3)
    assert len(rank.ended) >= 1


@pytest.mark.parametrize(("limit_s", "longest_s"), [(10, LONGEST_WAIT_S), (7200, 7200)])
def test_a_rank_that_starts_may_take_half_an_hour_or_the_users_longer_limit(
    limit_s: float, longest_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Waiting(monkeypatch, limit_s, STARTING)
    rank.pass_s(longest_s)
    assert rank.ended == []
    rank.pass_s(1)
    assert "rank 1 in no collective operation (start, step 0" in rank.ended[0]


def fork_and_signal(number: int) -> None:
    """A signal to a fork, as a pool sends to its workers when it ends."""
    if (fork := os.fork()) == 0:
        os.kill(os.getpid(), number)
        os._exit(0)
    os.waitpid(fork, 0)


@pytest.mark.few("fork")
@pytest.mark.parametrize(
    ("send", "number"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGTERM), signal.SIGTERM),
        (lambda: fork_and_signal(signal.SIGTERM), signal.SIGINT),
    ],
    ids=["rank", "fork"],
)
def test_a_signal_to_a_fork_is_none_to_the_rank(send: Callable[[], None], number: int) -> None:
    store, errors = dist.HashStore(), list[TrainingError]()
    watchdog = Watchdog(store, "launch", 0, 1, None, lambda error, _: errors.append(error))
    place, deadline = None, time.monotonic() + 60
    with signal_handlers(lambda *_: None, signal.SIGTERM, signal.SIGINT), watchdog.watch():
        send()
        os.kill(os.getpid(), signal.SIGINT)
        while place is None or not place.signalled:
            assert time.monotonic() < deadline
            time.sleep(0.05)
            place = last_place(store, "launch", 0)
    assert place.signalled == number
    assert errors == []
