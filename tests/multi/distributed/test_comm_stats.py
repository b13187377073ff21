"""What ranks cost each other in a training, where torch's own engines send: counted, with the slow rank named."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.distributed.comm_stats import CommMeter
from hotloop.plan import Plan

SLOW, PAUSE_S, BATCH, STEPS = 1, 0.01, 4, 6
STEP_MS = 1e3 * PAUSE_S * BATCH

ENGINES: dict[str, dict[str, Any]] = {"sharded": {}, "tensor": {}, "stages": {"microbatches": 2}}


class Samples(torch.utils.data.Dataset):
    """Loaded one by one; the slow rank sleeps over a batch, or over its half of one."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == SLOW:
            time.sleep(self.pause_s)
        return torch.full((6,), float(place)), place % 2


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))


def cost(path: Path, parallel: Any, capfd: pytest.CaptureFixture[str]) -> tuple[list[dict[str, Any]], str]:
    """What the journal says of a training in which one rank is slow, and what was shown."""
    pause_s = PAUSE_S * (2 if parallel == "sharded" else 1)
    task = hotloop.Task(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=1e-3),
        data=Samples(pause_s),
        batch_size=BATCH,
        epochs=2,
    )
    plan = Plan(parallel=parallel, ranks=2, **ENGINES[parallel])
    run = hotloop.fit(task, run=path, plan=plan)
    return [event for event in run.journal() if event["event"] in ("ranks", "waiting")], capfd.readouterr().err


@pytest.mark.few("tensor")
@pytest.mark.parametrize("parallel", ENGINES)
def test_what_the_engines_wait_for_is_counted(tmp_path: Path, parallel: str, capfd: pytest.CaptureFixture[str]) -> None:
    events, err = cost(tmp_path / "run", parallel, capfd)
    assert [event["event"] for event in events] == ["waiting", "waiting", "ranks"]
    for event in events:
        spent = [sum(each) for each in zip(event["waiting_ms"], event["communication_ms"], strict=True)]
        assert event["slowest"] == SLOW
        assert spent[1 - SLOW] > spent[SLOW] + STEP_MS / 2
    shares = [sum(each) for each in zip(events[-1]["waiting"], events[-1]["communication"], strict=True)]
    assert all(0 < share < 1 for share in shares)
    columns = {"sharded": "waiting and in communication", "tensor": "communication", "stages": "waiting"}
    assert f"ms in {columns[parallel]}" in err
    assert f"rank {SLOW} is the slowest: others waited" in err


@pytest.mark.few("tensor")
@pytest.mark.parametrize("parallel", ["tensor", "stages"])
def test_engines_that_are_not_heard_are_missed(
    tmp_path: Path, parallel: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def deaf(self: CommMeter, *, relayed: bool) -> Iterator[None]:
        yield

    monkeypatch.setattr(CommMeter, "measure_engines", deaf)
    events, err = cost(tmp_path / "run", parallel, capfd)
    assert events == [] and "the slowest" not in err
