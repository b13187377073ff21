"""Several threads come to the same bits at each run, although they add to the same elements."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from hotloop.lowering.transforms import threads
from hotloop.lowering.transforms.threads import deterministic_order

RUNS = """
import sys
import torch
from torch import nn
import hotloop

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.more, self.head = nn.Embedding(8, 64), nn.Parameter(torch.randn(8, 64)), nn.Linear(64, 3)

    def forward(self, x):
        return self.head((self.words(x) + self.more[x]).mean(1))

draw = torch.Generator().manual_seed(1)
data = torch.randint(0, 8, (64, 64), generator=draw), torch.randint(0, 3, (64,), generator=draw)
task = hotloop.Task(model=Words, loss=nn.CrossEntropyLoss(), data=data, batch_size=64,
                    optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
program = hotloop.lower(task, hotloop.Plan(compile=sys.argv[1], threads=2))
start, ends = program.state(), set()
for _ in range(50):
    program.restore(start)
    program.advance(1)
    ends.add(tuple(value.numpy().tobytes() for value in program.state().parameters.values()))
program.restore(start)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
    program.advance(1)
print(any(event.name.endswith("::embedding_dense_backward") for event in seen.events()))
print(len(ends), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())
"""


@pytest.mark.more
@pytest.mark.parametrize("how", ["none", *(pytest.param(how, marks=pytest.mark.more) for how in ("step", "package"))])
def test_words_that_meet_are_added_up_in_one_order(how: str, tmp_path: Path) -> None:
    """Of 50 runs of one step from one State. In a process of its own, whose threads stay there.

    By torch's own kernel, which several threads share: what a compiler makes of it would run on one.
    """
    caches = {name: str(tmp_path) for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR")}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CI": "1"} | caches  # where Inductor is stricter
    found = subprocess.run(
        [sys.executable, "-c", RUNS, how], capture_output=True, text=True, env=environment, check=False
    )
    assert found.stdout.split() == ["True", "1", "1", "False"], found.stderr


@pytest.mark.parametrize("mode", ["default", "warn", "error"])
def test_what_the_program_chose_stays(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    torch.set_deterministic_debug_mode(mode)
    try:
        chosen = torch.get_deterministic_debug_mode()
        with deterministic_order():
            assert torch.get_deterministic_debug_mode() == max(1, chosen)
        assert torch.get_deterministic_debug_mode() == chosen
        assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    finally:
        torch.set_deterministic_debug_mode("default")


def unpool() -> None:
    nn.MaxUnpool2d(2)(torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2, 2, dtype=torch.long))


def test_nobody_is_warned_of_what_only_hotloop_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with deterministic_order():
            unpool()
        assert threads._NONDETERMINISM_WARNING not in warnings.filters  # type: ignore[attr-defined]
    torch.set_deterministic_debug_mode("warn")
    try:
        with deterministic_order(), pytest.warns(UserWarning, match="does not have a deterministic implementation"):
            unpool()
    finally:
        torch.set_deterministic_debug_mode("default")


def test_inductor_s_mode_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo sets it whenever it has compiled something, here a function of the user's."""
    import torch._inductor.config as inductor

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with deterministic_order():
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        assert inductor.deterministic
    assert not inductor.deterministic
