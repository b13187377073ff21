"""Advice that works: what an error says to do is done here, and gets the user further."""

from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import hotloop
from hotloop.core.files.atomic_files import write_atomic
from hotloop.errors import DiskError, RunError, describe_error, error_summary
from hotloop.inference.predict import WeightsChoice
from hotloop.training.checkpoint import CheckpointFolder
from hotloop.training.run import Run
from tests.support.killed_training import EPOCHS, train
from tests.support.tasks.full_state_task import task


@pytest.fixture
def finished(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "finished"))


def no_weights(path: Path, weights: WeightsChoice) -> str:
    with pytest.raises(RunError) as caught:
        hotloop.load_model(path, task=task(EPOCHS), weights=weights, say=lambda line: None)
    return str(caught.value)


# ---------------------------------------------------------------- weights


@pytest.mark.more
def test_damaged_best_weights_name_the_last_which_work(finished: Path) -> None:
    for file in CheckpointFolder(finished / "checkpoints").best_folder.iterdir():
        file.write_bytes(b"")
    said = no_weights(finished, "best")
    assert "last" in said
    assert "resume" not in said
    hotloop.load_model(finished, task=task(EPOCHS), weights="last", say=lambda line: None)


@pytest.mark.parametrize("weights", ["best", "last"])
@pytest.mark.parametrize("gone", [False, True])
def test_where_nothing_works_the_error_says_so(finished: Path, weights: WeightsChoice, gone: bool) -> None:
    for file in CheckpointFolder(finished / "checkpoints").files():
        file.unlink() if gone else file.write_bytes(b"")
    said = no_weights(finished, weights)
    assert "nothing in this folder gives its weights back" in said
    assert "resume" not in said


@pytest.mark.more
def test_a_run_that_had_come_to_no_checkpoint_is_gone_on_with(tmp_path: Path) -> None:
    train(tmp_path / "run", until=3)
    assert "resume" in no_weights(tmp_path / "run", "best")
    train(tmp_path / "run")
    hotloop.load_model(tmp_path / "run", task=task(EPOCHS))


# ---------------------------------------------------------------- full disks


def full(path: Path | None = None) -> OSError:
    return OSError(errno.ENOSPC, "No space left on device", *([str(path)] if path else []))


def refusing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Files of this name can't be moved to their place."""
    real = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if name in Path(target).name:
            raise full()
        return real(self, target)

    monkeypatch.setattr(Path, "replace", replace)


@pytest.mark.more
def test_a_full_disk_in_training_says_to_go_on_once_there_is_a_checkpoint(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing(monkeypatch, "step-000000025")
    with pytest.raises(DiskError, match="resume"):
        train(copy)
    refusing(monkeypatch, "step-")
    with pytest.raises(DiskError) as caught:
        train(tmp_path / "new")
    assert "resume" not in str(caught.value)
    refusing(monkeypatch, "run.json")
    with pytest.raises(DiskError) as caught:
        train(tmp_path / "other")
    assert "resume" not in str(caught.value)


def test_a_full_disk_elsewhere_says_nothing_of_going_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, "scores")
    with pytest.raises(DiskError) as caught:
        write_atomic(tmp_path / "scores.npy", b"1")
    assert "resume" not in str(caught.value)
    assert "free some space" in str(caught.value).lower()


def wrapped(cause: Exception) -> RuntimeError:
    error = RuntimeError("backend='inductor' raised")
    error.__cause__ = cause
    return error


def test_the_disk_that_a_compiler_fills_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0))  # type: ignore[attr-defined]
    for error in (wrapped(full()), RuntimeError("g++: fatal error: error writing to x.o: No space left on device")):
        text, passing = error_summary(error)
        assert f"the disk of {tmp_path} is full" in text
        assert passing
    assert "the disk of /cache/a.so is full" in describe_error(wrapped(full(Path("/cache/a.so"))))
    assert "disk" not in describe_error(RuntimeError("other"))


def test_a_disk_that_a_step_fills_is_named(tmp_path: Path) -> None:
    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise full(Path("/cache/graph.py"))

    given = task(EPOCHS)
    with pytest.raises(DiskError, match=r"the disk of /cache/graph[.]py is full"):
        hotloop.fit(replace(given, loss=loss), run=tmp_path / "run", device="cpu", progress=False)


# ---------------------------------------------------------------- the figures of an epoch that was gone on with


def test_seconds_and_samples_of_an_epoch_are_of_the_same_part(copy: Path) -> None:
    """Of the second epoch, 7 of 13 steps were done before the last checkpoint."""
    newest = Run.open(copy).checkpoints.newest()
    assert newest is not None
    checkpoint = replace(newest[0], epoch_s=1000.0)
    assert checkpoint.state.sums["samples"] == 7 * 16
    Run.open(copy).checkpoints.save(checkpoint)
    newest[1].unlink(missing_ok=True)
    train(copy)
    row = Run.open(copy).epochs[1]
    assert 1000 < row["seconds"] < 2000
    assert row["samples_per_s"] == pytest.approx(row["samples"] / row["seconds"], rel=0.1)


def test_a_checkpoint_in_an_epoch_has_its_seconds(copy: Path) -> None:
    newest = Run.open(copy).checkpoints.newest()
    assert newest is not None
    assert newest[0].epoch_s > 0
