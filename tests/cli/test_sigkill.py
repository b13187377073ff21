"""SIGKILL at random instants: the run goes on, repeats at most an interval, and ends as if nothing had happened."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.processes.forked_server import Server
from tests.support.processes.resumed_training import INSTANTS, Training, disagreements

EPOCHS, EVERY, KILLS = 16, 10, 4


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Training:
    training = Training(tmp_path_factory.mktemp("whole") / "training", EPOCHS, EVERY, server=server)
    training.finish(fresh=False)
    assert training.problems == []
    return training


@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.more), 2])
def test_killed_again_and_again_it_ends_bitwise_the_same(
    uninterrupted: Training, server: Server, tmp_path: Path, workers: int
) -> None:
    draws = random.Random(workers)
    training = Training(tmp_path / "training", EPOCHS, EVERY, workers, server=server)
    # A moment of each kind at least; what else, and in which order, is left to chance.
    instants = [*sorted(set(INSTANTS)), *draws.choices(INSTANTS, k=KILLS - len(set(INSTANTS)))]
    draws.shuffle(instants)
    killed = [instant for instant in instants if training.kill(instant, draws)]
    training.finish()
    assert training.problems == []
    training.check_end()
    assert training.problems == []
    assert len(killed) == KILLS, "training was over before all kills: give it more epochs"
    assert training.marks("steps") >= uninterrupted.marks("steps")
    assert disagreements(uninterrupted.run, training.run) == []
