"""Optimizers of the test alone."""

from __future__ import annotations

import gc

import pytest
from torch.optim import Optimizer

from hotloop.profiler.hooks import optimizer_hooks


@pytest.fixture
def own_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks for optimizers finds those of this test, and none that others have left in the process."""
    real = gc.get_objects
    others = [one for one in real() if issubclass(type(one), Optimizer)]
    known = set(map(id, others))
    monkeypatch.setattr(optimizer_hooks.gc, "get_objects", lambda: [one for one in real() if id(one) not in known])
