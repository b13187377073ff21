"""The gradient norm that a training of several ranks records."""

from __future__ import annotations

from pathlib import Path

import pytest

import hotloop
from hotloop.core.files.run_folder import StoredRun
from hotloop.plan import Plan
from tests.support.programs import a_task


def test_two_ranks_record_the_norm_of_one(tmp_path: Path) -> None:
    """After the last step, so that both trainings have the same row."""
    norms = []
    for name, plan in (("one", Plan(device="cpu")), ("two", Plan(device="cpu", parallel="data", ranks=2))):
        hotloop.fit(a_task(epochs=1), run=tmp_path / name, plan=plan, progress=False)
        norms.append(StoredRun.read(tmp_path / name).progress[-1]["gradient_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4) and norms[0] > 0
