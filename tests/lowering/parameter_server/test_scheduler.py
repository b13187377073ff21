"""The ledger of an asynchronous epoch: each batch counts once, whoever dies, and nobody runs too far ahead."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from hotloop.lowering.parameter_server.scheduler import BatchScheduler, WorkItem

BATCHES = 40


class Office:
    """Workers at random speeds; some die, some stop for good; it sees what is applied and who began what meanwhile."""

    def __init__(self, ledger: BatchScheduler, seed: int, workers: int = 5) -> None:
        self.ledger, self.draws = ledger, random.Random(seed)
        self.alive, self.stopped = set(range(workers)), set[int]()
        self.held: dict[int, WorkItem] = {}
        self.begun: dict[int, Counter[int]] = {}  # worker -> new batches that others began during its present one
        self.newest = -1
        self.applied: list[int] = []
        self.missed: list[int] = []  # updates between a gradient's parameters and its own
        self.longest = 0
        self.slowness = {worker: self.draws.choice((1, 1, 10)) for worker in self.alive}

    def run(self, faults: bool) -> None:
        while not self.ledger.is_done:
            for worker in sorted(self.alive - self.held.keys()):
                self._take(worker)
            able = sorted(self.held.keys() - self.stopped)
            assert able, "nobody would ever answer"
            if faults and len(self.alive - self.stopped) > 1 and self.draws.random() < 0.05:
                self._fault(self.draws.choice(able))
            else:
                self._answer(self.draws.choices(able, [1 / self.slowness[worker] for worker in able])[0])

    def _take(self, worker: int) -> None:
        work = self.ledger.take(worker, len(self.applied))
        if work is None:
            return
        self.held[worker], self.begun[worker] = work, Counter()
        if work.batch <= self.newest:
            return
        self.newest = work.batch
        for other, held in self.held.items():
            if other != worker and held.batch not in self.applied:
                self.begun[other][worker] += 1

    def _answer(self, worker: int) -> None:
        work = self.held.pop(worker)
        if self.ledger.count(worker, work):
            self.missed.append(len(self.applied) - work.version)
            self.longest = max([self.longest, *self.begun[worker].values()])
            self.applied.append(work.batch)

    def _fault(self, worker: int) -> None:
        if self.draws.random() < 0.5:
            self.stopped.add(worker)
            return
        self.ledger.release_worker(worker)
        self.alive.discard(worker)
        del self.held[worker]


def office(seed: int, bound: int | None, *, faults: bool = True) -> Office:
    ledger = BatchScheduler(bound)
    ledger.begin_epoch(0, 0, BATCHES)
    found = Office(ledger, seed)
    found.run(faults)
    return found


@pytest.mark.parametrize("bound", [None, 0, 2])
def test_each_batch_counts_once_whoever_dies_or_stops(bound: int | None) -> None:
    for seed in range(40):
        assert sorted(office(seed, bound).applied) == list(range(BATCHES))


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_nobody_begins_more_than_the_bound_allows_while_another_computes(bound: int) -> None:
    found = [office(seed, bound, faults=False) for seed in range(40)]
    assert max(one.longest for one in found) == bound + 1  # reached, and never exceeded
    assert max(max(one.missed) for one in found) <= 4 * (bound + 2)


def test_without_a_bound_others_run_ahead() -> None:
    assert max(office(seed, None, faults=False).longest for seed in range(20)) > 6


def test_what_was_handed_out_before_the_ledger_was_opened_anew_counts_no_more() -> None:
    ledger = BatchScheduler()
    ledger.begin_epoch(0, 0, 3)
    work = ledger.take(0, 0)
    assert work is not None
    ledger.begin_epoch(0, 0, 3)
    assert not ledger.count(0, work)
    assert ledger.refused == 1 and not ledger.counted


def test_a_dead_workers_batch_goes_to_the_next_that_asks() -> None:
    ledger = BatchScheduler()
    ledger.begin_epoch(0, 5, 9)
    assert [ledger.take(worker, 0).batch for worker in (0, 1)] == [5, 6]  # type: ignore[union-attr]
    assert ledger.release_worker(0) == 5
    assert ledger.release_worker(0) is None
    assert ledger.take(1, 0).batch == 5  # type: ignore[union-attr]


def test_paused_it_hands_out_nothing_new_but_what_was_lost() -> None:
    ledger = BatchScheduler()
    ledger.begin_epoch(0, 0, 9)
    ledger.take(0, 0)
    ledger.paused = True
    ledger.release_worker(0)
    assert ledger.outstanding == 1
    work = ledger.take(1, 0)
    assert work is not None and work.batch == 0
    assert ledger.count(1, work)
    assert ledger.outstanding == 0 and ledger.take(1, 1) is None and not ledger.is_done


def _counts_twice(self: BatchScheduler, worker: int, work: WorkItem) -> bool:
    self._leases.pop(worker, None)
    self.counted[work.batch] = worker
    return True


def _loses_for_good(self: BatchScheduler, worker: int) -> None:
    self.counted[self._leases.pop(worker).work.batch] = worker


FAULTS = {
    "a batch applied twice": ("count", _counts_twice, test_each_batch_counts_once_whoever_dies_or_stops),
    "a dead worker's batch left out": (
        "release_worker",
        _loses_for_good,
        test_each_batch_counts_once_whoever_dies_or_stops,
    ),
    "the bound not kept": (
        "_is_ahead",
        lambda *_: False,
        test_nobody_begins_more_than_the_bound_allows_while_another_computes,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, planted, test = FAULTS[fault]
    monkeypatch.setattr(BatchScheduler, name, planted)
    with pytest.raises(AssertionError):
        test(1)
