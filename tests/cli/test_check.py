"""`hotloop check`: the class of a plan, and why, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from hotloop.lowering.step import EagerStep
from hotloop.verdicts import Parity, ParityClass
from tests.cli.in_process import SMALL, Hotloop, commands

CPU = ("--device", "cpu")


@pytest.fixture
def hotloop(tmp_path: Path, monkeypatch, capfd) -> Iterator[Hotloop]:
    (tmp_path / "task.py").write_text(f"{SMALL}task = make(epochs=4)\n")
    with commands(tmp_path, monkeypatch, capfd) as run:
        yield run


def test_a_plan_that_changes_nothing(hotloop: Hotloop) -> None:
    done = hotloop("check", "task.py", "--set", "optimizer=foreach", *CPU, "--json")
    assert done.code == 0
    parity = Parity(**done.document)
    assert parity.parity == "bitwise"
    assert parity.reason
    assert parity.states == 16  # all steps of the training
    assert parity.plan == "optimizer=foreach"


def test_in_words(hotloop: Hotloop) -> None:
    done = hotloop("check", "task.py", "--set", "optimizer=fused", *CPU)
    assert done.code == 0
    assert done.out == ""
    assert "optimizer=fused" in done.err
    assert any(name in done.err for name in get_args(ParityClass))


def test_without_a_word_it_is_the_plan_of_auto(hotloop: Hotloop) -> None:
    done = hotloop("check", "task.py", *CPU, "--json")
    assert done.document["plan"] == "optimizer=fused"


def test_a_plan_file(hotloop: Hotloop, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('optimizer = "forloop"\n')
    done = hotloop("check", "task.py", "--plan", "mine.toml", *CPU, "--json")
    assert done.document["plan"] == "optimizer=forloop"


def test_a_broken_plan_names_tensor_and_step_and_fails(hotloop: Hotloop, monkeypatch: pytest.MonkeyPatch) -> None:
    backward = EagerStep._backward_of

    def scaled(self: EagerStep, loss):
        backward(self, loss * 1.01 if self.parts.plan.optimizer == "foreach" else loss)

    monkeypatch.setattr(EagerStep, "_backward_of", scaled)
    done = hotloop("check", "task.py", "--set", "optimizer=foreach", *CPU, "--json")
    assert done.code == 1
    assert done.document["parity"] == "broken"
    assert "gradient" in done.document["first"]
    assert done.document["first"].endswith("at step 1")
    assert done.document["first"] in done.document["reason"]


@pytest.mark.parametrize(
    "chance",
    [
        pytest.param("int.from_bytes(os.urandom(4), 'big') / 2**32", id="at each step"),
        pytest.param("max(0, next(CALLS) - 2)", id="after two steps that are alike"),
    ],
)
def test_a_task_too_random_to_compare(hotloop: Hotloop, tmp_path: Path, chance: str) -> None:
    (tmp_path / "chance.py").write_text(
        f"""{SMALL}
import itertools, os

CALLS = itertools.count(1)

class Chance(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1 + {chance})

task = make(model=lambda: Chance(4, 3), epochs=4)
"""
    )
    done = hotloop("check", "chance.py", "--set", "optimizer=foreach", *CPU, "--json")
    assert done.code == 0
    assert done.document["parity"] == "unproven"
    assert "too random to compare" in done.document["reason"]


def test_a_model_that_casts_has_no_truth(hotloop: Hotloop, tmp_path: Path) -> None:
    (tmp_path / "casts.py").write_text(
        f"""{SMALL}
class Norm(nn.Module):
    def forward(self, x):
        wide = x.to(torch.float32)
        return (wide / wide.pow(2).mean(-1, keepdim=True).sqrt()).to(x.dtype)

task = make(model=lambda: nn.Sequential(nn.Linear(4, 8), Norm(), nn.Linear(8, 3)), epochs=4)
"""
    )
    done = hotloop("check", "casts.py", "--set", "optimizer=foreach", *CPU, "--json")
    assert done.document["parity"] == "unproven"
    assert "'1' (Norm)" in done.document["reason"]


def test_convergence_on_demand(hotloop: Hotloop) -> None:
    done = hotloop("check", "task.py", "--set", "optimizer=foreach", *CPU, "--converge", 3, "--json")
    assert done.document["convergence"]["equivalent"] is True
    assert len(done.document["convergence"]["seeds"]) == 3


WRONG = {
    "an axis": (("--set", "nosuch=1"), "nosuch"),
    "a value": (("--set", "layout=sideways"), "channels_last"),
    "a plan that isn't there": (("--plan", "mine.toml"), "mine.toml"),
    "a device that isn't there": (("--device", "cuda:7"), "cuda:7"),
    "a plan that can't be run": (("--set", "graphs=step", *CPU), "graphs"),
    "a plan without steps of its own": (("--set", "parallel=async", "--set", "ranks=2", *CPU), "Train with it"),
    "too few seeds": (("--converge", 1, *CPU), "3 or more"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_calls_are_one_line(hotloop: Hotloop, name: str) -> None:
    arguments, says = WRONG[name]
    done = hotloop("check", "task.py", *arguments)
    assert done.code in (1, 2)
    errors = [line for line in done.err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert says in errors[0]
    assert "Traceback" not in done.err
