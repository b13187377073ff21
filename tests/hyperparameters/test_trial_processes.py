"""A trial starts in the same state whatever ran before, although all trials share what their server has loaded."""

from __future__ import annotations

import gzip
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import hotloop
from hotloop.data import builtin
from hotloop.errors import StudyError
from hotloop.hyperparameters.trial_processes import TrialProcesses

LEAKING = """
import random
import numpy as np
import torch
from torch import nn
import hotloop

CALLS = []


def state():
    drawn = random.random() + np.random.rand() + torch.rand(()).item()
    is_high = torch.get_float32_matmul_precision() == "high"
    return [len(CALLS), drawn, torch.get_num_threads(), nn.functional.seen, is_high]


def task(tag: int = 0, folder: str = "") -> hotloop.Task:
    nn.functional.seen = getattr(nn.functional, "seen", 0)
    images, labels = hotloop.data.fashion_mnist(folder, validation=20).train
    x = images.flatten(1).double() / 255 + torch.tensor(state(), dtype=torch.double).sum()
    images.fill_(0)
    CALLS.append(tag)
    nn.functional.seen += 1
    torch.set_num_threads(2)
    torch.set_float32_matmul_precision("high")
    return hotloop.Task(
        model=lambda: nn.Linear(784, 10, dtype=torch.double),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
        data=(x, labels),
        validation=0.25,
        batch_size=20,
        epochs=1,
    )
"""
"""A Task whose data depends on state of the process, and that changes this state at each call."""


def write_images(folder: Path) -> None:
    """Writes 100 random images and labels as the four IDX files of Fashion-MNIST."""
    draws = np.random.RandomState(0)
    for name in builtin.FASHION_MNIST.sha256:
        shape = (100, 28, 28) if "images" in name else (100,)
        values = draws.randint(0, 255 if "images" in name else 10, shape).astype(np.uint8)
        header = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
        (folder / name).write_bytes(gzip.compress(header + values.tobytes()))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    write_images(folder)
    return folder


def test_state_of_a_trial_reaches_no_other_trial(tmp_path: Path, images: Path) -> None:
    (tmp_path / "task.py").write_text(LEAKING)
    space = {"tag": [0, 1, 2, 3], "folder": str(images)}
    study = hotloop.study(
        tmp_path / "task.py", space, folder=tmp_path / "s", sampler="grid", jobs=2, progress=False
    )  # the parameter changes nothing
    assert [one.error for one in study.trials] == [""] * 4
    assert len({one.value for one in study.trials}) == 1


CALLED_TWICE = """
import sys
import torch
from task import task
torch.set_num_threads(1)
first, second = (task(0, sys.argv[1]).data[0] for _ in range(2))
sys.exit(torch.equal(first, second))
"""


def test_the_leaking_task_shows_its_leak_in_one_process(tmp_path: Path, images: Path) -> None:
    (tmp_path / "task.py").write_text(LEAKING)
    (tmp_path / "twice.py").write_text(CALLED_TWICE)
    assert subprocess.run([sys.executable, "twice.py", str(images)], cwd=tmp_path).returncode == 0


def test_the_first_reader_of_preloaded_data_has_the_arrays_alone(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = builtin.fashion_mnist(images, validation=20).train[0]
    read = builtin.reads[-1]
    builtin.preload([read])
    with monkeypatch.context() as patch:
        patch.setattr(builtin, "read_idx", lambda path: pytest.fail(f"{path} is read again"))
        first = builtin.fashion_mnist(images, validation=20).train[0]
    assert first.equal(expected)
    first.fill_(0)
    assert builtin.fashion_mnist(images, validation=20).train[0].equal(expected)


def test_changed_files_are_read_again(images: Path) -> None:
    before = builtin.fashion_mnist(images, validation=20).train[1]
    builtin.preload([builtin.reads[-1]])
    name = "train-labels-idx1-ubyte.gz"
    (images / name).write_bytes((images / "t10k-labels-idx1-ubyte.gz").read_bytes())
    assert not builtin.fashion_mnist(images, validation=20).train[1].equal(before)


@pytest.mark.slow
def test_a_server_reads_built_in_data_once_for_all_jobs(tmp_path: Path, images: Path) -> None:
    expected = builtin.fashion_mnist(images, validation=20)
    path = images / "train-images-idx3-ubyte.gz"
    state = path.stat()
    with TrialProcesses(tmp_path / "logs") as processes:
        processes.prepare([], [builtin.reads[-1]])
        processes.run(THREADS, "0.txt")  # afterwards the data has been read
        path.write_bytes(bytes(state.st_size))
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
        for number in range(2):
            found = processes.run(
                "hotloop.data.builtin:fashion_mnist", f"{number}.txt", folder=str(images), validation=20
            )
            assert found.train[0].equal(expected.train[0])


THREADED = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""

THREADS = "hotloop.hyperparameters.trial_processes:thread_count"


@pytest.mark.slow
def test_a_package_that_starts_threads_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "threaded.py").write_text(THREADED)
    monkeypatch.syspath_prepend(tmp_path)
    with TrialProcesses(tmp_path / "logs") as processes:
        assert processes.run(THREADS, "0.txt") == 1
        first = processes._server
        processes.prepare(["json.tool"], [])
        assert processes.run(THREADS, "1.txt") == 1
        assert processes._server is first
        processes.prepare(["threaded"], [])
        assert processes.run(THREADS, "2.txt") == 1
        assert processes._server is not first


def test_a_server_that_ends_at_its_start_names_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no module named torch'\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with (
        TrialProcesses(tmp_path / "logs") as processes,
        pytest.raises(StudyError, match="ended at its start: no module named torch"),
    ):
        processes.run(THREADS, "0.txt")
