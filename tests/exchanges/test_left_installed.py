"""What is decided leaves nothing in the script's process: no hook, no replaced function, no setting, and a true summary."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

SCRIPT = Path(__file__).parents[1] / "support/scripts/left_installed.py"

STEPS = "4000"
"""Steps of less than a millisecond; the exchanges are decided in the first ones."""


class Run:
    """A script that ran under `hotloop run`, with its lines and its record."""

    def __init__(self, tmp_path: Path, script: Path, *arguments: str, options: tuple[str, ...] = ("--exact",)) -> None:
        environment = dict(os.environ) | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}
        record = tmp_path / "record.json"
        command = ["run", str(script), "--record", str(record), *options, "--", *arguments]
        done = subprocess.run(
            [sys.executable, "-m", "hotloop", *command], env=environment, capture_output=True, text=True, check=True
        )
        self.lines, self.summary = done.stdout.splitlines(), done.stderr
        self.record: dict[str, Any] = json.loads(record.read_text())

    def reasons(self, kind: str) -> list[str]:
        return [part["reason"] for part in self.record["parts"] if part["kind"] == kind]


@pytest.mark.few("rmsprop", "loader")
@pytest.mark.parametrize("kind", ["rmsprop", "own", "sgd", "loader", "learner"])
def test_nothing_is_left_once_nothing_is_exchanged(kind: str, tmp_path: Path) -> None:
    """Also for a training in a thread other than the one that imported torch."""
    run = Run(tmp_path, SCRIPT, kind, STEPS)
    assert run.lines == ["end: nothing", "kept"]
    assert not any(part["used"] for part in run.record["parts"])
    assert "ran as under python" in run.summary


def test_a_script_s_own_hook_after_hotloop_s_stays_in_place(tmp_path: Path) -> None:
    seen, end, _ = Run(tmp_path, SCRIPT, "late hook", STEPS).lines
    assert seen == STEPS and end == "end: hook of hotloop.exchanges.windows"  # an empty function


def test_a_process_that_the_script_forks_has_nothing_installed(tmp_path: Path) -> None:
    assert Run(tmp_path, SCRIPT, "fork", "0").lines[0] == "child: nothing"


def test_a_second_network_is_tried_again_and_nothing_is_left_after_it(tmp_path: Path) -> None:
    run = Run(tmp_path, SCRIPT, "folds", STEPS)
    assert run.lines == ["first: nothing", "end: nothing", "kept"]
    (part,) = (part for part in run.record["parts"] if part["kind"] == "optimizer")
    assert part["name"] == "SGD, 1,348 numbers in 4 tensors" and part["proven"] >= 3


def test_the_next_fold_of_a_training_without_a_faster_exchange_begins_no_search(tmp_path: Path) -> None:
    first, equal, other, end, _ = Run(tmp_path, SCRIPT, "equal folds", STEPS).lines
    assert [first, equal, end] == ["first: nothing", "equal: nothing", "end: nothing"]
    assert "fetch" in other, "a network of other shapes is tried"


def test_a_network_that_waits_to_be_compiled_has_no_hook_in_its_calls(tmp_path: Path) -> None:
    """Compiling pays after ten seconds of training at the earliest, so a shorter script has its own calls."""
    run = Run(tmp_path, SCRIPT, "rmsprop", "300", options=())
    assert "a module" not in run.lines[0] and "Module.__call__" not in run.lines[0]
    assert run.reasons("module") == ["the script ended before compiling was likely to pay"]


def test_the_next_run_of_a_script_without_a_faster_exchange_has_no_hook_at_all(tmp_path: Path) -> None:
    first = Run(tmp_path, SCRIPT, "rmsprop", "5", options=())
    assert "fetch" in first.lines[0], "the first run tries exchanges"
    second = Run(tmp_path, SCRIPT, "rmsprop", "5", options=())
    assert second.lines == ["end: nothing", "kept"]
    (note,) = second.record["notes"]
    assert note.startswith("an earlier run was too short for a decision on module: Sequential, 676 parameters")
    other = Run(tmp_path, SCRIPT, "rmsprop", "6", options=())
    assert "fetch" in other.lines[0], "other arguments may train for longer"


def test_a_script_that_fails_is_tried_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        SCRIPT.read_text() + "\nif os.path.exists(os.environ['XDG_CACHE_HOME'] + '/fail'): raise OSError\n"
    )
    fail = tmp_path / "cache/fail"
    fail.parent.mkdir()
    fail.touch()
    with pytest.raises(subprocess.CalledProcessError):
        Run(tmp_path, script, "rmsprop", "5", options=())
    fail.unlink()
    assert "fetch" in Run(tmp_path, script, "rmsprop", "5", options=()).lines[0]


def test_a_step_without_page_faults_leaves_the_allocator_to_the_system(tmp_path: Path) -> None:
    """Any call of mallopt ends glibc's own rules, by which a freed block of 16 MB raises the limit of mapped blocks."""
    run = Run(tmp_path, SCRIPT, "slow", "100")
    assert run.lines[-1] == "kept"
    assert [reason for reason in run.reasons("process") if "page faults, so there is nothing to gain" in reason]


def test_a_race_that_rounds_and_ends_undecided_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path, SCRIPT, "small from 0", "40", options=())
    assert "ran as under python" not in run.summary
    named = [note for note in run.record["notes"] if "results can differ by rounding" in note]
    assert named == [
        "process: numbers below 1.2e-38: flushed to zero computed some of the steps, so results can differ by rounding"
    ]


@pytest.mark.parametrize(("kind", "is_raced"), [("slow", False), ("small from 20", True)])
def test_numbers_are_flushed_only_once_a_training_has_subnormal_ones(kind: str, is_raced: bool, tmp_path: Path) -> None:
    run = Run(tmp_path, SCRIPT, kind, "90", options=())
    assert any("flushed to zero computed some" in note for note in run.record["notes"]) == is_raced
    is_unneeded = "parameters, gradients and optimizer state have no such number" in run.reasons("process")
    assert is_unneeded != is_raced
    assert ("ran as under python" in run.summary) != is_raced


def test_packages_of_another_environment_are_installed_code(tmp_path: Path) -> None:
    """The reasons against an exchange are searched in the script's own files, not in those of packages."""
    package = tmp_path / "other" / "site-packages" / "differentiating.py"
    package.parent.mkdir(parents=True)
    package.write_text("def penalty(grad): return grad(create_graph=True)\n")
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.path.append({str(package.parent)!r})\nimport differentiating\n" + SCRIPT.read_text()
    )
    run = Run(tmp_path, script, "rmsprop", "20", options=())
    assert run.reasons("module") == ["the script ended before compiling was likely to pay"]


READS = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Pictures(Dataset):
    def __init__(self):
        self.values = torch.rand(1600, 16)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, row):
        value = self.values[row]
        for _ in range(12):
            value = value * 0.9 + 0.1
        return value

torch.manual_seed(0)
code, reads = Pictures.__getitem__.__code__, 0

def count(frame, event, argument):
    global reads
    reads += event == "call" and frame.f_code is code

model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(Pictures(), batch_size=16, shuffle=True)
for epoch in range(3):
    reads = 0
    sys.setprofile(count)
    for x in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    sys.setprofile(None)
    print(reads)
"""


def test_a_second_run_cuts_from_memory_as_early_as_the_first(tmp_path: Path) -> None:
    """Windows without exchanges, which a stored exchange begins early, leave no sample of the first epoch out.

    Where one is left out, the second epoch reads each of its 1,600 samples.
    """
    script = tmp_path / "script.py"
    script.write_text(READS)
    for _ in range(2):
        run = Run(tmp_path, script, options=())
        assert int(run.lines[0]) == 1600
    (loader,) = (part for part in run.record["parts"] if part["kind"] == "data loader")
    assert loader["used"] and int(run.lines[1]) < 1600, (run.lines, run.record)


def test_calls_without_a_backward_are_no_training_calls(modules) -> None:
    """Most calls of the trained network act, without `no_grad` and on inputs of another shape."""
    model, target = nn.Linear(8, 4), nn.Linear(8, 4)
    acted = []
    for _ in range(60):
        inputs = torch.randn(16, 8)
        acted += [model(inputs[:1]), model(inputs[:1])]
        (model(inputs) - target(inputs).detach()).square().mean().backward()
        modules.step_ended()
    assert modules.exchange._sites[id(model)].part.proven >= 1, "a call with a backward was recorded and proven"
    assert all(output._backward_hooks is None for output in acted[-60:]), "no other call is recorded"


def test_a_network_for_acting_alone_is_left(modules) -> None:
    acting, model = nn.Linear(8, 4), nn.Linear(8, 4)
    for _ in range(20):
        for _ in range(20):
            acting(torch.randn(16, 8))
        model(torch.randn(16, 8)).sum().backward()
        modules.step_ended()
    site = modules.exchange._sites[id(acting)]
    assert site.part.stage == "off" and site.part.reason == "200 calls in a row had no backward"
    assert acting._compiled_call_impl is None
