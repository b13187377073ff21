"""Ranks that would wait for each other for ever: each ends in time, with one line that names rank and place."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hotloop
from hotloop.errors import HotloopError, PlanError, TrainingError
from hotloop.lowering import evaluation
from hotloop.plan import Plan
from hotloop.training.run import Run
from tests.multi.distributed.test_ddp import distance
from tests.support.processes import rank_processes  # noqa: F401 - imports what each fork would
from tests.support.processes.forked_server import Server
from tests.support.processes.rank_processes import of_ranks
from tests.support.processes.resumed_training import disagreements
from tests.support.tasks.rank_tasks import images

CULPRIT = 1
DATA, TENSOR = Plan(parallel="data", ranks=2), Plan(parallel="tensor", ranks=2)
TIMEOUT = "4s"


def is_culprit() -> bool:
    return dist.is_initialized() and dist.get_rank() == CULPRIT


def task(**fields: Any) -> hotloop.Task:
    x = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
    given: dict[str, Any] = dict(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
        data=(x, (x[:, 0] > 0).long()),
        validation=8,
        batch_size=8,
        epochs=3,
    )
    return hotloop.Task(**given | fields)


class Skipping(torch.optim.Adam):
    """The culprit leaves out one collective operation, once."""

    def __init__(self, parameters: Any, marker: Path) -> None:
        super().__init__(parameters, lr=0.01)
        self.updates, self.marker = 0, marker

    def step(self, closure: Any = None) -> Any:
        self.updates += 1
        if self.updates == 6 and dist.is_initialized() and not self.marker.exists() and not is_culprit():
            self.marker.touch()
            dist.barrier()
        return super().step(closure)


def test_a_rank_that_leaves_out_a_collective_operation_is_reported_with_its_place(tmp_path: Path) -> None:
    given = task(optimizer=lambda p: Skipping(p, tmp_path / "marker"))
    run = tmp_path / "run"
    with pytest.raises(TrainingError) as caught:
        hotloop.fit(given, run=run, plan=DATA, checkpoint_every="2", rank_timeout=TIMEOUT, progress=False)
    said = str(caught.value)
    assert len(said.splitlines()) == 1
    assert said.startswith("the ranks have waited 4s for each other: rank 0 in barrier, operation ")
    assert "(training, step 6, test_deadlocks.py:" in said and "; rank 1 in all_reduce, operation " in said
    resumed = hotloop.fit(given, run=run, resume=True, progress=False)
    whole = hotloop.fit(given, run=tmp_path / "whole", plan=DATA, checkpoint_every="2", progress=False)
    assert disagreements(whole.path, resumed.path) == []


class Mismatching(torch.optim.Adam):
    """The sixth step of each start sums tensors whose sizes differ between ranks; gloo aborts the process of one of them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.01)
        self.updates = 0

    def step(self, closure: Any = None) -> Any:
        self.updates += 1
        if self.updates == 6 and dist.is_initialized():
            dist.all_reduce(torch.ones(100 << is_culprit()))
        return super().step(closure)


@pytest.mark.more
def test_an_abort_in_each_start_ends_the_run_after_three_new_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = task(optimizer=Mismatching, epochs=100)
    with pytest.raises(TrainingError) as caught:
        hotloop.fit(given, run=tmp_path / "run", plan=DATA, checkpoint_every="2")
    said, lines = str(caught.value), capfd.readouterr().err
    assert len(said.splitlines()) == 1
    assert said.startswith("rank ") and "SIGABRT" in said and ", after 3 new starts" in said
    line = Mismatching.step.__code__.co_firstlineno + 3
    assert f"last seen in all_reduce (test_deadlocks.py:{line}), after" in said
    assert lines.count(" start again from the last checkpoint (") == 3
    assert "Traceback" not in lines


@pytest.mark.more
def test_a_rank_that_evaluates_a_batch_more_is_reported_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = evaluation.evaluation_batches

    def one_more(*args: Any) -> Iterator[tuple[Any, int]]:
        for batch in batches(*args):
            yield batch
            if is_culprit():
                yield batch

    monkeypatch.setattr(evaluation, "evaluation_batches", one_more)
    with pytest.raises(TrainingError) as caught:
        hotloop.fit(task(), run=tmp_path / "run", plan=TENSOR, rank_timeout=TIMEOUT, progress=False)
    said = str(caught.value)
    assert said.startswith("the ranks have waited 4s for each other: rank 0 in ")
    assert "; rank 1 in all_reduce, operation " in said and "(evaluation, step 4" in said.partition("rank 1")[2]


@pytest.mark.more
@pytest.mark.parametrize("plan", [DATA, pytest.param(TENSOR, marks=pytest.mark.more)])
def test_an_error_of_one_rank_in_validation_is_reported_with_rank_and_place(plan: Plan, tmp_path: Path) -> None:
    def metric(output: Tensor, target: Tensor) -> Tensor:
        if is_culprit():
            raise ValueError("the culprit counts no hits")
        return (output.argmax(1) == target).float()

    given = task(metrics={"hits": metric}, data=list(zip(*task().data, strict=True)), validation=16)
    with pytest.raises(HotloopError, match=r"^rank 1: .*validation.*ValueError: the culprit counts no hits") as caught:
        hotloop.fit(given, run=tmp_path / "run", plan=plan, rank_timeout="60s", progress=False)
    assert len(str(caught.value).splitlines()) == 1


def test_a_rank_that_computes_for_ever_is_reported_with_the_users_line(tmp_path: Path) -> None:
    calls = [0]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls[0] += dist.is_initialized() and torch.is_grad_enabled()
        while is_culprit() and calls[0] > 8:
            time.sleep(0.1)
        return nn.functional.cross_entropy(output, target)

    with pytest.raises(
        TrainingError, match=r"; rank 1 in no collective operation \(training, step \d+, test_deadlocks"
    ):
        hotloop.fit(task(loss=loss), run=tmp_path / "run", plan=DATA, rank_timeout=TIMEOUT, progress=False)


def test_a_timeout_that_is_no_time_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="rank-timeout='soon'; expected a time above zero"):
        hotloop.fit(task(), run=tmp_path / "run", plan=DATA, rank_timeout="soon", progress=False)


class Blocks(nn.Module):
    """Blocks that are spread one by one, as those of language models are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.flatten(1))
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def evaluated_first(plan: Plan, validation: int) -> Any:
    given = images(
        torch.float64, samples=110, model=lambda: Blocks().double(), batch_size=25, average=None, validation=validation
    )
    program, figures = hotloop.lower(given, plan), []
    assert given.roles.validation is not None
    for _ in range(3):
        figures.append(evaluation.evaluate(program, given.roles.validation).values)
        program.advance(2)
    return program.state(), [], {f"{name} {n}": value for n, one in enumerate(figures) for name, value in one.items()}


@pytest.mark.more
@pytest.mark.parametrize("validation", [10, pytest.param(60, marks=pytest.mark.more)])
def test_sharded_ranks_that_evaluate_different_numbers_of_batches_go_on(validation: int, tmp_path: Path) -> None:
    plan = Plan(parallel="sharded", ranks=2)
    alone = evaluated_first(Plan(), validation)
    for rank in of_ranks(tmp_path, plan, lambda world: evaluated_first(plan, validation)):
        assert {path: far for path, far in distance(rank, alone).items() if far > 1e-10} == {}


FILE = """
import os, torch, hotloop
from torch import nn

calls = [0]

def loss(output, target):
    ranked = torch.distributed.is_initialized()
    calls[0] += ranked and torch.is_grad_enabled()
    if ranked and calls[0] == 14 and torch.distributed.get_rank() == 1:
        open("waits", "w").close()
        torch.distributed.barrier()
    return nn.functional.cross_entropy(output, target)

x = torch.randn(400, 6, generator=torch.Generator().manual_seed(1))
task = hotloop.Task(model=lambda: nn.Linear(6, 3), loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
                    data=(x, x[:, :3].argmax(1)), batch_size=8, epochs=2)
"""


def waiting(server: Server, folder: Path) -> Any:
    """A command whose ranks wait for each other."""
    (folder / "task.py").write_text(FILE)
    process = server.start("train", "task.py", "--ranks", "2", "--run", "run", "--checkpoint-every", "2", cwd=folder)
    deadline = time.monotonic() + 120
    while not (folder / "waits").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1)
    return process


@pytest.mark.more
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(one, marks=pytest.mark.more) for one in (signal.SIGINT, signal.SIGHUP))]
)
def test_a_signal_ends_ranks_that_wait_for_each_other(number: int, tmp_path: Path, server: Server) -> None:
    process = waiting(server, tmp_path)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number, err
    assert f"stopped ({signal.Signals(number).name}) without saving, the last checkpoint stays: the ranks have" in err
    assert "Traceback" not in err
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    assert Run.open(tmp_path / "run").last_saved()


@pytest.mark.more
def test_no_rank_is_left_where_the_command_is_killed_before_they_train(tmp_path: Path, server: Server) -> None:
    (tmp_path / "task.py").write_text(FILE)
    process = server.start("train", "task.py", "--ranks", "2", "--run", "run", cwd=tmp_path)
    family: list[psutil.Process] = []
    while len(family) < 2:
        assert process.poll() is None
        family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=60)
    for one in alive:
        one.kill()
    assert alive == []
