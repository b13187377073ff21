"""A proof says what memory it takes before it takes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from hotloop.lowering.build import lower
from hotloop.parity import proof
from hotloop.parity.proof import prove_programs
from hotloop.plan import BASELINE, Plan
from tests.support.tasks.model_families import family

PROOF = """
import json, re, psutil, torch
from torch import nn
import hotloop
from hotloop.parity.proof import prove_programs
from hotloop.parity.proof import needed_bytes
from hotloop.plan import Plan

x = torch.randn(64, 1400)
task = hotloop.Task(
    model=lambda: nn.Linear(1400, 1400, bias=False),
    loss=nn.MSELoss(),
    optimizer=lambda p: torch.optim.OPTIMIZER,
    data=(x, x),
    batch_size=4,
)
program = hotloop.lower(task, Plan(device="cpu", threads=1))
[needed] = needed_bytes([program]).values()  # before there is any state of the optimizer's
program.advance(1)
before = psutil.Process().memory_info().rss
[found] = prove_programs(task, [program])
[held] = re.findall(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())  # not with the parent's, as ru_maxrss is
peak = int(held) * 1024
print(json.dumps([found.parity, peak - before, needed]))
"""


GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
"""Has glibc give back at once what is freed, as it does with tensors of large models; else peaks depend on what was where."""


@pytest.mark.more
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a process' peak in /proc")
@pytest.mark.parametrize(
    "optimizer",
    ["Adam(p)", *(pytest.param(f"SGD(p, lr=0.1{how})", marks=pytest.mark.more) for how in ("", ", momentum=0.9"))],
)
def test_it_takes_as_much_as_it_says(optimizer: str) -> None:
    script = PROOF.replace("OPTIMIZER", optimizer)
    done = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | GIVEN_BACK, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    parity, taken, needed = json.loads(done.stdout)
    assert parity == "bitwise"
    assert 0.85 < taken / needed < 1.1


def test_none_is_begun_where_there_is_too_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "free_memory_bytes", lambda device: 1 << 10)
    monkeypatch.setattr("hotloop.parity.proof.Float64Reference", lambda *given: pytest.fail("it was begun"))
    programs = [lower(family("mlp"), BASELINE), lower(family("mlp"), Plan(optimizer="foreach"))]
    found = prove_programs(family("mlp"), programs)
    assert [one.parity for one in found] == ["unproven", "unproven"] and all(one.short_of_memory for one in found)
    assert all("a proof takes about" in one.reason and "1.0 KiB are free" in one.reason for one in found)
