"""Checkpoints: what goes in comes out bit by bit, and no more of them are kept than are of use."""

from __future__ import annotations

import resource
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hotloop
from hotloop.core.records.training import EpochRecord
from hotloop.core.state import Position, State, differing_paths, host_copy
from hotloop.errors import CheckpointError, DiskError
from hotloop.training.cadence import SpanPacer
from hotloop.training.checkpoint import BestEpoch, Checkpoint, CheckpointFolder, decode, encode, load
from hotloop.training.run import Run
from tests.support.processes.resumed_training import last_checkpoint
from tests.support.tasks.full_state_task import task

RECORD = EpochRecord(
    epoch=1,
    step=7,
    train={"loss": 0.1 + 0.2},
    validation={"loss": float("nan"), "accuracy": float("inf")},
    learning_rate=1e-300,
    samples=5,
    seconds=0.25,
    samples_per_s=20.0,
)


def holding(value: Any, step: int = 0) -> Checkpoint:
    state = State(
        parameters={"weight": torch.ones(3)}, buffers={}, optimizer={"kept": value}, position=Position(step, 1, 2)
    )
    return Checkpoint(state, [RECORD])


def through_file(checkpoint: Checkpoint) -> Checkpoint:
    return decode(b"".join(encode(checkpoint)), Path("memory"))


# ---------------------------------------------------------------- what goes in comes out


def bits(*words: int, dtype: torch.dtype, of: torch.dtype) -> Tensor:
    return torch.tensor(words, dtype=of).view(dtype)


TENSORS = {
    "NaN payloads": bits(0x7FC00001, -0x3FFFFE, 0x7F800001, dtype=torch.float32, of=torch.int32),
    "NaN payloads, float64": bits(0x7FF8000000000123, 0x7FF0000000000001, dtype=torch.float64, of=torch.int64),
    "NaN payloads, bfloat16": bits(0x7FC1, 0x7F81, dtype=torch.bfloat16, of=torch.int16),
    "NaN payloads, float16": bits(0x7E01, 0x7C01, dtype=torch.float16, of=torch.int16),
    "zeros of both signs": torch.tensor([0.0, -0.0]),
    "subnormal": bits(1, dtype=torch.float32, of=torch.int32),
    "0-dim": torch.tensor(3.5),
    "empty": torch.zeros(0),
    "empty in one dimension": torch.zeros(0, 3, dtype=torch.int64),
    "bool": torch.tensor([True, False]),
    "int64": torch.tensor([-(2**63), 2**63 - 1]),
    "uint8": torch.tensor([0, 255], dtype=torch.uint8),
    "uint64": torch.tensor([2**64 - 1], dtype=torch.uint64),
    "complex64": torch.tensor([[1 + 2j, complex("nan")]]),
    "complex128": torch.tensor(1e-300 - 0j, dtype=torch.complex128),
    "float8": torch.tensor([1.5, -0.0]).to(torch.float8_e4m3fn),
    "float8 of powers": torch.tensor([2.0, 4.0]).to(torch.float8_e8m0fnu),
    "strided": torch.arange(12.0).reshape(3, 4).t()[::2],
    "expanded": torch.ones(1).expand(4),
}

VALUES = {
    "None": None,
    "text": "a/b\n\x00é😀",
    "empty text": "",
    "bool": True,
    "large int": 10**30,
    "float": 0.1 + 0.2,
    "negative zero": -0.0,
    "infinities": [float("inf"), -float("inf")],
    "nan": float("nan"),
    "tuple": (0.9, (0.999, None), []),
    "list": [1, [2, (3,)]],
    "empty containers": [{}, [], ()],
    "keys of several kinds": {1: "a", "1": "b", None: "c", 2.5: "d", False: "e"},
    "a key like a mark": {"tensor": "weight"},
    "counter": Counter({3: 2, 5: 1}),
    "NumPy float32": np.float32(0.1),
    "NumPy float64": np.float64(0.1),
    "NumPy int64": np.int64(-(2**63)),
    "NumPy bool": np.bool_(True),
    "tensors in tuples": (torch.ones(2), [None, {"x": torch.zeros(())}]),
    "tensors of one name": {"a/b": {"c": torch.ones(1)}, "a": {"b/c": torch.zeros(1)}},
}


@pytest.mark.parametrize("value", [*TENSORS.values(), *VALUES.values()], ids=[*TENSORS, *VALUES])
def test_every_value_comes_back_bit_by_bit_and_as_what_it_was(value: Any) -> None:
    before = holding(value)
    assert differing_paths(through_file(before).state, before.state) == []


def test_tensors_that_share_memory_are_kept_apart() -> None:
    shared = torch.arange(4.0)
    before = holding(host_copy({"whole": shared, "part": shared[1:], "again": shared}))
    assert differing_paths(through_file(before).state, before.state) == []


def test_history_best_and_position_come_back() -> None:
    before = replace(holding(1), best=BestEpoch(3, float("-inf"), "a file"))
    after = through_file(before)
    assert repr(after) == repr(before)  # NaN is among the figures, and differs from itself


def trained_in(folder: Path) -> Path:
    """A finished run with checkpoints at steps 25 and 26."""
    hotloop.fit(task(2), run=folder / "run", device="cpu", progress=False, checkpoint_every="5")
    return folder / "run"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_in(tmp_path_factory.mktemp("trained"))


def test_each_part_of_a_real_state_is_in_the_file(trained: Path) -> None:
    found = last_checkpoint(Run.open(trained))
    elsewhere = {"scaler"}  # of fp16: tests/lowering/test_cpu_plans.py
    elsewhere |= {"named"}  # test_rehearsal.py
    elsewhere |= {"in_eval", "drawn", "attributes"}  # test_module_modes.py, test_python_rng.py, test_attributes.py
    parts = vars(found.state).keys() - elsewhere
    assert all(vars(found.state)[part] for part in parts), "the Task should have something of each part"
    assert differing_paths(through_file(found).state, found.state) == []


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"deep": [1, {2, 3}]}, "optimizer/kept/deep/1 is a set"),
        (b"bytes", "optimizer/kept is a bytes"),
        (lambda: None, "optimizer/kept is a function"),
        (1j, "optimizer/kept is a complex"),
        (np.zeros(3), "optimizer/kept is a ndarray"),
        (np.longdouble(1), "optimizer/kept is a longdouble"),
        (torch.eye(3).to_sparse(), "optimizer/kept is a sparse"),
        ({(1, 2): 3}, "optimizer/kept is a dict with a tuple as a key"),
        (Path("x"), "optimizer/kept is a P"),
    ],
)
def test_what_no_checkpoint_can_hold_is_named_by_its_path(value: Any, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        encode(holding(value))


def test_a_state_is_written_without_a_second_copy_of_it_in_memory(tmp_path: Path) -> None:
    large = holding(torch.zeros(16 << 20, dtype=torch.uint8), step=3)
    CheckpointFolder(tmp_path).save(holding(1))
    tracemalloc.start()
    try:
        path = CheckpointFolder(tmp_path).save(large)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 4 << 20 < path.stat().st_size
    assert differing_paths(load(path).state, large.state) == []


def test_a_file_that_the_system_refuses_is_one_line_and_gone(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(DiskError, match=r"step-000000000 can't be written: File too large \("):
            CheckpointFolder(tmp_path).save(holding(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- how many are kept


@pytest.mark.more
def test_at_most_two_and_their_best_are_kept_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpanPacer, "steps", lambda self: 1)
    folder = tmp_path / "run" / "checkpoints"
    seen: set[tuple[int, int]] = set()
    act = {name: getattr(Path, name) for name in ("replace", "unlink")}

    def counted(name: str) -> Callable[..., Any]:
        def run(self: Path, *args: Any, **options: Any) -> Any:
            result = act[name](self, *args, **options)
            seen.add((len(list(folder.glob("step-*"))), len(list(folder.glob("best/step-*")))))
            return result

        return run

    for name in act:
        monkeypatch.setattr(Path, name, counted(name))
    after: list[tuple[int, int, set[str]]] = []

    def look(view: hotloop.View) -> None:
        if view.event == "checkpoint":
            files = CheckpointFolder(folder).files()
            referred = {best.file for path in files if (best := load(path).best)}
            after.append((len(files), len(list(folder.glob("best/step-*"))), referred))

    hotloop.fit(task(4), run=tmp_path / "run", device="cpu", progress=False, checkpoint_every="2", callbacks=[look])
    assert max(files for files, _, _ in after) == 2
    assert all(best == len(referred) for _, best, referred in after)
    # While the next is written, before the oldest goes, there is one more of each.
    assert max(files for files, _ in seen) == 3
    assert max(best for _, best in seen) <= 3
