"""Checkpoints: what goes in comes out bit by bit, and what is torn, changed or hostile is passed over, aloud."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

import hotloop
from hotloop.checkpoint import Best, Checkpoint, Checkpoints, decode, encode, load
from hotloop.errors import CheckpointError, DiskError
from hotloop.pacing import Pace
from hotloop.records import EpochRecord
from hotloop.run import Run
from hotloop.state import Position, State, differences, host_copy
from tests.everything import task
from tests.resuming import last_checkpoint

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
    assert differences(through_file(before).state, before.state) == []


def test_tensors_that_share_memory_are_kept_apart() -> None:
    shared = torch.arange(4.0)
    before = holding(host_copy({"whole": shared, "part": shared[1:], "again": shared}))
    assert differences(through_file(before).state, before.state) == []


def test_history_best_and_position_come_back() -> None:
    before = replace(holding(1), best=Best(3, float("-inf"), "a file"))
    after = through_file(before)
    assert repr(after) == repr(before)  # NaN is among the figures, and differs from itself


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with checkpoints at steps 25 and 26."""
    path = tmp_path_factory.mktemp("trained") / "run"
    hotloop.fit(task(2), run=path, device="cpu", progress=False, checkpoint_every="5")
    return path


def test_each_part_of_a_real_state_is_in_the_file(trained: Path) -> None:
    found = last_checkpoint(Run.open(trained))
    elsewhere = {"scaler", "outer"}  # those of fp16, and of ranks: tests/cpu/test_plans.py, tests/multi/test_local.py
    parts = vars(found.state).keys() - elsewhere
    assert all(vars(found.state)[part] for part in parts), "the Task should have something of each part"
    assert differences(through_file(found).state, found.state) == []


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
    Checkpoints(tmp_path).save(holding(1))
    tracemalloc.start()
    try:
        path = Checkpoints(tmp_path).save(large)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 4 << 20 < path.stat().st_size
    assert differences(load(path).state, large.state) == []


def test_a_file_that_the_system_refuses_is_one_line_and_gone(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(DiskError, match=r"step-000000000 can't be written: File too large \("):
            Checkpoints(tmp_path).save(holding(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- bad files


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained / "checkpoints", tmp_path / "checkpoints"))


def assert_passed_over(folder: Path, bad: Path, before: Path, why: str = "") -> None:
    """The bad file is named aloud, and the one before it is taken."""
    said: list[str] = []
    found = Checkpoints(folder).newest(said.append)
    assert found is not None
    assert found[1] == before
    assert [line.split(":")[0] for line in said] == [f"passing over the checkpoint of step {int(bad.name[5:14])}{why}"]


def two(folder: Path) -> tuple[Path, Path]:
    newest, before = Checkpoints(folder).files()
    return newest, before


@pytest.mark.parametrize("share", [0, 1, 7, 8, 9, 200, 0.5, 0.9, -1])
def test_a_torn_file_is_passed_over(folder: Path, share: float) -> None:
    newest, before = two(folder)
    content = newest.read_bytes()
    length = len(content) + share if share < 0 else share if isinstance(share, int) else int(share * len(content))
    newest.write_bytes(content[: int(length)])
    assert_passed_over(folder, newest, before)


def test_one_flipped_bit_anywhere_is_noticed(folder: Path) -> None:
    newest, before = two(folder)
    content = newest.read_bytes()
    draws = random.Random(0)
    for bit in [0, 63, 64, 8 * len(content) - 1, *(draws.randrange(8 * len(content)) for _ in range(60))]:
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        newest.write_bytes(changed)
        with pytest.raises(CheckpointError, match="checksum differs"):
            load(newest)
    assert_passed_over(folder, newest, before)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path, other: path.write_bytes(path.read_bytes() + b"\0"),
        lambda path, other: path.write_bytes(other.read_bytes()),
        lambda path, other: path.write_bytes(os.urandom(len(path.read_bytes()))),
        lambda path, other: path.rename(path.with_name(path.name.replace("step-000000026", "step-000000027"))),
        lambda path, other: path.rename(path.with_name(path.name[:15] + "0" * 64 + ".safetensors")),
        lambda path, other: (path.unlink(), path.mkdir()),
        lambda path, other: (path.unlink(), path.symlink_to("nowhere")),
    ],
    ids=["appended", "another's content", "noise", "another step", "another checksum", "a folder", "a dangling link"],
)
def test_a_changed_file_is_passed_over(folder: Path, spoil: Callable[[Path, Path], Any]) -> None:
    newest, before = two(folder)
    spoil(newest, before)
    now = [path for path in folder.iterdir() if path.name.startswith("step-") and path != before]
    renamed = now[0]
    if "000000027" in renamed.name:  # its content is good, and says itself which step it is of
        found = Checkpoints(folder).newest()
        assert found is not None
        assert found[0].state.position.step == 26
        return
    assert_passed_over(folder, renamed, before)


def test_files_of_other_names_are_not_looked_at(folder: Path) -> None:
    newest, _ = two(folder)
    for name in ("step-9.safetensors", f"step-{'9' * 9}-{'0' * 63}.safetensors", "notes.txt", f".{newest.name}.1.part"):
        (folder / name).write_bytes(b"?")
    said: list[str] = []
    found = Checkpoints(folder).newest(said.append)
    assert found is not None
    assert (found[1], said) == (newest, [])
    with pytest.raises(CheckpointError, match="not named like a checkpoint"):
        load(folder / "notes.txt")


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def placed(folder: Path, content: bytes, step: int = 99) -> Path:
    """A file under a checkpoint's name, with the checksum that belongs to it."""
    path = folder / f"step-{step:09d}-{hashlib.sha256(content).hexdigest()}.safetensors"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("kind", ["pickle", "torch"])
def test_no_code_in_a_file_runs(folder: Path, tmp_path: Path, kind: str) -> None:
    went_off, file = tmp_path / "went off", tmp_path / "bomb"
    if kind == "pickle":
        file.write_bytes(pickle.dumps({"state": Bomb(went_off)}))
    else:
        torch.save({"state": Bomb(went_off)}, file)
    newest, _ = two(folder)
    bomb = placed(folder, file.read_bytes())
    assert_passed_over(folder, bomb, newest)
    assert not went_off.exists()
    pickle.loads(pickle.dumps(Bomb(went_off)))
    assert went_off.exists(), "the bomb itself must work, or the test shows nothing"


def with_document(document: Any, **tensors: Tensor) -> bytes:
    text = document if isinstance(document, str) else json.dumps(document)
    return safetensors.torch.save(tensors, {"document": text})


DOCUMENT: dict[str, Any] = {
    "state": {"parameters": {"dict": []}, "buffers": {"dict": []}},
    "position": {"step": 1, "epoch": 0, "batch": 1},
    "history": [],
    "best": None,
}

HOSTILE: dict[str, bytes] = {
    "a huge header": (2**62).to_bytes(8, "little") + b"{}",
    "a header beyond the end": (10**6).to_bytes(8, "little") + b"{}",
    "no metadata": safetensors.torch.save({"x": torch.ones(1)}),
    "no JSON": with_document("{"),
    "too deep": with_document("[" * 100_000),
    "deep values": with_document(json.dumps(DOCUMENT).replace("[]", "[" * 600 + "]" * 600)),
    "a list": with_document([1, 2]),
    "a list as state": with_document(DOCUMENT | {"state": [1]}),
    "no position": with_document({key: value for key, value in DOCUMENT.items() if key != "position"}),
    "an unknown part": with_document(DOCUMENT | {"state": {**DOCUMENT["state"], "more": 1}}),
    "an unknown mark": with_document(DOCUMENT | {"state": {**DOCUMENT["state"], "sums": {"code": "1"}}}),
    "a mark too many": with_document(DOCUMENT | {"state": {**DOCUMENT["state"], "sums": {"dict": [], "list": []}}}),
    "a missing tensor": with_document(DOCUMENT | {"state": {**DOCUMENT["state"], "sums": {"tensor": "x"}}}),
    "a false kind": with_document(DOCUMENT | {"state": {**DOCUMENT["state"], "sums": {"numpy": ["object", 1]}}}),
    "a function for a kind": with_document(
        DOCUMENT | {"state": {**DOCUMENT["state"], "sums": {"bytes": ["x", "save", [1]]}}}, x=torch.ones(1)
    ),
    "a list as a key": with_document(DOCUMENT | {"state": {**DOCUMENT["state"], "sums": {"dict": [[[1], 2]]}}}),
    "a false history": with_document(DOCUMENT | {"history": [{"epoch": "x"}]}),
    "a false best": with_document(DOCUMENT | {"best": [1]}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_with_a_true_checksum_is_passed_over(folder: Path, name: str) -> None:
    newest, _ = two(folder)
    assert_passed_over(folder, placed(folder, HOSTILE[name]), newest)
    Checkpoints(folder).save(holding(1, step=100))  # pruning looks into its neighbours
    assert len(Checkpoints(folder).files()) == 2


def test_the_document_of_the_hostile_ones_is_good_in_itself(folder: Path) -> None:
    path = placed(folder, with_document(DOCUMENT))
    assert load(path).state.position.step == 1


def test_a_checkpoint_whose_best_epoch_is_bad_is_passed_over(folder: Path) -> None:
    """Its weights can't be made again from there, but training from an earlier one comes by them once more."""
    newest, before = two(folder)
    best, earlier = (load(path).best for path in (newest, before))
    assert best is not None
    assert earlier is not None
    assert best.file != earlier.file, "the test needs two that refer to epochs of their own"
    file = folder / "best" / best.file
    file.write_bytes(file.read_bytes()[:-1])
    assert_passed_over(folder, newest, before, ", whose best epoch is lost")
    file.unlink()
    assert_passed_over(folder, newest, before, ", whose best epoch is lost")


def test_a_lost_best_epoch_does_not_lose_the_training(folder: Path) -> None:
    newest, _ = two(folder)
    for file in (folder / "best").iterdir():
        file.unlink()
    said: list[str] = []
    assert Checkpoints(folder).newest(said.append) is None
    found = Checkpoints(folder).newest(said.append, best_needed=False)
    assert found is not None
    assert (found[1], found[0].best) == (newest, None)
    assert differences(found[0].state, load(newest).state) == []
    assert said[-1] == "taking the checkpoint of step 26 all the same, without its best epoch"


def test_with_no_good_checkpoint_nothing_is_trained_anew_unasked(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(trained, tmp_path / "run"))
    lines = [line for line in (path / "journal.jsonl").read_text().splitlines() if '"final"' not in line]
    (path / "journal.jsonl").write_text("\n".join(lines) + "\n")
    for file in Checkpoints(path / "checkpoints").files():
        file.write_bytes(b"")
    before = Checkpoints(path / "checkpoints").files()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*checkpoints is good"):
        hotloop.fit(task(2), run=path, device="cpu", resume=True)
    said = " ".join(capfd.readouterr().err.split())
    assert "passing over the checkpoint of step 26" in said
    assert "passing over the checkpoint of step 25" in said
    assert Checkpoints(path / "checkpoints").files() == before


# ---------------------------------------------------------------- how many are kept


def test_at_most_two_and_their_best_are_kept_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "steps", lambda self: 1)
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
            files = Checkpoints(folder).files()
            referred = {best.file for path in files if (best := load(path).best)}
            after.append((len(files), len(list(folder.glob("best/step-*"))), referred))

    hotloop.fit(task(4), run=tmp_path / "run", device="cpu", progress=False, checkpoint_every="2", callbacks=[look])
    assert max(files for files, _, _ in after) == 2
    assert all(best == len(referred) for _, best, referred in after)
    # While the next is written, before the oldest goes, there is one more of each.
    assert max(files for files, _ in seen) == 3
    assert max(best for _, best in seen) <= 3


@pytest.mark.parametrize("ahead", [-1, 0, 1, 5])
def test_a_bad_one_that_was_passed_over_does_not_take_the_place_of_a_good_one(folder: Path, ahead: int) -> None:
    newest, before = two(folder)
    bad = placed(folder, b"", step=26)
    newest.unlink()
    checkpoints = Checkpoints(folder)
    found = checkpoints.newest()
    assert found is not None
    assert found[1] == before
    saved = checkpoints.save(holding(1, step=26 + ahead))
    assert checkpoints.files() == [saved, before][: 1 if ahead == -1 else 2]
    assert not bad.exists()
