"""What goes wrong in a training ends the command with one line, exit code 1, and a run that is intact."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hotloop.training.run import Run
from tests.support.processes.in_process_command import Hotloop

HEAD = """
import torch
from torch import nn
import hotloop

x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
y = x[:, :3].argmax(1)


class Check(nn.Module):
    def forward(self, x):
        return self.check(x) if torch.is_grad_enabled() else x


def task(**fields):
    given = dict(
        model=lambda: nn.Sequential(nn.Linear(6, 8), Check(), nn.Linear(8, 3)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        data=(x, y), batch_size=6, epochs=3, shuffle=False,
    )
    return hotloop.Task(**(given | fields))

"""

NAN = (
    HEAD
    + """
x[14, 0] = 1e6  # in the third batch
Check.check = lambda self, x: x / (x.detach().abs().amax() < 1e4)
task = task()
"""
)

MEMORY = (
    HEAD
    + """
Check.check = lambda self, x: x + torch.empty(1 << 52 if len(x) > 3 else 1, dtype=torch.uint8)[0]
task = task()
"""
)

CALLBACK = (
    HEAD
    + """
Check.check = lambda self, x: x

def count(view):
    if view.event == "epoch" and view.epoch == 2:
        raise RuntimeError("enough")

task = task(callbacks=[count])
"""
)


def write(folder: Path, text: str) -> str:
    (folder / "net.py").write_text(text)
    return "net.py"


def errors_in(text: str) -> list[str]:
    assert "Traceback" not in text
    return [line for line in text.splitlines() if line.startswith("error: ")]


def test_nan_stops_with_the_place_and_keeps_the_last_good_checkpoint(run_cli, hotloop: Hotloop, tmp_path: Path) -> None:
    done = run_cli("train", write(tmp_path, NAN), "--run", "run", "--checkpoint-every", "1", "--device", "cpu")
    assert done.returncode == 1
    (line,) = errors_in(done.stderr)
    assert line.startswith("error: step 3 (epoch 1, batch 3): the output of '1' (Check) became ")
    assert line.endswith("the last good checkpoint is of step 2")
    newest = Run.open(tmp_path / "run").checkpoints.newest()
    assert newest is not None
    state = newest[0].state
    assert state.position.step == 2
    assert all(bool(torch.isfinite(value).all()) for value in state.parameters.values())
    again = hotloop("train", "--resume", "run", "--device", "cpu", "--json")
    assert again.code == 1
    assert errors_in(again.err) == [line]
    assert again.document["error"] == {"kind": "NonFiniteError", "message": line.removeprefix("error: ")}


@pytest.mark.more
def test_a_lack_of_memory_tells_which_batch_would_fit_and_it_does(run_cli, hotloop: Hotloop, tmp_path: Path) -> None:
    done = run_cli("train", write(tmp_path, MEMORY), "--run", "run", "--device", "cpu")
    assert done.returncode == 1
    (line,) = errors_in(done.stderr)
    assert line.startswith("error: step 1 (epoch 1, batch 1) ran out of memory when it asked for 4.0 PiB; parameters ")
    assert "--batch-size 3)" in line
    smaller = hotloop("train", "net.py", "--run", "smaller", "--batch-size", "3", "--device", "cpu")
    assert smaller.code == 0, smaller.err
    assert len(Run.open(tmp_path / "smaller").epochs) == 3


def test_a_failing_callback_loses_nothing(hotloop: Hotloop, tmp_path: Path) -> None:
    done = hotloop("train", write(tmp_path, CALLBACK), "--run", "run", "--checkpoint-every", "10h", "--device", "cpu")
    assert done.code == 1
    (line,) = errors_in(done.err)
    assert line.startswith("error: the callback count raised RuntimeError: enough (net.py:")
    assert line.endswith("at the event 'epoch' after step 8. Correct that line; what was trained is saved")
    again = hotloop("train", "--resume", "run", "--device", "cpu")
    assert again.code == 0, again.err
    assert [epoch["epoch"] for epoch in Run.open(tmp_path / "run").epochs] == [1, 2, 3]
