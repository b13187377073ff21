"""Each mode of ranks with each form of a Task: it ends as one process does, or is refused in one line before training.

Every pair of levels of two factors occurs in at least one run; a greedy search chooses the runs, the same each time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotloop
from hotloop.errors import HotloopError
from hotloop.plan import Plan
from hotloop.training.run import Run, is_run
from tests.multi.distributed.test_ddp import distance
from tests.support.processes import rank_processes  # noqa: F401 - imports what each fork would
from tests.support.processes.resumed_training import last_checkpoint

WORDS, LENGTH, WIDTH = 7, 5, 8
FACTORS: dict[str, tuple[str, ...]] = {
    "mode": ("data", "sharded", "towers", "tensor", "stages", "local", "async"),
    "form": ("loss", "step"),
    "watch": ("none", "validation", "average", "early-stop", "plateau"),
    "rows": ("smaller", "fewer", "without"),
    "data": ("arrays", "workers", "padding"),
    "model": ("norm", "tied", "frozen", "unused"),
}
PLANS = {
    "stages": Plan(parallel="stages", ranks=2, microbatches=2),
    "local": Plan(parallel="local", ranks=2, sync_every=2),
    **{mode: Plan(parallel=mode, ranks=2) for mode in ("data", "sharded", "towers", "tensor", "async")},  # type: ignore[arg-type]
}
INEXACT = ("local", "async")
"""Modes that train towards another result, of which the runs must end alone."""
SAMPLES = {"smaller": (22, 8), "fewer": (17, 8), "without": (4, 1)}
"""Samples and batch size: a last batch of 6, a last batch of 1, and batches of 1, of which one rank never has a row."""

Case = tuple[str, ...]


def covering() -> list[Case]:
    """Runs in which each pair of levels occurs; each covers the most pairs that are left, of all runs that there could be."""
    candidates = list(itertools.product(*FACTORS.values()))
    left = {pair for case in candidates for pair in pairs(case)}
    found = []
    while left:
        best = max(candidates, key=lambda case: sum(pair in left for pair in pairs(case)))
        found.append(best)
        left -= set(pairs(best))
    return found


def pairs(case: Case) -> Iterator[tuple[tuple[int, str], tuple[int, str]]]:
    return itertools.combinations(enumerate(case), 2)  # type: ignore[return-value]


class Net(nn.Module):
    """A small language model of blocks in a list."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH)) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(WIDTH) if kind == "norm" else nn.Identity()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if kind == "tied":
            self.head.weight = self.words.weight
        if kind == "frozen":
            self.blocks[0].requires_grad_(False)
        if kind == "unused":
            self.unused = nn.Linear(3, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = x + block(x)
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x).transpose(1, 2)


def step(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    output = model(batch[0])
    hits = ((output.argmax(1) == batch[1]).double() * (batch[1] != -100)).sum() / (batch[1] != -100).sum()
    return {"loss": F.cross_entropy(output, batch[1]), "accuracy": hits}


def weight(batch: Any) -> Tensor:
    return (batch[1] != -100).sum()


def padded(items: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Sequences of several lengths, as long as the longest of the batch."""
    longest = max(int((y != -100).sum()) for _, y in items)
    return torch.stack([x[:longest] for x, _ in items]), torch.stack([y[:longest] for _, y in items])


class Sequences(torch.utils.data.Dataset):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return self.x[place], self.y[place]


def sequences(samples: int, seed: int, *, cut: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(0, WORDS, (samples, LENGTH), generator=generator)
    y = (x + x.roll(1, 1)) % WORDS
    if cut:
        lengths = torch.randint(2, LENGTH + 1, (samples, 1), generator=generator)
        y[torch.arange(LENGTH) >= lengths] = -100
    return x, y


def task(form: str, watch: str, rows: str, data: str, model: str) -> hotloop.Task:
    samples, batch_size = SAMPLES[rows]
    cut = data == "padding"
    train, validation = sequences(samples, 1, cut=cut), sequences(3, 2, cut=cut)
    given: dict[str, Any] = dict(
        model=lambda: Net(model),
        optimizer=lambda p: torch.optim.SGD([one for one in p if one.requires_grad], lr=0.1, momentum=0.9),
        data=train if data == "arrays" else Sequences(*train),
        batch_size=batch_size,
        epochs=2,
    )
    given |= dict(step=step, weight=weight) if form == "step" else dict(loss=nn.CrossEntropyLoss())
    if cut:
        given["collate"] = padded
    if watch != "none":
        given["validation"] = validation if data == "arrays" else Sequences(*validation)
    if watch == "average":
        given["average"] = 0.9
    if watch == "early-stop":
        given["stop_below"] = 100.0
    if watch == "plateau":
        given["schedule"] = lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    return hotloop.Task(**given)


def trained(case: Case, run: Path, plan: Plan) -> Run | str:
    _, *form = case
    if case[4] == "workers":
        plan = plan.with_axes(workers=1)
    try:
        return hotloop.fit(task(*form), run=run, plan=plan, progress=False, rank_timeout="60s")
    except HotloopError as error:
        assert not is_run(run), f"it was refused when it trained: {error}"
        return str(error)


@cache
def alone(case: Case, folder: Path) -> Run:
    run = trained(("none", *case), folder / "-".join(case), Plan())
    assert isinstance(run, Run)
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


def reached(run: Run) -> Any:
    figures = {
        f"{place} {name}": value
        for place, row in enumerate(run.epochs)
        for name, value in row.items()
        if isinstance(value, float) and name not in ("seconds", "samples_per_s", "time")
    }
    return last_checkpoint(run).state, [], figures


def refused(case: Case) -> str:
    """What the line says of a combination that a mode doesn't have; empty if it has it."""
    mode, _, watch, rows, data, model = case
    if rows == "without" and mode not in ("tensor", "async"):
        return "a batch of 1"
    if (mode, data) == ("async", "workers"):
        return "workers=1"
    if watch == "average" and mode in ("sharded", "tensor", "async"):
        return "average"
    return "normalises over the samples" if (mode, model) == ("stages", "norm") else ""


CASES = covering()


@pytest.mark.few("data-*", "stages-*", "sharded-step-*", "towers-*")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if place % 6 == 0 else pytest.mark.more) for place, case in enumerate(CASES)],
    ids="-".join,
)
def test_ranks_end_as_one_process_does(case: Case, tmp_path: Path, folder: Path) -> None:
    run = trained(case, tmp_path / "run", PLANS[case[0]])
    if isinstance(run, str):
        assert refused(case) and refused(case) in run, run
        assert len(run.splitlines()) == 1
        return
    assert not refused(case)
    one = alone(case[1:], folder)
    assert run.final is not None and one.final is not None
    assert len(run.epochs) == len(one.epochs)
    if case[0] not in INEXACT:
        assert run.final["reason"] == one.final["reason"]
        far = distance(reached(run), reached(one))
        assert {path: value for path, value in far.items() if value > 1e-10} == {}


def test_each_pair_of_levels_occurs() -> None:
    levels = [[(place, level) for level in values] for place, values in enumerate(FACTORS.values())]
    wanted = {pair for one, other in itertools.combinations(levels, 2) for pair in itertools.product(one, other)}
    covered = {pair for case in CASES for pair in pairs(case)}
    assert covered == wanted
    assert len(CASES) <= 60
