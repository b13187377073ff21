"""A resume is measured: a second process rehearses it, and a resumed run compares the steps that it repeats."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hotloop
from hotloop.errors import TaskError

TASK = """
import ctypes, os, time
import torch
from torch import nn
import hotloop

x = torch.randn(120, 4, generator=torch.Generator().manual_seed(0))
KIND = {kind!r}
shared = ctypes.c_double(0.0)


class Hook:
    def __init__(self):
        self.calls = 0

    def __call__(self, module, given, output):
        self.calls += 1
        return output * (1 + 0.01 * self.calls)


def network():
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    if KIND == "hook":
        model[0].register_forward_hook(Hook())
    return model


def loss(output, target):
    time.sleep(float(os.environ.get("SLOW", 0)))
    if KIND == "raises" and "rehearsal" in " ".join(open("/proc/self/cmdline").read().split(chr(0))):
        raise RuntimeError("this process is a rehearsal")
    scale = 1.0
    if KIND in ("shared", "named"):
        shared.value += 0.01
        scale += shared.value
    return ((output - target) ** 2).mean() * scale


state = {{"shared": (lambda: shared.value, lambda value: setattr(shared, "value", value))}} if KIND == "named" else {{}}
task = hotloop.Task(
    model=network, loss=loss, optimizer=lambda p: torch.optim.Adam(p, lr=0.01), data=(x, x[:, :1]),
    batch_size=10, epochs=4, validation=0.1, state=state,
)
"""


def start(folder: Path, *arguments: str, slow_s: float = 0.0) -> subprocess.Popen:
    command = [sys.executable, "-m", "hotloop", "train", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "SLOW": str(slow_s)}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def train(folder: Path, kind: str, *more: str) -> tuple[str, dict]:
    (folder / "task.py").write_text(TASK.format(kind=kind))
    process = start(folder, "task.py", "--plan", "baseline", "--run", "run", *more)
    said = process.communicate(timeout=240)[0]
    assert process.returncode == 0, said
    return said, json.loads((folder / "run" / "run.json").read_text())


@pytest.mark.parametrize(
    ("kind", "result"), [("none", "same bits"), ("named", "same bits"), ("hook", "different"), ("shared", "different")]
)
def test_a_rehearsal_compares_a_resume_with_the_run(kind: str, result: str, tmp_path: Path) -> None:
    said, record = train(tmp_path, kind, "--rehearse", "1")
    (line,) = record["rehearsals"]
    assert line.startswith("resume rehearsed: ") and result in line and said.count(line) == 1
    assert record["facts"]["exact"] is (result == "same bits")
    assert not (tmp_path / "run" / ".rehearsal").exists()


def test_a_rehearsal_that_fails_is_a_line(tmp_path: Path) -> None:
    said, record = train(tmp_path, "raises", "--rehearse", "1")
    (line,) = record["rehearsals"]
    assert "not rehearsed: " in line and "this process is a rehearsal" in line and line in said
    assert record["facts"]["exact"] is True


def test_a_short_run_says_why_it_was_not_rehearsed(tmp_path: Path) -> None:
    said, record = train(tmp_path, "none")
    (line,) = record["rehearsals"]
    assert line.startswith("not rehearsed: ") and line not in said


def last_step(path: Path) -> int:
    """Returns the number of the last step on record; 0 without one."""
    lines = path.read_text().splitlines() if path.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


@pytest.mark.parametrize(("kind", "is_exact"), [("none", True), ("named", True), ("shared", False), ("hook", False)])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_resumed_run_compares_the_steps_that_it_repeats(
    kind: str, is_exact: bool, number: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "task.py").write_text(TASK.format(kind=kind))
    process = start(tmp_path, "task.py", "--plan", "baseline", "--run", "run", "--checkpoint-every", "7", slow_s=0.05)
    steps = tmp_path / "run" / "steps.jsonl"
    while process.poll() is None and not (
        list(tmp_path.glob("run/checkpoints/*.safetensors")) and last_step(steps) % 7 in (2, 3)
    ):
        time.sleep(0.02)  # some steps after a checkpoint, and some before the next
    process.send_signal(number)
    said = process.communicate(timeout=120)[0]
    assert last_step(steps), said
    resumed = start(tmp_path, "--resume", "run")
    said = resumed.communicate(timeout=120)[0]
    assert resumed.returncode == 0, said
    facts = json.loads((tmp_path / "run" / "run.json").read_text())["facts"]
    assert facts["exact"] is is_exact, said
    assert ("gets other bits" in said) is not is_exact


@pytest.mark.parametrize("state", [{"a": 1}, {"a": (len,)}, [1], {1: (len, len)}])
def test_a_wrong_state_is_one_line(state: object) -> None:
    with pytest.raises(TaskError, match="state"):
        hotloop.Task(model=len, optimizer=len, data=(), loss=len, state=state)


def test_a_wrong_number_of_rehearsals_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK.format(kind="none"))
    process = start(tmp_path, "task.py", "--rehearse", "often")
    said = process.communicate(timeout=60)[0]
    assert (
        process.returncode in (1, 2)
        and "rehearse=" in said
        and "a number of rehearsals" in said
        and "Traceback" not in said
    )
