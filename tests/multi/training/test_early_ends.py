"""How trainings of ranks end before their time: a signal within an evaluation, numbers that aren't, a lost launcher."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hotloop
from hotloop.distributed.launch import launch
from hotloop.errors import HotloopError, NonFiniteError, PlanError
from hotloop.plan import Plan
from hotloop.training.run import Run
from tests.conftest import RunCli
from tests.support.processes import rank_processes  # noqa: F401 - imports what each fork would
from tests.support.processes.forked_server import Server
from tests.support.processes.resumed_training import disagreements, until

CULPRIT = 1
PLANS = {
    "stages": Plan(parallel="stages", ranks=2, microbatches=2, split="2"),
    "tensor": Plan(parallel="tensor", ranks=2),
}


def is_culprit() -> bool:
    return torch.distributed.is_initialized() and torch.distributed.get_rank() == CULPRIT


class Samples(torch.utils.data.Dataset):
    def __init__(self, trouble: Callable[[], Any] = lambda: None) -> None:
        self.x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
        self.trouble, self.taken = trouble, 0

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        self.taken += 1
        if self.taken == 40 and is_culprit():
            self.trouble()
        return self.x[place], int(self.x[place, 0] > 0)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def task(**fields: Any) -> hotloop.Task:
    given: dict[str, Any] = dict(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
        data=Samples(),
        validation=16,
        batch_size=8,
        epochs=2,
    )
    return hotloop.Task(**given | fields)


def signalling(marker: Path) -> Callable[[Tensor, Tensor], Tensor]:
    """A metric; the first evaluation of the culprit has the command end, and waits until that has come to all."""

    def metric(output: Tensor, target: Tensor) -> Tensor:
        if is_culprit() and not marker.exists():
            marker.touch()
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(1)
        return (output.argmax(1) == target).float()

    return metric


@pytest.mark.more
@pytest.mark.parametrize("way", [pytest.param("stages", marks=pytest.mark.more), "tensor"])
def test_a_signal_within_an_evaluation_stops_ranks_that_compute_it_together(way: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    marker.touch()
    given = task(metrics={"hits": signalling(marker)})
    whole = hotloop.fit(given, run=tmp_path / "whole", plan=PLANS[way], progress=False)
    marker.unlink()
    stopped = hotloop.fit(given, run=tmp_path / "run", plan=PLANS[way], progress=False)
    assert stopped.journal()[-1]["reason"] == "SIGTERM"
    assert stopped.epochs == [] and stopped.journal()[-1]["step"] == 3  # the epoch has no figures yet
    resumed = hotloop.fit(given, run=tmp_path / "run", resume=True, progress=False)
    assert resumed.final is not None
    assert disagreements(whole.path, resumed.path) == []


@pytest.mark.more
def test_numbers_that_are_none_end_all_ranks_and_one_process_finds_the_place(tmp_path: Path) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target) / (target != 3).all()

    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    y = (x[:, 0] > 0).long()
    y[7] = 3  # of one sample
    given = task(data=(x, y), validation=None, loss=loss)
    with pytest.raises(NonFiniteError, match=r"^by step \d+ the loss or a parameter .* Go on with .*parallel=none"):
        hotloop.fit(given, run=tmp_path / "run", plan=Plan(parallel="data", ranks=2), progress=False)
    with pytest.raises(NonFiniteError, match=r"step \d"):
        hotloop.fit(given, run=tmp_path / "alone", plan=Plan(), progress=False)


class OneBad(Samples):
    """Of the second batch of 8, which is the second rank's."""

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        x, y = super().__getitem__(place)
        return (x * math.nan if place == 8 + 3 else x), y


@pytest.mark.more
def test_a_figure_that_is_none_ends_all_ranks_and_one_process_names_the_sample(tmp_path: Path) -> None:
    given = task(validation=OneBad())
    ends = r"^after epoch 1 the validation loss is NaN\. Go on with parallel=none, ranks=none in the plan, which names"
    with pytest.raises(NonFiniteError, match=ends):
        hotloop.fit(given, run=tmp_path / "run", plan=Plan(parallel="data", ranks=2), progress=False)
    with pytest.raises(NonFiniteError, match="sample 11 of the validation data has NaN in its input"):
        hotloop.fit(given, run=tmp_path / "alone", plan=Plan(), progress=False)


class OneOfNoClass(Samples):
    """In the second batch of 8, among the rows of the second rank."""

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        x, y = super().__getitem__(place)
        return x, 9 if place == 14 else y


@pytest.mark.more
def test_a_wrong_sample_is_named_by_the_rank_that_has_it(tmp_path: Path) -> None:
    given = task(data=OneOfNoClass(), validation=None, shuffle=False)
    with pytest.raises(HotloopError, match=r"^rank 1: step 2 .* has label 9 in sample 14, but the model has 4 outputs"):
        hotloop.fit(given, run=tmp_path / "run", plan=Plan(parallel="data", ranks=2), progress=False)


class Again(nn.Module):
    """Computes its middle anew, in the way that is torch's default."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.middle, self.first(x), use_reentrant=True))


@pytest.mark.more
def test_a_reentrant_checkpoint_is_refused_before_training_where_torchs_engine_does_not_follow(tmp_path: Path) -> None:
    given = task(model=Again, validation=None, epochs=1)
    with pytest.raises(PlanError, match=r"^parallel=data, .* Use checkpoint\(..., use_reentrant=False\) there"):
        hotloop.fit(given, run=tmp_path / "run", plan=Plan(parallel="data", ranks=2), progress=False)
    hotloop.fit(given, run=tmp_path / "towers", plan=Plan(parallel="towers", ranks=2), progress=False)


SCRIPT = """
import time
import torch
from torch import nn
import hotloop

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2)
    def forward(self, x):
        return self.layer(x)

def loss(output, target):
    time.sleep(0.05)
    return nn.functional.cross_entropy(output, target)

x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
task = hotloop.Task(model=Net, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
                    data=(x, (x[:, 0] > 0).long()), batch_size=4, epochs=1000)
try:
    hotloop.fit(task, run="run", plan=hotloop.Plan(parallel="data", ranks=2), progress=False)
    print("fit has returned")
except KeyboardInterrupt:
    print("fit was interrupted")
"""


def begun(process: Any, run: Path) -> None:
    deadline = time.monotonic() + 60
    while not (run / "run.json").exists() or Run.open(run).reached() < 5:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.more
def test_ctrl_c_in_a_terminal_has_ranks_save_and_stop(tmp_path: Path, server: Server) -> None:
    """There it goes to the whole process group, of which forks are."""
    (tmp_path / "script.py").write_text(SCRIPT)
    process = server.start(tmp_path / "script.py", script=True, cwd=tmp_path)
    begun(process, tmp_path / "run")
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "fit has returned\n"), err
    stop = Run.open(tmp_path / "run").journal()[-1]
    assert (stop["event"], stop["reason"]) == ("stop", "SIGINT")
    assert stop["step"] == Run.open(tmp_path / "run").reached()


@pytest.mark.parametrize("in_a_thread", [False, True])
def test_forks_leave_the_terminals_group_where_its_ctrl_c_is_passed_on_alone(tmp_path: Path, in_a_thread: bool) -> None:
    """A thread other than the main one can't pass it on."""
    group = tmp_path / "group"

    def start() -> None:
        launch(1, lambda: group.write_text(str(os.getpgrp())), print)

    thread = threading.Thread(target=start)
    if in_a_thread:
        thread.start()
        thread.join()
    else:
        start()
    assert (int(group.read_text()) == os.getpgrp()) is in_a_thread


@pytest.mark.more
def test_a_second_ctrl_c_interrupts_fit_which_says_so(tmp_path: Path, server: Server) -> None:
    hold, held = tmp_path / "hold", tmp_path / "held"
    busy = f"if os.path.exists({str(hold)!r}): open({str(held)!r}, 'w').close(); time.sleep(60)"
    (tmp_path / "script.py").write_text(
        "import os\n" + SCRIPT.replace("time.sleep(0.05)", f"time.sleep(0.05)\n    {busy}")
    )
    process = server.start(tmp_path / "script.py", script=True, cwd=tmp_path)
    begun(process, tmp_path / "run")
    hold.touch()
    deadline = time.monotonic() + 60
    while not held.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.5)  # two that come at once are one
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "fit was interrupted\n"), err


BUSY = """
import torch
from torch import nn
import hotloop

torch.set_num_threads(2)
torch.ones(1 << 20).div(255).sum()

def loss(output, target):
    return nn.functional.cross_entropy(output, target) + 0 * torch.ones(1 << 20).div(255).sum()

x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
task = hotloop.Task(model=lambda: nn.Linear(6, 2), loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
                    data=(x, (x[:, 0] > 0).long()), batch_size=4, epochs=1)
hotloop.fit(task, run="run", plan=hotloop.Plan(parallel="data", ranks=2, threads=2), progress=False)
torch.ones(1 << 20).div(255).sum()
"""


@pytest.mark.more
def test_forks_of_a_process_that_has_used_several_threads_use_several_too(tmp_path: Path, server: Server) -> None:
    (tmp_path / "script.py").write_text(BUSY)
    process = server.start(tmp_path / "script.py", script=True, cwd=tmp_path)
    try:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert Run.open(tmp_path / "run").final is not None
    finally:  # a rank that waits for ever hears nothing
        left = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for one in left:
            one.kill()
        process.kill()


@pytest.mark.more
def test_ranks_whose_launcher_is_killed_save_and_stop(tmp_path: Path, server: Server) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    run = tmp_path / "run"
    process = server.start(tmp_path / "script.py", script=True, cwd=tmp_path)
    begun(process, run)
    of_launcher = psutil.Process(process.pid).children()
    assert len(of_launcher) >= 2
    process.kill()
    _, alive = psutil.wait_procs(of_launcher, timeout=30)
    assert alive == []
    stop = Run.open(run).journal()[-1]
    assert stop["event"] == "stop"
    assert stop["reason"] == "SIGTERM"
    assert stop["step"] == Run.open(run).reached()


DYING = """
import os, signal, time
import torch, hotloop
from hotloop.training import start
from torch import nn

reasons = start.cudnn_inexact_reasons

def dying(parts):
    if os.environ.get("TORCHELASTIC_RUN_ID", "").endswith("-0"):
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # until the agent ends this rank, too
    return reasons(parts)

start.cudnn_inexact_reasons = dying
x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
task = hotloop.Task(model=lambda: nn.Linear(6, 2), loss=nn.CrossEntropyLoss(), data=(x, (x[:, 0] > 0).long()),
                    optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_size=8, epochs=1)
"""


@pytest.mark.more
@pytest.mark.parametrize("options", [("--run", "run"), ()], ids=["named", "unnamed"])
def test_a_rank_that_is_killed_after_the_run_was_made_and_before_its_first_step(
    options: tuple[str, ...], tmp_path: Path, run_cli: RunCli
) -> None:
    """The first rank, which the agent ends, removes its run without a step; the ranks that are started again make it anew."""
    (tmp_path / "task.py").write_text(DYING)
    done = run_cli("train", "task.py", "--ranks", "2", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rank 1 was killed (SIGKILL): all 2 start again from the last checkpoint (1 of 3)" in done.stderr
    (record,) = tmp_path.rglob("run.json")
    assert Run.open(record.parent).final is not None


OUTLIVING = """
import os, pathlib, signal, time
from hotloop.core.processes import signal_handlers
from hotloop.distributed.launch import launch

def outlive():
    with signal_handlers(lambda number, frame: None, signal.SIGTERM):
        pathlib.Path("rank").write_text(str(os.getpid()))
        while os.getppid() == launcher:
            time.sleep(0.01)
    pathlib.Path("over").touch()

launcher = os.getpid()
launch(1, outlive, print)
"""


@pytest.mark.more
def test_a_rank_whose_launcher_was_killed_waits_for_nobody_once_it_is_done(tmp_path: Path, server: Server) -> None:
    (tmp_path / "script.py").write_text(OUTLIVING)
    process = server.start(tmp_path / "script.py", script=True, cwd=tmp_path)
    assert until(process, (tmp_path / "rank").exists, pause_s=0.05, timeout_s=60)
    (rank,) = psutil.Process(process.pid).children()
    process.kill()
    _, alive = psutil.wait_procs([rank], timeout=30)
    for one in alive:
        one.kill()
    assert alive == []
    assert (tmp_path / "over").exists()
