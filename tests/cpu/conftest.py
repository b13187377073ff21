"""What all tests of this folder have in common."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

import pytest
from torch.optim import Optimizer

from hotloop.core.hardware import machine
from hotloop.lowering.compile import inductor_patches, package_cache
from hotloop.lowering.rewrites import mm_by_onednn
from hotloop.profiler.hooks import optimizer_hooks
from hotloop.tuning.search import candidates
from tests.cpu.killing import KILLED_AT, train


@pytest.fixture(autouse=True)
def any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a search tries and what it finds to rewrite is the same here, whoever has made processor and C library."""
    monkeypatch.setattr(mm_by_onednn, "slow_here", lambda: False)
    monkeypatch.setattr(candidates, "mkl_is_slow", lambda processor: False)
    monkeypatch.setattr(machine, "_is_glibcs", lambda: False)


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What this test compiles, some of it wrongly and on purpose, no cache has before, and none has later."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for module in (inductor_patches, package_cache):
        monkeypatch.setattr(module, "MENDED", 0)


@pytest.fixture
def own_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks for optimizers finds those of this test, and none that others have left in the process."""
    real = gc.get_objects
    others = [one for one in real() if issubclass(type(one), Optimizer)]
    known = set(map(id, others))
    monkeypatch.setattr(optimizer_hooks.gc, "get_objects", lambda: [one for one in real() if id(one) not in known])


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
