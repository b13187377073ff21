"""A GAN that is killed at random moments ends as one that never was; see `bench/kill_kinds.py` for more kinds of Tasks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.processes.forked_server import Server
from tests.support.processes.resumed_training import Training, disagreements

GAN = Path(__file__).parents[1] / "support/tasks/state_kinds.py:gan"
EPOCHS, EVERY = 4, 5


@pytest.mark.more
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.more)])
def test_a_killed_gan_ends_as_one_that_was_never_interrupted(workers: int, tmp_path: Path, server: Server) -> None:
    whole = Training(tmp_path / "whole", EPOCHS, EVERY, task=GAN, server=server)
    whole.finish()
    assert whole.problems == []
    training, draws = Training(tmp_path / "killed", EPOCHS, EVERY, workers, task=GAN, server=server), random.Random(1)
    for instant in ("step", "checkpoint", "evaluation"):
        training.kill(instant, draws)
    training.finish(fresh=False)
    training.check_end()
    assert training.problems == []
    assert disagreements(whole.run, training.run) == []
