"""SIGKILL of a run that changes its plan: each start goes on exactly, and says what ran when."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hotloop.cli import build
from hotloop.training.run import Run
from tests.lowering.test_cpu_plans import assert_equal_within_rounding
from tests.support.processes.forked_server import Server
from tests.support.processes.resumed_training import CAPTURABLE, Training, last_checkpoint

EPOCHS, EVERY = 12, 10


pytestmark = [pytest.mark.more, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache folder of packages for these tests: the first training makes one, the others load it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def uninterrupted(run: Path, *options: str) -> None:
    """A whole training in this process, where torch is imported already."""
    arguments = [str(CAPTURABLE), "--run", str(run), "-p", f"epochs={EPOCHS}", "--checkpoint-every", str(EVERY)]
    result = CliRunner().invoke(build(), ["train", *arguments, "--device", "cpu", *options])
    assert result.exit_code == 0, result.output


def test_a_run_that_is_killed_and_changes_its_plan_twice_ends_as_the_baseline_does(
    server: Server, tmp_path: Path
) -> None:
    """Each switch is in the journal before its first step: `problems` would name steps that came before."""
    uninterrupted(tmp_path / "whole", "--plan", "baseline")
    draws = random.Random(6)  # which kills well after the first checkpoint
    options = ("--plan", "baseline", "--device", "cpu")
    training = Training(tmp_path / "training", EPOCHS, EVERY, task=CAPTURABLE, plan=options, server=server)
    (tmp_path / "mine.toml").write_text('compile = "package"\n')
    second = ("--plan", str(tmp_path / "mine.toml"), "--device", "cpu")
    third = ("--plan", "baseline", "--set", "layout=channels_last", "--set", "optimizer=foreach", "--device", "cpu")
    assert training.kill("step", draws)
    training.tried = True
    assert training.kill("step", draws, *second)
    training.tried = False
    training.finish(*third)
    training.check_end()
    assert training.problems == []
    starts = training.starts()
    assert [start["plan"] for start in starts] == [
        "workers=0",  # the baseline, as Training starts it
        "compile=package",
        "layout=channels_last optimizer=foreach",
    ]
    assert 0 < starts[1]["step"] < starts[2]["step"]
    whole, run = Run.open(tmp_path / "whole"), Run.open(training.run)
    assert_equal_within_rounding(last_checkpoint(run).state, last_checkpoint(whole).state)
    assert run.final is not None and whole.final is not None and run.final["epoch"] == whole.final["epoch"]
    for one, other in zip(run.epochs, whole.epochs, strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=1e-4)
