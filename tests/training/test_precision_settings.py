"""Runs under torch's settings: recorded, restored on resume in processes with others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hotloop
from hotloop.core.float32_switches import read_switches
from hotloop.core.number_formats import IEEE, TORCH_DEFAULTS
from hotloop.lowering.build import lower
from hotloop.plan import BASELINE, Plan
from hotloop.training.run import Run
from hotloop.tuning import race_cache
from hotloop.tuning.race_cache import load_races
from tests.support.programs import a_task
from tests.support.tuning.handmade_verdicts import VERSIONS, timing, verdict

NOTING = """
import os

import torch
from torch import nn

import hotloop

torch.set_float32_matmul_precision(os.environ["LEVEL"])
X = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))


class Noting(nn.Linear):
    def forward(self, x):
        with open("log.txt", "a") as log:
            print("train" if self.training else "eval", torch.backends.mkldnn.matmul.fp32_precision, file=log)
        return super().forward(x)


task = hotloop.Task(
    model=lambda: Noting(4, 3),
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    data=(X, torch.arange(12) % 3),
    validation=(X, torch.arange(12) % 3),
    batch_size=6,
    epochs=2,
)
"""


@pytest.fixture(autouse=True)
def as_torch_begins() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    for name in ("matmul", "conv", "rnn"):
        getattr(torch.backends.mkldnn, name).fp32_precision = "none"


def train(folder: Path, level: str, *options: str) -> str:
    """Trains in a process of its own, whose Task chooses that level; returns what it said."""
    command = [sys.executable, "-m", "hotloop", "train", *options]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"LEVEL": level}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return " ".join((done.stdout + done.stderr).split())


@pytest.mark.more
def test_a_run_goes_on_under_the_settings_that_it_began_with(tmp_path: Path) -> None:
    (tmp_path / "noting.py").write_text(NOTING)
    said = train(tmp_path, "high", "noting.py", "--run", "run", "--device", "cpu", "--epochs", "1")
    assert "torch's settings allow matrix products in tf32" in said
    assert json.loads((tmp_path / "run" / "run.json").read_text())["switches"]["mkldnn.matmul"] == "tf32"
    (tmp_path / "log.txt").unlink()
    said = train(tmp_path, "highest", "--resume", "run", "--epochs", "2")
    assert "matrix products in tf32 then, fp32 now: the run continues with the settings of its start" in said
    noted = (tmp_path / "log.txt").read_text().splitlines()[1:]  # the first is of a look at the model's output
    assert {"train tf32", "eval tf32"} <= set(noted), noted
    assert "train ieee" not in noted and "eval ieee" not in noted, noted


def test_steps_run_as_the_process_was_when_they_were_lowered() -> None:
    torch.set_float32_matmul_precision("medium")
    program = lower(a_task())
    torch.set_float32_matmul_precision("highest")
    with program.around():
        assert read_switches()["mkldnn.matmul"] == "bf16" and torch.get_float32_matmul_precision() == "medium"
    assert read_switches()["mkldnn.matmul"] == "ieee" and torch.get_float32_matmul_precision() == "highest"


def test_fp32_runs_in_fp32_whatever_the_process_allows() -> None:
    torch.set_float32_matmul_precision("medium")
    with lower(a_task(), Plan(precision="fp32")).around():
        assert read_switches() == IEEE


@pytest.mark.parametrize(
    ("plan", "level", "told"),
    [
        (BASELINE, "highest", False),
        (BASELINE, "medium", True),
        (Plan(precision="fp32"), "medium", False),
    ],
)
def test_settings_of_the_user_s_own_are_told_in_one_line(plan: Plan, level: str, told: bool) -> None:
    torch.set_float32_matmul_precision(level)
    said: list[str] = []
    lower(a_task(), plan, said.append)
    assert [line for line in said if "torch's settings" in line] == (
        [
            "torch's settings allow matrix products in bf16, which precision=default follows; precision=fp32 computes in"
            " fp32"
        ]
        if told
        else []
    )


def test_a_new_run_s_plan_says_default(tmp_path: Path) -> None:
    run = hotloop.fit(a_task(epochs=1), run=tmp_path / "run", plan=BASELINE, device="cpu", progress=False)
    assert 'precision = "default"' in (run.path / "plan.toml").read_text()
    assert run.record.switches == TORCH_DEFAULTS
    assert Run.open(run.path).plan.precision == "default"


def test_races_under_other_settings_are_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race_cache, "races_folder", lambda: tmp_path / "races")
    raced = verdict(timing(Plan(device="cpu", optimizer="fused"), 1.3))
    race_cache.save_races(raced)
    reduced = VERSIONS | {"switches": "cuda.matmul=tf32"}
    assert load_races("f", "m", VERSIONS)[0] and load_races("f", "m", reduced)[0] == []
    race_cache.save_races(raced.model_copy(update={"versions": reduced}))
    assert len(load_races("f", "m", VERSIONS)[0]) == len(load_races("f", "m", reduced)[0])
