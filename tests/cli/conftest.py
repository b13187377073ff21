"""The command line in this process, for tests of its commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.in_process_command import Hotloop, commands


@pytest.fixture
def hotloop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Hotloop]:
    """Runs `hotloop ARGS` in this process, in a folder of its own."""
    with commands(tmp_path, monkeypatch, capfd) as run:
        yield run
