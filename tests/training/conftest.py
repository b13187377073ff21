"""Runs that several tests of training resume and read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.killed_training import KILLED_AT, train


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never interrupted."""
    path = tmp_path_factory.mktemp("whole") / "run"
    train(path)
    return path


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed in the second epoch, and awaits going on."""
    path = tmp_path_factory.mktemp("killed") / "run"
    train(path, until=KILLED_AT)
    return path


@pytest.fixture
def copy(killed: Path, tmp_path: Path) -> Path:
    """A copy of that run, to go on with."""
    return Path(shutil.copytree(killed, tmp_path / "run"))
