"""Plans that draw random numbers for each piece of a batch: trusted where these are as good as the baseline's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hotloop
from bench.graph_mutations import Graphs
from hotloop.core.records.race import Parity
from hotloop.lowering.build import lower
from hotloop.lowering.checks import batch_rows
from hotloop.lowering.program import Program
from hotloop.parity.comparison import StepErrors
from hotloop.parity.proof import prove, prove_programs
from hotloop.parity.rng_tests import check_own_draws
from hotloop.plan import Plan
from tests.support.programs import a_task
from tests.support.tasks.model_families import family
from tests.support.tasks.parity_families import another_family

pytestmark = pytest.mark.usefixtures("one_thread")

HALVES = Plan(accumulation=2)
P = 0.4


class Dropping(nn.Module):
    """Drops along two paths, one of them with its dimensions turned; `p`, `noise` and `keep` are there to be spoilt."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 32), nn.Linear(8, 8), nn.Linear(32, 3)
        self.p, self.noise = P, 0.1

    def forward(self, x: Tensor) -> Tensor:
        turned = self.middle(self.first(x).view(-1, 4, 8).transpose(0, 1)).transpose(0, 1)
        hidden = F.dropout(turned, self.p, self.training).flatten(1)
        return self.last(hidden + self.shaking(hidden))  # type: ignore[no-any-return]

    def shaking(self, hidden: Tensor) -> Tensor:
        return self.noise * torch.randn_like(hidden)


class DrawingToScale(Dropping):
    """Its noise is drawn as large as it is."""

    def shaking(self, hidden: Tensor) -> Tensor:
        return torch.empty_like(hidden).normal_(0.0, self.noise)


def dropping() -> hotloop.Task:
    return a_task(model=Dropping, epochs=9)


@pytest.mark.few("dropping")
@pytest.mark.parametrize(
    ("task", "plans"),
    [
        (family("vae"), [HALVES, Plan(accumulation=3), Plan(optimizer="fused")]),
        pytest.param(
            another_family("encoder"), [HALVES, Plan(accumulation=3, optimizer="foreach")], marks=pytest.mark.more
        ),
        (dropping(), [HALVES, Plan(accumulation=4)]),
        pytest.param(dropping(), [Plan(accumulation=2, compile="step")], marks=pytest.mark.more),
    ],
    ids=["vae", "transformer", "dropping", "dropping, compiled"],
)
def test_honest_pieces_are_trusted_though_their_draws_are_others(task: hotloop.Task, plans: list[Plan]) -> None:
    for plan, found in zip(plans, prove_programs(task, [lower(task, plan) for plan in plans]), strict=True):
        in_pieces = plan.accumulation > 1
        assert found.parity == "fp32-equivalent" if in_pieces else found.parity in ("fp32-equivalent", "bitwise")
        assert ("for each piece of a batch" in found.reason) == in_pieces
        assert ("the plan's random numbers have the baseline's rate and scale" in found.reason) == in_pieces
        assert found.states >= 16 and found.free_steps >= 5


def with_another_rate(program: Program) -> None:
    program.model.p = 0.5  # type: ignore[assignment]


def with_another_scale(program: Program) -> None:
    program.model.noise = 0.15  # type: ignore[assignment]


def with_masks_of_the_first_piece(program: Program) -> None:
    """Each piece draws what the first one did."""
    parts = program._step.parts
    compute = parts.compute

    def repeated(model: nn.Module, batch: Any) -> Any:
        if program.model.training:
            torch.manual_seed(program.position.step)
        return compute(model, batch)

    program._step.parts = type(parts)(**{**vars(parts), "compute": repeated})


def with_the_same_masks_at_each_step(program: Program) -> None:
    seed = program._step.draws.seed
    program._step.draws.seed = lambda step: seed(0)  # type: ignore[method-assign]


PLANTS: dict[Callable[[Program], None], str] = {
    with_another_rate: "draw 1 of piece 1 (bernoulli_) has another rate or scale",
    with_another_scale: "draw 2 of piece 1 (normal_) has another rate or scale",
    with_masks_of_the_first_piece: "draw 1 of piece 2 (bernoulli_) depends on that of the first piece",
    with_the_same_masks_at_each_step: "draw 1 of piece 1 (bernoulli_) depends on that of the step before",
}


@pytest.fixture(scope="module")
def planted(one_thread: None) -> dict[str, Parity]:
    task = dropping()
    programs = [lower(task, HALVES) for _ in [*PLANTS, None]]
    for program, plant in zip(programs, PLANTS, strict=False):
        plant(program)
    *found, honest = prove_programs(task, programs)
    assert honest.parity == "fp32-equivalent", honest.reason
    return {plant.__name__: parity for plant, parity in zip(PLANTS, found, strict=True)}


@pytest.mark.parametrize("plant", [plant.__name__ for plant in PLANTS])
def test_a_planted_fault_in_the_draws_is_broken(planted: dict[str, Parity], plant: str) -> None:
    assert planted[plant].parity == "broken", planted[plant].reason


# ---------------------------------------------------------------- the draws by themselves, without what comes of them


def many() -> hotloop.Task:
    """As much as it takes to tell rates apart."""
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    return a_task(model=DrawingToScale, data=(x, x[:, :3].argmax(1)), batch_size=32, epochs=9)


def looked_at(task: hotloop.Task, program: Program) -> StepErrors:
    account, plain = StepErrors("planted"), lower(task, Plan())
    check_own_draws(plain.state(), plain, [(program, account)])
    return account


@pytest.mark.few("with_another_rate")
@pytest.mark.parametrize("plant", PLANTS)
def test_what_a_plan_draws_is_looked_at_by_itself(plant: Callable[[Program], None]) -> None:
    task = many()
    honest = looked_at(task, lower(task, HALVES))
    assert (honest.has_tested_draws, honest.draws) == (True, None)
    program = lower(task, HALVES)
    plant(program)
    found = looked_at(task, program)
    assert found.has_tested_draws and str(found.draws).startswith(PLANTS[plant])


Graph = torch.fx.GraphModule


def masks_of(graph: Graph) -> list[torch.fx.Node]:
    return graph.graph.find_nodes(op="call_function", target=torch.ops.aten.bernoulli_.float)  # type: ignore[return-value]


def of_another_rate(graph: Graph) -> Graph:
    for node in masks_of(graph):
        node.update_arg(1, 0.5)
    graph.recompile()
    return graph


def of_the_first_replay(graph: Graph) -> Graph:
    for node in masks_of(graph):
        node.target = _Once()
    graph.recompile()
    return graph


class _Once:
    """Draws once; each replay gets the same."""

    __name__ = "once"

    def __init__(self) -> None:
        self.first: Tensor | None = None

    def __call__(self, value: Tensor, share: float) -> Tensor:
        drawn = value.bernoulli_(share)
        if self.first is None or self.first.shape != value.shape:
            self.first = drawn.clone()
        return drawn.copy_(self.first)


def of_the_first_piece(graph: Graph) -> Graph:
    first, *others = masks_of(graph)
    for node in others:
        node.replace_all_uses_with(first)
        graph.graph.erase_node(node)
    graph.recompile()
    return graph


def seeded_alike(graph: Graph) -> Graph:
    """Each replay draws from where the first one did."""
    with graph.graph.inserting_before(masks_of(graph)[0]):
        graph.graph.call_function(torch.manual_seed, (5,))
    graph.recompile()
    return graph


IN_GRAPHS: dict[str, tuple[Callable[[Graph], Graph], str]] = {
    "another rate": (of_another_rate, "(bernoulli_) has another rate or scale"),
    "seeded alike at each replay": (seeded_alike, "(bernoulli_) depends on that of the step before"),
}


@pytest.mark.few("another rate-1")
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("name", IN_GRAPHS)
def test_what_a_captured_step_draws_is_looked_at_by_itself(name: str, pieces: int) -> None:
    (change, says) = IN_GRAPHS[name]
    task = many()
    graphs = Graphs(task, "step", pieces)
    honest, found = looked_at(task, graphs.program()), looked_at(task, graphs.program(change))
    assert (honest.has_tested_draws, honest.draws) == (True, None)
    assert found.has_tested_draws and says in str(found.draws)


@pytest.mark.more
@pytest.mark.parametrize("pieces", [pytest.param(1, marks=pytest.mark.more), 2])
def test_faults_in_what_a_captured_step_draws_are_broken(pieces: int) -> None:
    """Also where the numbers that are drawn are right, and others are computed with."""
    task, changes = dropping(), [of_another_rate, seeded_alike, of_the_first_replay, of_the_first_piece]
    graphs = Graphs(task, "step", pieces)
    faulty = [graphs.program(change) for change in changes[: 2 + pieces]]
    honest, *found = prove_programs(task, [graphs.program(), *faulty])
    assert honest.parity == "fp32-equivalent", honest.reason
    assert [one.parity for one in found] == ["broken"] * len(faulty)


def test_draws_that_repeat_by_design_are_no_fault() -> None:
    """The model seeds the generator itself, so that the baseline repeats them as well."""

    class Seeding(Dropping):
        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(3)
            return super().forward(x)

    task = a_task(model=Seeding, epochs=9)
    account = StepErrors("seeding")
    plain, program = lower(task, Plan()), lower(task, Plan(accumulation=2))
    check_own_draws(plain.state(), plain, [(program, account)])
    assert account.draws is None or "of the step before" not in account.draws


# ---------------------------------------------------------------- what can't be put together


class Shaken(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + 0.01 * torch.randn_like(self.weight), self.bias)


def test_what_is_drawn_once_for_a_batch_is_unproven() -> None:
    found = prove(a_task(model=lambda: Shaken(6, 3), epochs=9), HALVES)
    assert found.parity == "unproven"
    assert "drawn once for a batch is drawn once for each piece" in found.reason


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda h: F.dropout(F.relu(self.first(h)), 0.3), x, use_reentrant=False)
        return self.last(hidden)  # type: ignore[no-any-return]


class Otherwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.dropout(x, 0.3 if torch.is_grad_enabled() else 0.2))  # type: ignore[no-any-return]


class Growing(nn.Module):
    def __init__(self, begin: float) -> None:
        super().__init__()
        self.layer, self.p = nn.Linear(6, 3), begin

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.p = min(0.5, self.p + 0.01)
        return self.layer(F.dropout(x, self.p)) if self.p else self.layer(x)  # type: ignore[no-any-return]


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.dropout(x, 0.3)) + 0.0 * float(np.random.beta(2, 2))  # type: ignore[no-any-return]


@pytest.mark.more
@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Recomputed, "more often than in the first run"),
        (Otherwise, "bernoulli_ draws otherwise than in the first run"),
        (lambda: Growing(0.0), ""),
        (Mixed, "Python's or NumPy's generator"),
    ],
    ids=["recomputed", "otherwise", "growing from nothing", "mixed"],
)
def test_what_cannot_be_put_together_is_unproven_and_not_broken(model: Callable[[], nn.Module], says: str) -> None:
    found = prove(a_task(model=model, epochs=9), HALVES)
    assert found.parity == "unproven", found.reason
    assert says in found.reason


@pytest.mark.more
def test_no_draw_of_a_comparison_of_pieces_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_rows, "_FREE_TIME_S", 1000.0)  # else a comparison is due only on a fast machine
    task, plan = family("vae"), HALVES
    (found,) = prove_programs(task, [lower(task, plan)])
    assert "the plan's random numbers have the baseline's rate and scale" in found.reason
