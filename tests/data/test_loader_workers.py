"""Processes that load samples: how they start and end, what they can't send, and what they see of a data set that changes."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

import hotloop
from hotloop.data.dataset_changes import dataset_summary
from hotloop.errors import DataError, dead_dataloader_worker
from hotloop.lowering import program as program_module
from hotloop.task_file import LoadedTask
from tests.support.programs import labelled
from tests.support.runs import start_run

MORE = pytest.mark.more
X, Y = labelled(40)


class Rows(Dataset):
    """Rows whose inputs are raised by a level, which callbacks may change."""

    level = 0.0

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index] + self.level, Y[index]


def a_task(data: Any, **fields: Any) -> hotloop.Task:
    given = dict(
        model=lambda: nn.Linear(6, 3),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        epochs=3,
    )
    return hotloop.Task(data=data, **given | fields)


def losses(task: hotloop.Task, folder: Path, **how: Any) -> list[float]:
    run = hotloop.fit(task, run=folder, plan="baseline", device="cpu", progress=False, **how)
    return [epoch["train_loss"] for epoch in run.epochs]


# ---------------------------------------------------------------- starting and ending


@pytest.mark.more
@pytest.mark.parametrize("context", ["forkserver", pytest.param("spawn", marks=MORE)])
def test_every_way_to_start_workers_loads_the_same(context: str, tmp_path: Path) -> None:
    """Under a fork server the parent of a worker is the server."""
    data = DataLoader(Rows(), batch_size=8, num_workers=1, multiprocessing_context=context)
    plain = DataLoader(Rows(), batch_size=8)
    assert losses(a_task(data), tmp_path / context) == losses(a_task(plain), tmp_path / "plain")


KILLED = """
import sys, time, torch, hotloop
from torch import nn
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.ones(1000), torch.ones(1)
def going(view):
    print(view.event, flush=True)
if __name__ == "__main__":
    data = DataLoader(Slow(), batch_size=4, num_workers=2, multiprocessing_context=sys.argv[1])
    hotloop.fit(
        hotloop.Task(model=lambda: nn.Linear(1000, 1), loss=nn.MSELoss(), data=data, epochs=99, callbacks=[going],
                     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0)),
        run=sys.argv[2], plan="baseline", device="cpu", progress=False,
    )
"""


@pytest.mark.parametrize("context", ["fork", *(pytest.param(one, marks=MORE) for one in ("forkserver", "spawn"))])
def test_a_killed_training_leaves_no_worker_and_no_traceback(context: str, tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    with (tmp_path / "errors").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), context, str(tmp_path / "run")],
            stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        assert any(line == b"progress\n" for line in process.stdout)
        process.kill()
        process.wait()
        for _ in range(300):
            if not is_left(process.pid):
                break
            time.sleep(0.1)
        else:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail("workers are left")
    assert "Traceback" not in (tmp_path / "errors").read_text()


def is_left(group: int) -> bool:
    """Whether a process of a group lives."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.few("False-3")
@pytest.mark.parametrize(("deterministic", "starts"), [(None, 1), (False, 3)])
def test_workers_start_once_unless_the_data_set_is_said_to_change(
    deterministic: bool | None, starts: int, tmp_path: Path
) -> None:
    data = DataLoader(Rows(), batch_size=8, num_workers=1, worker_init_fn=Noting(tmp_path / "starts"))
    losses(a_task(data, deterministic=deterministic), tmp_path / "run")
    assert (tmp_path / "starts").read_text().count("started") == starts


class Noting:
    """Notes that a worker has started."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self, worker: int) -> None:
        with self.file.open("a") as file:
            file.write("started\n")


# ---------------------------------------------------------------- what can't be sent


FULL = """
import sys, torch, hotloop
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
class Large(Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return torch.ones(100_000), torch.ones(1)
class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.ones(100_000), torch.ones(1))] * 32)
def own(samples):
    return torch.cat([x[None] for x, _ in samples]), torch.stack([y for _, y in samples])
if __name__ == "__main__":
    data = DataLoader(Stream() if sys.argv[1] == "stream" else Large(), batch_size=8, num_workers=1,
                      collate_fn=None if sys.argv[1] == "default" else own)
    task = hotloop.Task(model=lambda: nn.Linear(100_000, 1), loss=nn.MSELoss(), data=data,
                        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    try:
        hotloop.fit(task, run=sys.argv[2], plan="baseline", device="cpu", progress=False)
    except hotloop.HotloopError as error:
        print(error)
"""


def can_mount() -> bool:
    """Whether a small /dev/shm can be had in a namespace of its own."""
    mounts = ["unshare", "-m", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/dev/shm"]
    return (
        shutil.which("unshare") is not None and subprocess.run(mounts, capture_output=True, check=False).returncode == 0
    )


@pytest.mark.more
@pytest.mark.parametrize("form", ["own", *(pytest.param(one, marks=MORE) for one in ("default", "stream"))])
def test_a_full_shared_memory_ends_in_one_line_that_names_it(form: str, tmp_path: Path) -> None:
    """torch's own `collate` finds that while it makes a batch; others when the batch is sent, in a thread that drops it."""
    if not can_mount():
        pytest.skip("needs root, to mount a small /dev/shm")
    script = tmp_path / "full.py"
    script.write_text(FULL)
    command = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    found = subprocess.run(
        ["unshare", "-m", "sh", "-c", command, "sh", sys.executable, str(script), form, str(tmp_path / "run")],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    [line] = found.stdout.splitlines()
    assert "shared memory (/dev/shm)" in line and "workers=0" in line and "docker gives 64 MB" in line


@pytest.mark.parametrize(
    "text",
    [
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of"
        " shared memory. Please try to raise your shared memory limit.",
        "Caught RuntimeError in DataLoader worker process 0.\nRuntimeError: unable to open shared memory object </torch_1_2>",
        "unable to write to file </torch_12_34_0>: No space left on device (28)",
    ],
)
def test_each_word_for_it_is_known(text: str) -> None:
    found = dead_dataloader_worker(RuntimeError(text))
    assert found is not None and "shared memory (/dev/shm)" in str(found) and "--workers 0" in str(found)
    assert dead_dataloader_worker(RuntimeError("my own shared memory game")) is None


def unsendable(samples: list) -> Any:
    return lambda: samples


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter([(X[0], lambda: 0)])


class Raising(Rows):
    def __getitem__(self, index: int) -> Any:
        class Own(Exception):
            pass

        raise Own("no such row")


@pytest.mark.more
@pytest.mark.parametrize(
    ("data", "collate", "says"),
    [(Rows(), unsendable, "pickle"), (Stream(), list, "pickle"), (Raising(), None, "no such row")],
    ids=["a batch", "a batch of a stream", "an error"],
)
def test_what_a_worker_cannot_send_is_an_error_and_no_wait_without_end(
    data: Any, collate: Any, says: str, tmp_path: Path
) -> None:
    loader = DataLoader(data, batch_size=8, num_workers=1, collate_fn=collate)
    with pytest.raises(DataError, match=says) as caught:
        losses(a_task(loader, validation=(X, Y)), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert getattr(loader, "worker_init_fn", None) is None  # as the user has it


# ---------------------------------------------------------------- signals while no batch comes


class Stuck(Rows):
    """Hangs in a worker after some samples, once training has begun, and notes that it does."""

    def __init__(self, file: Path, after: int) -> None:
        self.file, self.after, self.given = file, after, 0

    def begins(self, view: Any) -> None:
        """A callback."""
        if view.event == "start":
            self.file.with_suffix(".begun").touch()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if torch.utils.data.get_worker_info() is not None and self.file.with_suffix(".begun").exists():
            self.given += 1
            if self.given > self.after:
                self.file.touch()
                time.sleep(600)
        return super().__getitem__(index)


class StuckStream(IterableDataset):
    def __init__(self, file: Path, after: int) -> None:
        self.stuck = Stuck(file, after)
        self.begins = self.stuck.begins

    def __iter__(self) -> Iterator[Any]:
        return (self.stuck[index] for index in range(40))


@pytest.fixture
def no_child_left() -> Iterator[None]:
    """Ends workers that hang: they ignore the first SIGTERM, which torch has sent."""
    yield
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


@pytest.mark.more
@pytest.mark.usefixtures("no_child_left")
@pytest.mark.parametrize(
    ("kind", "number"),
    [
        (Stuck, signal.SIGTERM),
        (StuckStream, signal.SIGINT),
        pytest.param(Stuck, signal.SIGINT, marks=MORE),
        pytest.param(StuckStream, signal.SIGTERM, marks=MORE),
    ],
)
def test_a_signal_ends_a_wait_for_a_batch_and_saves(kind: Any, number: signal.Signals, tmp_path: Path) -> None:
    file = tmp_path / "stuck"
    data = kind(file, after=16)
    task = a_task(DataLoader(data, batch_size=8, num_workers=1), callbacks=[data.begins])
    thread = signalling(file, number)
    run, ended = start_run(LoadedTask(task, None, {}), plan="baseline", run=tmp_path / "run")
    thread.join()
    assert ended.reason == number.name
    saved, _ = run.checkpoints.newest(print)
    assert run.journal()[-1]["step"] == saved.state.position.step <= 2


def signalling(file: Path, number: signal.Signals) -> threading.Thread:
    """Sends this process a signal once there is a file."""

    def send() -> None:
        while not file.exists():
            time.sleep(0.05)
        time.sleep(0.2)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


# ---------------------------------------------------------------- data sets that change


LEVEL = {"now": 0.0}


class ByGlobal(Rows):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index] + LEVEL["now"], Y[index]


class ByTransform(Rows):
    def __init__(self) -> None:
        self.transform = Rows()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.transform[index]


def raise_attribute(data: Any, level: float) -> None:
    data.level = level


def raise_of_class(data: Any, level: float) -> None:
    type(data).level = level


def raise_global(data: Any, level: float) -> None:
    LEVEL["now"] = level


def raise_of_transform(data: Any, level: float) -> None:
    data.transform.level = level


CHANGES: dict[str, tuple[type, Callable[[Any, float], None]]] = {
    "attribute": (Rows, raise_attribute),
    "class": (type("OfClass", (Rows,), {}), raise_of_class),
    "global": (ByGlobal, raise_global),
    "transform": (ByTransform, raise_of_transform),
}


@pytest.mark.more
@pytest.mark.few("transform-None")
@pytest.mark.parametrize("deterministic", [None, False])
@pytest.mark.parametrize("kind", CHANGES)
def test_workers_see_what_callbacks_change_between_epochs(
    kind: str, deterministic: bool | None, tmp_path: Path
) -> None:
    """As those of torch's loaders, which have a new copy of the data set in each epoch."""

    def found(workers: int) -> list[float]:
        made, change = CHANGES[kind]
        data = made()
        change(data, 0.0)

        def harder(view: Any) -> None:
            if view.event == "epoch":
                change(data, float(view.epoch))

        loader = DataLoader(data, batch_size=8, num_workers=workers)
        task = a_task(loader, callbacks=[harder], deterministic=deterministic)
        return losses(task, tmp_path / str(workers))

    assert found(1) == found(0)


class Deep(Rows):
    """Leads to all kinds of things that may change."""

    __slots__ = ("slot",)

    def __init__(self) -> None:
        self.number, self.name, self.nothing = 0.5, "a", None
        self.items, self.chosen = [[1, 2], {"key": [3]}], {1, 2}
        self.tensor, self.array, self.large = torch.zeros(3), np.zeros(3), np.zeros((200, 200))
        self.inner, self.many = Subset(Rows(), list(range(10))), list(range(100_000))
        self.slot = 1
        level = [0.0]
        self.close = lambda x: x + level[0]
        self.level_of = level
        self.itself = self


DEEP: dict[str, Callable[[Deep], Any]] = {
    "a number": lambda data: setattr(data, "number", 0.6),
    "a text": lambda data: setattr(data, "name", "b"),
    "nothing": lambda data: setattr(data, "nothing", 0),
    "a new attribute": lambda data: setattr(data, "new", 1),
    "a nested item": lambda data: data.items[1]["key"].append(4),
    "a set": lambda data: data.chosen.add(3),
    "a tensor in place": lambda data: data.tensor.add_(1),
    "another tensor": lambda data: setattr(data, "tensor", torch.zeros(3)),
    "an array in place": lambda data: data.array.__setitem__(1, 1.0),
    "a large array": lambda data: data.large.__setitem__(slice(None), 1.0),
    "within": lambda data: setattr(data.inner.dataset, "level", 1.0),
    "a closure": lambda data: data.level_of.__setitem__(0, 1.0),
    "a slot": lambda data: setattr(data, "slot", 2),
    "the length of a long list": lambda data: data.many.append(1),
}


@pytest.mark.parametrize("kind", DEEP)
def test_a_summary_differs_where_something_was_changed(kind: str) -> None:
    data = Deep()
    before = dataset_summary(data)
    assert dataset_summary(data) == before
    DEEP[kind](data)
    assert dataset_summary(data) != before


@pytest.mark.more
def test_data_read_into_memory_that_changes_later_is_said_once(tmp_path: Path) -> None:
    data, said = Rows(), list[str]()

    def harder(view: Any) -> None:
        if view.event == "epoch":
            data.level = float(view.epoch)

    task = a_task(DataLoader(data, batch_size=8), callbacks=[harder], epochs=4)
    start_run(LoadedTask(task, None, {}), plan=hotloop.Plan(residency="host"), run=tmp_path / "run", say=said.append)
    assert sum("has changed since it was read into memory" in line for line in said) == 1
    said.clear()
    steady = a_task(DataLoader(Rows(), batch_size=8), callbacks=[lambda view: None])
    start_run(
        LoadedTask(steady, None, {}), plan=hotloop.Plan(residency="host"), run=tmp_path / "steady", say=said.append
    )
    assert not any("has changed" in line for line in said)


class Curriculum(Rows):
    """Its level is a number that no walk through its attributes finds."""

    shared = ctypes.c_double(0.0)

    def __getitem__(self, index: int) -> Any:
        x, *rest = super().__getitem__(index)
        return (x + self.shared.value, *rest)


def test_a_loss_that_changes_the_data_set_in_memory_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_module, "_SHARE", 1e9)  # compare after each epoch, whatever that takes
    data, said = Curriculum(), list[str]()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        data.shared.value += 0.01
        return nn.functional.cross_entropy(output, target)

    program = hotloop.lower(a_task(data, loss=loss, batch_size=8), hotloop.Plan(residency="host"), said.append)
    for _ in range(3):
        program.advance(10_000)
        program.end_epoch()
    assert sum("has changed since it was read into memory" in line for line in said) == 1
