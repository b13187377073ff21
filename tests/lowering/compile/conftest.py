"""Compilation that uses no cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotloop.lowering.compile import inductor_patches, package_cache


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What this test compiles, some of it wrongly and on purpose, no cache has before, and none has later."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for module in (inductor_patches, package_cache):
        monkeypatch.setattr(module, "INDUCTOR_PATCH_VERSION", 0)
