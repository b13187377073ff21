"""A run folder in which a file is damaged: training goes on and names the file, or one line says why it can't."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

import hotloop
from hotloop.core.files.run_folder import StoredRun
from hotloop.errors import HotloopError
from hotloop.training.checkpoint import CheckpointFolder
from hotloop.training.run import Run
from tests.support.killed_training import EPOCHS, train
from tests.support.processes.resumed_training import disagreements
from tests.support.tasks.full_state_task import task


def resumed(path: Path, capture: pytest.CaptureFixture[str]) -> str:
    """Goes on to the end; what was said on the way."""
    train(path, progress=True)
    return " ".join(capture.readouterr().err.split())


def refused(path: Path) -> str:
    """The one line with which going on is refused."""
    with pytest.raises(HotloopError) as caught:
        train(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- files of lines


JOURNALS = {
    "a byte above 0x7f": b'{"event": "checkpoint", "step": 5, "file": "\xff"}\n',
    "no event": b'{"time": 1.0, "step": 5}\n',
    "an event that is no text": b'{"event": 5, "step": 5}\n',
    "a final without a reason": b'{"event": "final", "weights": "last", "epoch": 3}\n',
    "a final without weights": b'{"event": "final", "reason": "finished", "epoch": 3}\n',
    "a checkpoint without a step": b'{"event": "checkpoint"}\n',
    "a step that is text": b'{"event": "checkpoint", "step": "x"}\n',
    "no JSON": b"\x00\x00\x00\x00}\n",
    "a list": b"[1]\n",
    "too deep": b"[" * 100_000 + b"]" * 100_000 + b"\n",
    "a number of 5,000 digits": b'{"event": "checkpoint", "step": ' + b"9" * 5_000 + b"}\n",
}


@pytest.mark.few("too deep", "no event")
@pytest.mark.parametrize("name", JOURNALS)
def test_a_damaged_line_of_the_journal_is_named_and_the_others_are_used(
    whole: Path, copy: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with (copy / "journal.jsonl").open("ab") as file:
        file.write(JOURNALS[name])
    said = resumed(copy, capsys)
    assert "journal.jsonl is damaged in line" in said
    assert "the other lines are used" in said
    assert disagreements(whole, copy) == []


METRICS = {
    "a byte above 0x7f": b'{"epoch": 2, "step": 26, "x\xff": 1.0}\n',
    "no step": b'{"epoch": 2}\n',
    "an epoch that is text": b'{"epoch": "two", "step": 26}\n',
    "a figure that is text": b'{"epoch": 2, "step": 26, "train_loss": "low"}\n',
}


@pytest.mark.few("no step", "a byte above 0x7f")
@pytest.mark.parametrize("name", METRICS)
def test_a_damaged_row_of_the_metrics_is_named_and_written_anew(
    whole: Path, copy: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with (copy / "metrics.jsonl").open("ab") as file:
        file.write(METRICS[name])
    assert [row["epoch"] for row in Run.open(copy).epochs] == [1]
    assert "metrics.jsonl is damaged in line" in resumed(copy, capsys)
    assert disagreements(whole, copy) == []


@pytest.mark.few("-5", "content2")
@pytest.mark.parametrize("content", [b"\xff\xfe", "²".encode(), b"9" * 5_000, b"9" * 20, b"-5", b"0x10", b"1.5"])
def test_a_damaged_note_of_the_step_is_named_and_the_journals_last_is_used(
    whole: Path, copy: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / "reached").write_bytes(content)
    assert Run.open(copy).reached() == 20  # of the last checkpoint
    said = resumed(copy, capsys)
    assert "reached is damaged: the last step in the journal is used" in said
    assert Run.open(copy).reached() == 39
    assert disagreements(whole, copy) == []


def test_what_a_kill_tears_is_no_damage(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (copy / "journal.jsonl").open("ab") as file:
        file.write(b'{"event": "checkpo')
    (copy / "reached").write_bytes(b"")
    assert "damaged" not in resumed(copy, capsys)


# ---------------------------------------------------------------- something else in a file's place


def a_folder(path: Path) -> None:
    path.mkdir()


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def a_loop(path: Path) -> None:
    path.symlink_to(path.name)


OTHERS = [a_folder, a_pipe, a_dangling_link, a_loop]
FILES = [
    "run.json",
    "plan.toml",
    "journal.jsonl",
    "metrics.jsonl",
    "metrics.csv",
    "reached",
    ".lock",
    "source",
    "checkpoints",
]


@pytest.mark.few("*-a_folder", "reached-*")
@pytest.mark.parametrize("put", OTHERS, ids=lambda put: put.__name__)
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_gives_one_line_and_never_blocks(copy: Path, name: str, put: Callable[[Path], None]) -> None:
    path = copy / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    put(path)
    try:
        train(copy)
    except HotloopError as error:
        assert "\n" not in str(error)
        assert str(copy) in str(error)
    else:
        assert name in ("metrics.csv", "metrics.jsonl", "source", ".lock"), "training went on without the file"


@pytest.mark.few("a_folder", "a_pipe")
@pytest.mark.parametrize("put", OTHERS, ids=lambda put: put.__name__)
def test_what_is_no_checkpoint_is_passed_over(
    whole: Path, copy: Path, put: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    newest = CheckpointFolder(copy / "checkpoints").files()[0]
    newest.unlink()
    put(newest)
    try:
        assert "skipping the checkpoint of step 20" in resumed(copy, capsys)
    except HotloopError as error:  # the same checkpoint, written anew, has the folder's name
        assert put is a_folder
        assert "Is a directory" in str(error)
        newest.rmdir()
        train(copy)
    assert disagreements(whole, copy) == []


# ---------------------------------------------------------------- a checkpoint whose checksum is right


def rewritten(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A checkpoint with a changed document, under the checksum that belongs to it."""
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    document = json.loads(header["__metadata__"]["document"])
    change(document)
    metadata = header["__metadata__"] | {"document": json.dumps(document)}
    content = safetensors.torch.save(safetensors.torch.load(content), metadata)
    path.unlink()
    path = path.with_name(f"{path.name[:15]}{hashlib.sha256(content).hexdigest()}.safetensors")
    path.write_bytes(content)
    return path


DOCUMENTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "best.file is a number": lambda d: d["best"].update(file=5),
    "best.figure is a text": lambda d: d["best"].update(figure="low"),
    "best lacks its epoch": lambda d: d["best"].pop("epoch"),
    "step is a text": lambda d: d["position"].update(step="x"),
    "step is a fraction": lambda d: d["position"].update(step=20.5),
    "step is below zero": lambda d: d["position"].update(step=-1),
    "the epoch is far away": lambda d: d["position"].update(epoch=10**9),
    "the step is far away": lambda d: d["position"].update(step=10**9),
    "the batch is far away": lambda d: d["position"].update(batch=10**9, step=10**9 + 13),
    "no parameters": lambda d: d["state"].update(parameters=None),
    "parameters that are numbers": lambda d: d["state"].update(parameters={"dict": [["x", 1]]}),
    "no buffers": lambda d: d["state"].pop("buffers"),
    "sums that are a list": lambda d: d["state"].update(sums={"list": []}),
    "an optimizer without groups": lambda d: d["state"].update(optimizer={"dict": [["name", "AdamW"]]}),
    "a history that has lost an epoch": lambda d: d["history"].clear(),
}
NOT_BY_ITSELF = ("an optimizer without groups", "the batch is far away")
"""What shows only beside the Task: one line says to remove it."""


@pytest.mark.few("no parameters")
@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_checkpoint_that_says_what_can_not_be_is_passed_over(
    whole: Path, copy: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rewritten(CheckpointFolder(copy / "checkpoints").files()[0], DOCUMENTS[name])
    if name in NOT_BY_ITSELF:
        said = refused(copy)
        assert f"{path.name} can't be restored" in said
        assert "remove this checkpoint to go on from the one before it" in said
        path.unlink()
        train(copy)
    else:
        assert "skipping the checkpoint of step 20" in resumed(copy, capsys)
    assert disagreements(whole, copy) == []


# ---------------------------------------------------------------- checkpoints that are gone


def test_a_run_whose_checkpoints_are_all_gone_is_not_started_over(copy: Path) -> None:
    for path in CheckpointFolder(copy / "checkpoints").files():
        path.unlink()
    said = refused(copy)
    assert "has no checkpoint, and the journal says that one of step 20 was written" in said
    assert "start a new run" in said


@pytest.mark.more
def test_a_run_that_had_come_to_none_is_started_from_the_beginning(
    tmp_path: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run", until=3)
    assert "no checkpoint yet: starting from the beginning" in resumed(tmp_path / "run", capsys)
    assert disagreements(whole, tmp_path / "run") == []


# ---------------------------------------------------------------- plan and record


@pytest.mark.parametrize("kept", [0, 1, 5])
def test_a_plan_that_was_cut_off_is_an_error(copy: Path, kept: int) -> None:
    path = copy / "plan.toml"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:kept]))
    said = refused(copy)
    assert "plan.toml is damaged" in said and "it doesn't say" in said


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b"null", b'{"name": 5}', b"{" * 100_000])
def test_a_damaged_record_is_an_error(copy: Path, content: bytes) -> None:
    (copy / "run.json").write_bytes(content)
    assert "run.json is damaged" in refused(copy)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        (
            "run.json",
            lambda text: text.replace('"id":', '"identity":'),
            "run.json is damaged, or another version of hotloop wrote it: 'id'",
        ),
        (
            "run.json",
            lambda text: text.replace('"version": 1,', '"version": 1, "room": 3,'),
            "room': Extra inputs are not permitted",
        ),
        (
            "plan.toml",
            lambda text: text + 'outer = "none"\n',
            "plan.toml: outer='none' was removed from plans. Leave it out",
        ),
    ],
)
def test_a_file_of_another_version_is_one_line_with_what_to_do(
    copy: Path, name: str, change: Callable[[str], str], says: str
) -> None:
    text = (copy / name).read_text()
    (copy / name).write_text(change(text))
    assert (copy / name).read_text() != text and says in refused(copy)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("plan.toml", 'precision = "default"', 'precision = "fp32"'),
        ("run.json", '"checkpoint_every": "5"', '"checkpoint_every": "6"'),
    ],
)
def test_a_plan_or_record_that_was_changed_is_named(
    copy: Path, name: str, old: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = copy / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert "was changed since hotloop wrote it, and is used as it is now" in resumed(copy, capsys)


def test_an_untouched_folder_has_no_damage(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Run.open(copy).damages() == []
    said = resumed(copy, capsys)
    assert "damaged" not in said
    assert "changed" not in said
    assert Run.open(copy).damages() == []


def test_a_run_opens_by_a_text(copy: Path) -> None:
    assert Run.open(str(copy)).path == copy
    assert hotloop.fit(task(EPOCHS), run=str(copy), resume=True, device="cpu", progress=False).path == copy


@pytest.mark.parametrize("content", ["[]", "null", "3", '"text"', '{"version":'])
@pytest.mark.parametrize("name", ["run.json", "layers.json", "status.json"])
def test_a_damaged_document_hides_no_other_run(tmp_path: Path, name: str, content: str) -> None:
    hotloop.fit(task(), run=tmp_path / "good", plan="baseline", progress=False)
    shutil.copytree(tmp_path / "good", tmp_path / "damaged")
    (tmp_path / "damaged" / name).write_text(content)
    whole, damaged = (StoredRun.read(tmp_path / one) for one in ("good", "damaged"))
    assert whole.record is not None and not whole.damages
    assert damaged.epochs == whole.epochs
    assert len(damaged.damages) == (name != "status.json"), "the status of a process is no part of the result"
