"""A model split by layers over ranks comes to what one process comes to, and what would change that is seen."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hotloop
from hotloop.core.state import differing_paths
from hotloop.distributed.launch import launch
from hotloop.distributed.world import World
from hotloop.errors import PlanError
from hotloop.lowering.pipeline import microbatch_runner, pipeline_step
from hotloop.lowering.pipeline.graph_split import GraphPiece, LossModule, TracedForward
from hotloop.lowering.pipeline.microbatch_runner import ScheduledRng
from hotloop.lowering.pipeline.ownership import StageOwnership
from hotloop.plan import Plan
from hotloop.training.run import Run
from tests.multi.distributed.test_ddp import come_to, distance
from tests.support.processes.rank_processes import of_ranks
from tests.support.processes.resumed_training import disagreements
from tests.support.runs import resume_run
from tests.support.tasks.rank_tasks import DTYPES, Images, images, tokens


class Words(nn.Module):
    """Skips and branches over stages, a weight at both ends, dropout and noise, a change in place, a module unused."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8, dtype=dtype)
        self.places = nn.Parameter(torch.zeros(7, 8, dtype=dtype))
        self.left, self.right = nn.Linear(8, 8, dtype=dtype), nn.Linear(8, 8, dtype=dtype)
        self.act = nn.ReLU(inplace=True)
        self.norm = nn.LayerNorm(8, dtype=dtype)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(8, 8, dtype=dtype)
        self.unused = nn.Linear(2, 2, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.words(x) + self.places
        both = self.drop(self.act(self.left(first))) + self.right(first)
        late = self.norm(both) + torch.dropout(first, 0.1, self.training) + 0.01 * torch.randn_like(self.places)
        return nn.functional.linear(self.drop(self.last(late)) + x[..., None], self.words.weight).transpose(1, 2)


def words(dtype: torch.dtype, **fields: Any) -> hotloop.Task:
    """Adam, clipping, an average, a schedule; ignored targets, by class weighted; the last batch has 9 of 20 samples."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 11, (57, 7), generator=generator)
    y = (x + x.roll(1, 1)) % 11
    y[torch.rand(57, 7, generator=generator) < 0.4] = -100
    y[::4] = -100
    given: dict[str, Any] = dict(
        model=lambda: Words(dtype),
        loss=nn.CrossEntropyLoss(weight=torch.rand(11, generator=generator).to(dtype)),
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
        schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40),
        data=(x, y),
        validation=8,
        batch_size=20,
        clip_norm=0.3,
        average=0.9,
        epochs=8,
    )
    return hotloop.Task(**given | fields)


def normed(dtype: torch.dtype) -> hotloop.Task:
    """Batch norms; a momentum of None would read a count of batches as a number, which no graph can hold."""

    def model() -> nn.Module:
        found = Images(dtype)
        found.flat.momentum = 0.2
        return found

    return images(dtype, samples=64 + 37 + 32, batch_size=64, validation=32, model=model)


CASES: dict[str, Callable[[torch.dtype], hotloop.Task]] = {"words": words, "tokens": tokens, "images": normed}
# Tokens have two modules to cut between.
PLANS = {
    "1f1b": Plan(parallel="stages", ranks=2, microbatches=4),
    "gpipe": Plan(parallel="stages", ranks=3, pipeline="gpipe", microbatches=5, split="left,norm"),
    "whole": Plan(parallel="stages", ranks=2, microbatches=1),  # as batch norms need it
}
GIVEN = [("words", "1f1b"), ("tokens", "1f1b"), ("words", "gpipe"), ("images", "whole")]


def more_of(plan: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.more] if plan == "gpipe" else []


COMPARED = [pytest.param(case, plan, marks=more_of(plan)) for case, plan in GIVEN]


@cache
def alone(case: str, dtype: str) -> Any:
    return come_to(CASES[case](DTYPES[dtype]), Plan())


@pytest.fixture(scope="module")
def of_plan(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], list[Any]]:
    @cache
    def come(name: str, dtype: str) -> list[Any]:
        def compute(world: World) -> dict[str, Any]:
            cases = [case for case, plan in GIVEN if plan == name]
            return {case: come_to(CASES[case](DTYPES[dtype]), PLANS[name]) for case in cases}

        return of_ranks(tmp_path_factory.mktemp("ranks"), PLANS[name], compute)

    return come


@pytest.mark.few("words-1f1b", "tokens-1f1b")
@pytest.mark.parametrize(("case", "plan"), COMPARED)
def test_in_fp64_all_comes_out_the_same_but_for_the_last_bits(
    of_plan: Callable[[str, str], list[Any]], case: str, plan: str
) -> None:
    for rank in of_plan(plan, "fp64"):
        far = distance(rank[case], alone(case, "fp64"))
        assert {path: value for path, value in far.items() if value > 1e-10} == {}


@pytest.mark.more
@pytest.mark.parametrize(("case", "plan"), COMPARED)
def test_in_fp32_it_is_as_true_as_one_process(of_plan: Callable[[str, str], list[Any]], case: str, plan: str) -> None:
    truth = alone(case, "fp64")
    noise = max(distance(alone(case, "fp32"), truth).values())
    assert max(distance(of_plan(plan, "fp32")[0][case], truth).values()) <= 4 * noise


@pytest.mark.few("1f1b")
@pytest.mark.parametrize("plan", PLANS)
def test_all_ranks_tell_of_the_same_bits(of_plan: Callable[[str, str], list[Any]], plan: str) -> None:
    first, *others = of_plan(plan, "fp64")
    for key, (state, sums, figures) in first.items():
        for rank in others:
            assert (repr(sums), repr(figures)) == (repr(rank[key][1]), repr(rank[key][2]))
            assert differing_paths(state, rank[key][0]) == []


# --- what would come to something else


def equal_shares(patch: pytest.MonkeyPatch) -> None:
    """Each microbatch's mean counts the same, however much of it is ignored."""
    weights = pipeline_step.PipelineStep._weights
    patch.setattr(pipeline_step.PipelineStep, "_weights", lambda *given: torch.ones_like(weights(*given)))


def no_shares(patch: pytest.MonkeyPatch) -> None:
    """Gradients of microbatches add up to more than those of a mean."""
    patch.setattr(microbatch_runner, "_loss_share", lambda left, share: left[0])


def a_skip_that_is_lost(patch: pytest.MonkeyPatch) -> None:
    """What crosses a cut for a later branch comes without its gradient."""
    forward = GraphPiece.forward
    patch.setattr(
        GraphPiece,
        "forward",
        lambda self, arrived, batch: forward(self, [*arrived[:1], *(v.detach() for v in arrived[1:])], batch),
    )


def draws_of_the_first_rows(patch: pytest.MonkeyPatch) -> None:
    """Each microbatch gets the masks of the first."""
    given = ScheduledRng.replay
    patch.setattr(ScheduledRng, "replay", lambda self, first, rows: given(self, 0, rows))


def weights_at_both_ends_apart(patch: pytest.MonkeyPatch) -> None:
    """Each rank keeps its own gradient of what two of them use."""
    patch.setattr(StageOwnership, "shared_tensors", lambda self: [])


def norms_of_parts(patch: pytest.MonkeyPatch) -> None:
    """Each rank clips by the norm of its own gradients."""
    patch.setattr(
        pipeline_step.PipelineStep,
        "_norm",
        lambda self, parameters: torch.nn.utils.get_total_norm([v.grad for v in parameters if v.grad is not None]),
    )


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "none": lambda patch: None,
    **{fault.__name__: fault for fault in (equal_shares, no_shares, a_skip_that_is_lost, draws_of_the_first_rows)},
    **{fault.__name__: fault for fault in (weights_at_both_ends_apart, norms_of_parts)},
}


def small() -> hotloop.Task:
    return words(torch.float64, validation=None, data=tuple(part[:20] for part in words(torch.float64).data))


def after(plan: Plan) -> hotloop.lowering.program.Program:
    program = hotloop.lower(small(), plan)
    program.advance(1)
    program.end_epoch()
    program.advance(1)
    return program


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    plan = PLANS["gpipe"].with_axes(ranks=2, split="norm")

    def compute(world: World) -> dict[str, Any]:
        found = {}
        for name, plant in FAULTS.items():
            with pytest.MonkeyPatch.context() as patch:
                plant(patch)
                found[name] = after(plan).state()
        return found

    return of_ranks(tmp_path_factory.mktemp("planted"), plan, compute)[0]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_sees_it(planted: dict[str, Any], fault: str) -> None:
    far = max(distance((planted[fault], [], {}), (after(Plan()).state(), [], {})).values())
    assert far < 1e-10 if fault == "none" else far > 1e-6


# --- checkpoints


@pytest.mark.more
def test_stages_begin_where_they_did_also_where_only_the_start_says_how_many_ranks(tmp_path: Path) -> None:
    task, path = words(torch.float32, validation=None, epochs=1), tmp_path / "run"
    hotloop.fit(task, run=path, plan=PLANS["1f1b"].with_axes(split="last"), progress=False)  # hardly the fastest
    plan = PLANS["1f1b"].with_axes(ranks=None)
    launch(2, lambda: resume_run(path, task=task, plan=plan, overrides={"epochs": 2}), print)
    assert Run.open(path).plan.split == "last"


class Watched(nn.Module):
    """Layers of which only a figure, or what is detached later, depends, in the first stage and in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.early, self.cut_off, self.late = (nn.Linear(4, 1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        early, cut_off, x = self.early(x), self.cut_off(x), self.first(x)
        x = self.last(self.middle(x).relu() + cut_off.detach())
        return x, (early + self.late(x)).mean()


def watched() -> hotloop.Task:
    def step(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        output, figure = model(batch[0])
        return {"loss": nn.functional.cross_entropy(output, batch[1]), "figure": figure}

    # AdamW decays what has a gradient, be it of 0.
    return linear(model=Watched, loss=None, step=step, optimizer=lambda p: torch.optim.AdamW(p, weight_decay=0.5))


@pytest.mark.more
def test_what_only_a_figure_depends_on_is_left_as_it_is(tmp_path: Path) -> None:
    plan = STAGES.with_axes(split="middle")
    both = come_to(watched(), Plan()), of_ranks(tmp_path, plan, lambda world: come_to(watched(), plan))[0]
    before = watched().build_model().state_dict()
    for state, *_ in both:
        for name in ("early.weight", "cut_off.weight", "late.weight"):
            assert torch.equal(state.parameters[name], before[name])
    assert max(distance(both[1], both[0]).values()) < 1e-5


def killing(optimizer: torch.optim.Optimizer, marker: Path) -> torch.optim.Optimizer:
    steps = itertools.count(1)

    def hook(*_: Any) -> None:
        if next(steps) == 5 and torch.distributed.get_rank() == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    optimizer.register_step_post_hook(hook)
    return optimizer


@pytest.mark.more
def test_a_killed_rank_changes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def fit(name: str, marker: Path, plan: Plan) -> Run:
        task = words(torch.float32, optimizer=lambda p: killing(torch.optim.Adam(p), marker), validation=None, epochs=3)
        return hotloop.fit(task, run=tmp_path / name, plan=plan, checkpoint_every="2")

    whole = fit("whole", tmp_path, PLANS["1f1b"])
    killed = fit("killed", tmp_path / "marker", whole.plan)
    assert (tmp_path / "marker").exists()
    assert "rank 1 was killed (SIGKILL): all 2 start again" in capfd.readouterr().err
    assert [event["step"] for event in killed.journal() if event["event"] == "resume"] == [4]
    assert disagreements(whole.path, killed.path) == []


# --- what can't be split


class Decides(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if (x == x).all() else x + 1


def linear(*between: nn.Module, **fields: Any) -> hotloop.Task:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    given: dict[str, Any] = dict(
        model=lambda: nn.Sequential(nn.Linear(4, 4), *between, nn.Linear(4, 2)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        data=(x, (x[:, 0] > 0).long()),
        batch_size=8,
        epochs=1,
    )
    return hotloop.Task(**given | fields)


class Dropping(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if random.random() < 0.1 else super().forward(x)


def mixing(model: nn.Module, batch: Any) -> torch.Tensor:
    x, share = batch[0], np.random.beta(0.4, 0.4)
    return nn.functional.cross_entropy(model(share * x + (1 - share) * x.flip(1)), batch[1])


STAGES = Plan(parallel="stages", ranks=2, microbatches=2)
DRAWN = r"^parallel=stages, and the model or the loss draws from NumPy's or Python's generator, or from its own; expected .* of torch's"
REFUSED: dict[str, tuple[hotloop.Task, dict[str, Any], str]] = {
    "a batch norm": (linear(nn.BatchNorm1d(4)), {}, r"microbatches=2 changes .*'1' \(BatchNorm1d\).*microbatches=1"),
    "a decision": (linear(Decides()), {}, r"can't cut the model: '1' can't be exported as a graph"),
    "no such module": (linear(), {"split": "head"}, r"uses no module 'head'; expected .*such as 1"),
    "the first module": (linear(), {"split": "0"}, r"doesn't call these modules in that order"),
    "a change in place": (linear(nn.ReLU(inplace=True)), {"split": "1"}, r"'1' changes in place what was computed"),
    "layers that Python drops": (linear(Dropping(4, 4)), {}, DRAWN),
    "inputs that NumPy mixes": (linear(loss=None, step=mixing), {}, DRAWN),
    "too many names": (linear(), {"split": "1,1"}, r"names 2 beginnings of stages, and there are 2 stages"),
    "too few modules": (
        linear(model=lambda: nn.Linear(4, 2)),
        {},
        r"can't be cut into 2 stages: .* none of its modules alone.*Use parallel=data",
    ),
}


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    def compute(world: World) -> dict[str, str]:
        found = {}
        for name, (task, axes, _) in REFUSED.items():
            try:
                hotloop.lower(task, STAGES.with_axes(**axes))
                found[name] = ""
            except PlanError as error:
                found[name] = str(error)
        return found

    return of_ranks(tmp_path_factory.mktemp("refused"), STAGES, compute)[1]


@pytest.mark.more
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_split_is_named(refused: dict[str, str], case: str) -> None:
    assert re.search(REFUSED[case][2], refused[case]), refused[case]
    assert len(refused[case].splitlines()) == 1


def test_a_graph_holds_no_number_that_python_drew() -> None:
    objective = LossModule(Dropping(4, 2), linear(), batch := tuple(part[:4] for part in linear().data))
    before = random.getstate()
    with pytest.raises(PlanError, match=DRAWN):
        TracedForward.from_task(objective, batch)
    assert random.getstate() == before


def test_pieces_of_the_graph_are_the_model() -> None:
    """Cut wherever it can be, one piece after the other gives bit by bit what the model gives."""
    task = words(torch.float32)
    model = task.build_model().eval()
    batch = tuple(part[:3] for part in task.data)
    traced = TracedForward.from_task(LossModule(model, task, batch).eval(), batch)
    beginnings = traced.cut_points()
    assert list(beginnings) == ["places", "left", "right", "norm", "last"]
    pieces = traced.split(list(beginnings.values()))
    torch.manual_seed(0)
    values: tuple[torch.Tensor, ...] = ()
    for piece in pieces:
        values = piece(values, batch)
    torch.manual_seed(0)
    assert torch.equal(traced.result(values).output, model(batch[0]))
