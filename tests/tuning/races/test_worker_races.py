"""Races of plans whose data is loaded by worker processes, real ones, which load on while other plans have their turn."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hotloop.core.state import differing_paths
from hotloop.lowering.build import lower
from hotloop.plan import Plan
from hotloop.task import Task
from hotloop.tuning.races.measure import Contender, RaceMeasurement, _loading_notes, measure
from hotloop.tuning.races.rounds import ContenderTimes
from hotloop.tuning.races.runner import Runner, loading_workers, measure_feed_times
from tests.support.programs import a_task

SAMPLE_S, BATCH, WORKERS = 0.005, 4, 2
LOAD_MS = 1e3 * SAMPLE_S * BATCH / WORKERS
"""A batch of a loader that nobody waits for; samples sleep, so that it is the same on each machine."""


class Slow(Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(SAMPLE_S)
        return torch.full((6,), float(index)), index % 3


class SlowStream(IterableDataset):
    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter([Slow()[number] for number in range(24)])


def loaded_task() -> Task:
    loader = DataLoader(Slow(), batch_size=BATCH, num_workers=WORKERS)
    return a_task(data=loader, batch_size=None, deterministic=True, epochs=50)


STREAMING = {
    "baseline": Plan(device="cpu"),
    "foreach": Plan(device="cpu", optimizer="foreach"),
    "forloop": Plan(device="cpu", optimizer="forloop"),
}
HOST = {"host": Plan(device="cpu", residency="host")}


def raced(plans: dict[str, Plan], *, brief: bool) -> RaceMeasurement:
    task = loaded_task()
    entrants = [Contender(name, lambda plan=plan: lower(task, plan), plan) for name, plan in plans.items()]  # type: ignore[misc]
    return measure(entrants, "baseline", steps=100, time_limit_s=2.0, brief=brief)


@pytest.mark.more
@pytest.mark.parametrize(
    "brief", [pytest.param(True, marks=pytest.mark.more, id="in a search"), pytest.param(False, id="in a race")]
)
def test_a_step_takes_no_less_than_its_batch(brief: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three loaders that load on while the others are timed would each seem three times as fast."""
    monkeypatch.setattr("hotloop.tuning.races.measure.WARM_UP_S", 0.05)
    found = raced(STREAMING | HOST, brief=brief)
    *streaming, host = found.plans
    for timing in streaming:  # asleep for at least that long, however busy the machine is
        assert timing.feed_ms is not None and timing.feed_ms > 0.7 * LOAD_MS
        assert timing.step_ms is not None and timing.step_ms > 0.7 * LOAD_MS
        assert timing.verdict in (None, "no difference"), (
            timing
        )  # they load alike; None where the search drops it early
    assert host.verdict == "faster" and host.pays_after is not None
    assert not any("host waits for its data" in note for note in found.notes)


@pytest.mark.more
def test_the_state_is_as_it_was_after_listening_to_the_workers() -> None:
    task = loaded_task()
    program = lower(task, STREAMING["baseline"])
    before = program.state()
    entrant = Contender("baseline", lambda: program, STREAMING["baseline"])
    measure([entrant], "baseline", steps=100, time_limit_s=0.01, brief=True)
    assert differing_paths(before, program.state()) == []


def test_who_loads_ahead() -> None:
    task = loaded_task()
    workers = {axes: loading_workers(lower(task, Plan(device="cpu", **dict(axes)))) for axes in AXES}
    assert list(workers.values()) == [2, 3, 0, 0]
    stream = a_task(data=DataLoader(SlowStream(), batch_size=BATCH, num_workers=1), batch_size=None)
    assert loading_workers(lower(stream, Plan(device="cpu"))) == 1
    assert loading_workers(lower(a_task(), Plan(device="cpu", workers=2))) == 0  # arrays need none


AXES = ((), (("workers", 3),), (("workers", 0),), (("residency", "host"),))


@pytest.mark.more
def test_batches_of_a_stream_are_timed_to_its_last_epoch_and_not_beyond() -> None:
    loader = DataLoader(SlowStream(), batch_size=12, num_workers=1)
    program = lower(a_task(data=loader, batch_size=None, epochs=2), Plan(device="cpu"))
    assert len(measure_feed_times(program)) == 3  # of four batches the first starts the feed
    program.close()
    once = lower(a_task(data=loader, batch_size=None, epochs=1), Plan(device="cpu"))
    assert len(measure_feed_times(once)) == 1
    once.close()


def test_rounds_take_the_portions_in_turn() -> None:
    lane = ContenderTimes("a", Runner(lower(a_task(), Plan(device="cpu"))), feed_s=[3.0, 5.0])
    for took in (4.0, 4.0, 1.0, 6.0):
        lane.note(took)
    assert lane.times == [4.0, 5.0, 3.0, 6.0]
    lane.times = [4.1] * 4
    assert _loading_notes(lane) == [
        "a waits for its data: workers load a batch in 4,000 ms, so no step counts as shorter"
    ]
    lane.times = [5.0] * 4
    assert _loading_notes(lane) == []
