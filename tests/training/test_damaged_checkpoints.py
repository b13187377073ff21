"""Checkpoints that are torn, changed or hostile are passed over, aloud, and no code in them runs."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import hotloop
from hotloop.core.state import differing_paths
from hotloop.errors import CheckpointError
from hotloop.training.checkpoint import CheckpointFolder, load
from tests.support.tasks.full_state_task import task
from tests.training.test_checkpoint import holding, trained_in


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_in(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained / "checkpoints", tmp_path / "checkpoints"))


def assert_passed_over(folder: Path, bad: Path, before: Path, why: str = "") -> None:
    """The bad file is named aloud, and the one before it is taken."""
    said: list[str] = []
    found = CheckpointFolder(folder).newest(said.append)
    assert found is not None
    assert found[1] == before
    assert [line.split(":")[0] for line in said] == [f"skipping the checkpoint of step {int(bad.name[5:14])}{why}"]


def two(folder: Path) -> tuple[Path, Path]:
    newest, before = CheckpointFolder(folder).files()
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
        found = CheckpointFolder(folder).newest()
        assert found is not None
        assert found[0].state.position.step == 26
        return
    assert_passed_over(folder, renamed, before)


def test_files_of_other_names_are_not_looked_at(folder: Path) -> None:
    newest, _ = two(folder)
    for name in ("step-9.safetensors", f"step-{'9' * 9}-{'0' * 63}.safetensors", "notes.txt", f".{newest.name}.1.part"):
        (folder / name).write_bytes(b"?")
    said: list[str] = []
    found = CheckpointFolder(folder).newest(said.append)
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


def with_document(document: Any, form: str = "2", **tensors: Tensor) -> bytes:
    text = document if isinstance(document, str) else json.dumps(document)
    return safetensors.torch.save(tensors, {"version": form, "document": text})


DOCUMENT: dict[str, Any] = {
    "state": {"parameters": {"dict": []}, "buffers": {"dict": []}},
    "position": {"step": 1, "epoch": 0, "batch": 1},
    "history": [],
    "best": None,
    "epoch_s": 0.0,
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
    CheckpointFolder(folder).save(holding(1, step=100))  # pruning looks into its neighbours
    assert len(CheckpointFolder(folder).files()) == 2


def test_the_document_of_the_hostile_ones_is_good_in_itself(folder: Path) -> None:
    path = placed(folder, with_document(DOCUMENT))
    assert load(path).state.position.step == 1


def test_a_checkpoint_of_another_form_is_passed_over_and_says_its_form(folder: Path) -> None:
    newest, _ = two(folder)
    path = placed(folder, with_document(DOCUMENT, form="1"))
    with pytest.raises(CheckpointError, match=r"checkpoint of form '1'; expected form '2'.*Start a new run$"):
        load(path)
    assert_passed_over(folder, path, newest)


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
    assert CheckpointFolder(folder).newest(said.append) is None
    found = CheckpointFolder(folder).newest(said.append, best_needed=False)
    assert found is not None
    assert (found[1], found[0].best) == (newest, None)
    assert differing_paths(found[0].state, load(newest).state) == []
    assert said[-1] == "using the checkpoint of step 26 without its best epoch"


def test_with_no_good_checkpoint_nothing_is_trained_anew_unasked(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(trained, tmp_path / "run"))
    lines = [line for line in (path / "journal.jsonl").read_text().splitlines() if '"final"' not in line]
    (path / "journal.jsonl").write_text("\n".join(lines) + "\n")
    for file in CheckpointFolder(path / "checkpoints").files():
        file.write_bytes(b"")
    before = CheckpointFolder(path / "checkpoints").files()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*checkpoints is good"):
        hotloop.fit(task(2), run=path, device="cpu", resume=True)
    said = " ".join(capfd.readouterr().err.split())
    assert "skipping the checkpoint of step 26" in said
    assert "skipping the checkpoint of step 25" in said
    assert CheckpointFolder(path / "checkpoints").files() == before


@pytest.mark.parametrize("ahead", [-1, 0, 1, 5])
def test_a_bad_one_that_was_passed_over_does_not_take_the_place_of_a_good_one(folder: Path, ahead: int) -> None:
    newest, before = two(folder)
    bad = placed(folder, b"", step=26)
    newest.unlink()
    checkpoints = CheckpointFolder(folder)
    found = checkpoints.newest()
    assert found is not None
    assert found[1] == before
    saved = checkpoints.save(holding(1, step=26 + ahead))
    assert checkpoints.files() == [saved, before][: 1 if ahead == -1 else 2]
    assert not bad.exists()
