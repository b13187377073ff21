"""What all tests of this folder have in common."""

from __future__ import annotations

import pytest

from hotloop.lowering.rewrites import mm_by_onednn
from hotloop.tuning import candidates


@pytest.fixture(autouse=True)
def any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a search tries and what it finds to rewrite is the same here, whoever has made the processor."""
    monkeypatch.setattr(mm_by_onednn, "slow_here", lambda: False)
    monkeypatch.setattr(candidates, "mkl_is_slow", lambda processor: False)
