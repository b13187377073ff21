"""`hotloop check`: the class of a plan, and why, for people and for programs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from hotloop.core.records.race import Parity, ParityClass
from hotloop.lowering.eager_step import EagerStep
from tests.support.auto_plans import BY_RULES
from tests.support.processes.in_process_command import SMALL, Hotloop, commands

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
    assert done.document["plan"] == BY_RULES.brief()


def test_a_plan_file(hotloop: Hotloop, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('optimizer = "forloop"\n')
    done = hotloop("check", "task.py", "--plan", "mine.toml", *CPU, "--json")
    assert done.document["plan"] == "optimizer=forloop"


@pytest.mark.more
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


CASTS = f"""{SMALL}
class Norm(nn.Module):
    def forward(self, x):
        wide = x.to(torch.{{dtype}})
        return (wide / wide.pow(2).mean(-1, keepdim=True).sqrt()).to(x.dtype)

task = make(model=lambda: nn.Sequential(nn.Linear(4, 8), Norm(), nn.Linear(8, 3)), epochs=4)
"""


def test_a_model_that_narrows_inside_has_no_truth(hotloop: Hotloop, tmp_path: Path) -> None:
    (tmp_path / "casts.py").write_text(CASTS.format(dtype="bfloat16"))
    done = hotloop("check", "casts.py", "--set", "optimizer=foreach", *CPU, "--json")
    assert done.document["parity"] == "unproven"
    assert "'1' (Norm)" in done.document["reason"]


def test_a_model_that_casts_to_fp32_has_one(hotloop: Hotloop, tmp_path: Path) -> None:
    (tmp_path / "casts.py").write_text(CASTS.format(dtype="float32"))
    done = hotloop("check", "casts.py", "--set", "optimizer=foreach", *CPU, "--json")
    assert done.document["parity"] in {"bitwise", "fp32-equivalent"}


def test_convergence_on_demand(hotloop: Hotloop) -> None:
    done = hotloop("check", "task.py", "--set", "optimizer=foreach", *CPU, "--converge", 3, "--json")
    assert done.document["convergence"]["equivalent"] is True
    assert len(done.document["convergence"]["seeds"]) == 3


ENDS = f"""{SMALL}
import itertools, signal

VALIDATIONS = itertools.count(1)
DONE = []


def ends(number):
    {{ends}}


def metric(output, target):
    DONE.append(next(VALIDATIONS))  # one of each training
    if DONE[-1] == {{validation}}:
        ends(DONE[-1])
    return 0.0


class Late(nn.Linear):
    def forward(self, x):
        if self.training and len(DONE) == {{trained}}:
            ends(len(DONE))
        return super().forward(x)


task = make(model=lambda: Late(4, 3), validation=(X[:5], Y[:5]), metrics={{{{"m": metric}}}})
"""
CONVERGE = ("--set", "optimizer=foreach", *CPU, "--converge", 4)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_trainings_are_compared_leaves_the_proof_and_what_was_trained(
    hotloop: Hotloop, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    late = ENDS.format(ends=f"signal.raise_signal({int(number)})", validation=4, trained=None)
    (tmp_path / "late.py").write_text(late)
    done = hotloop("check", "late.py", *CONVERGE, "--json")
    assert done.code == code
    assert done.document["parity"] == "bitwise"
    found = done.document["convergence"]
    assert (len(found["baseline"]), len(found["plan"]), found["seeds"]) == (2, 1, [0, 1])
    assert (found["equivalent"], found["difference"]) == (False, None)
    assert found["ended_by"] == number.name
    said = f"stopped by {number.name} at the training of the plan with seed 1; the results so far are shown"
    assert done.err.splitlines()[-1] == said


def test_seeds_that_were_trained_both_ways_before_ctrl_c_are_tested(hotloop: Hotloop, tmp_path: Path) -> None:
    late = ENDS.format(ends="signal.raise_signal(signal.SIGINT)", validation=7, trained=None)
    (tmp_path / "late.py").write_text(late)
    done = hotloop("check", "late.py", *CONVERGE)
    assert done.code == 130
    assert "3 seeds trained for 1 epochs" in done.err and "they end alike" in done.err


def test_a_training_that_fails_is_one_line_beside_the_proof(hotloop: Hotloop, tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(ENDS.format(ends='raise ValueError("planted")', validation=None, trained=7))
    done = hotloop("check", "late.py", *CONVERGE, "--json")
    assert done.code == 1
    assert done.document["parity"] == "bitwise"
    found = done.document["convergence"]
    assert (len(found["baseline"]), len(found["plan"]), found["ended_by"]) == (4, 3, "failure")
    assert found["equivalent"] is False  # though three seeds ended alike
    assert (
        "the training of the plan with seed 3: step 1 (epoch 1, batch 1) raised ValueError: planted (late.py:"
        in done.err
    )
    assert "Traceback" not in done.err
    words = hotloop("check", "late.py", *CONVERGE).err
    assert "bitwise" in words and "3 seeds trained for 1 epochs: not shown to end alike" in words


def test_validation_data_that_can_t_be_evaluated_is_one_line_beside_the_proof(hotloop: Hotloop, tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(
        f"""{SMALL}
task = make(
    model=lambda: nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(8, 3)),
    data=(X.argsort(1), Y),
    validation=(torch.full((5, 4), 9), Y[:5]),
)
"""
    )
    done = hotloop("check", "rows.py", *CONVERGE)
    assert done.code == 1
    assert "bitwise" in done.err and "Traceback" not in done.err
    last = done.err.splitlines()[-1]
    assert last.startswith("error: the training of the baseline with seed 0: validation after step 4: an index is out")
    assert "'0' (Embedding)" in last and "indices from 0 to 8" in last


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
