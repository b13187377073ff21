"""SIGKILL under plans other than the baseline, and between plans: each run goes on exactly, and says what ran when."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from hotloop.cli import build
from hotloop.plan import Plan
from hotloop.run import Run
from hotloop.state import State
from tests.cpu.test_plans import assert_equal_within_rounding
from tests.resuming import CAPTURABLE, Training, disagreements, last_checkpoint
from typer.testing import CliRunner

EPOCHS, EVERY = 24, 10

PLANS = {
    "package": (("--set", "compile=package"), ("step", "checkpoint", "start-up")),
    "eager": (
        ("--set", "layout=channels_last", "--set", "optimizer=fused", "--set", "accumulation=2"),
        ("checkpoint", "step"),
    ),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory):
    """A cache folder of packages for these tests: the first training makes one, the others load it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def uninterrupted(run: Path, *options: str) -> None:
    """A whole training in this process, where torch is imported already."""
    arguments = [str(CAPTURABLE), "--run", str(run), "-p", f"epochs={EPOCHS}", "--checkpoint-every", str(EVERY)]
    result = CliRunner().invoke(build(), ["train", *arguments, "--device", "cpu", *options])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("name", PLANS)
def test_killed_under_a_plan_it_ends_bitwise_the_same(name: str, tmp_path: Path) -> None:
    plan, instants = PLANS[name]
    uninterrupted(tmp_path / "whole", *plan)
    draws = random.Random(name)
    training = Training(tmp_path / "training", EPOCHS, EVERY, task=CAPTURABLE, plan=(*plan, "--device", "cpu"), tried=True)
    killed = [instant for instant in instants if training.kill(instant, draws)]
    said = training.finish()
    training.check_end()
    assert training.problems == []
    assert len(killed) == len(instants), "training was over before all kills: give it more epochs"
    assert disagreements(tmp_path / "whole", training.run) == []
