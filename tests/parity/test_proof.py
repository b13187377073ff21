"""Parity: honest plans are trusted, draws are alike, and all is left behind as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotloop
from bench.graph_mutations import Graphs
from hotloop.core.random.rng import generator_states
from hotloop.core.records.race import TRUSTED_CLASSES, Parity
from hotloop.core.state import differing_paths
from hotloop.lowering.build import lower
from hotloop.lowering.eager_step import EagerStep
from hotloop.parity import proof
from hotloop.parity.proof import prove, prove_programs
from hotloop.plan import BASELINE, Plan
from tests.support.planted_step_faults import (
    last_batch_dropped,
    mask_repeated,
    zero_grad_skipped,
)
from tests.support.programs import a_task, advance
from tests.support.tasks.model_families import family
from tests.support.tasks.parity_families import another_family

pytestmark = pytest.mark.usefixtures("one_thread")

FORLOOP = Plan(optimizer="forloop")


# ---------------------------------------------------------------- honest plans


class Turned(nn.Module):
    """A mask with permuted strides, and plain SGD, whose update Inductor takes for something else if it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(2, 2), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        turned = self.middle(self.first(x).view(-1, 4, 2).transpose(0, 1)).transpose(0, 1)
        return self.last(F.dropout(turned, 0.3).flatten(1))  # type: ignore[no-any-return]


@pytest.mark.few("mlp", "cnn", "compiled")
@pytest.mark.parametrize(
    ("task", "plans"),
    [
        (family("mlp"), [Plan(optimizer="fused"), Plan(residency="host"), Plan(accumulation=3)]),
        (family("cnn"), [Plan(layout="channels_last"), Plan(layout="channels_last", optimizer="fused")]),
        (family("gpt"), [Plan(optimizer="foreach"), Plan(accumulation=2)]),
        (another_family("gru"), [Plan(optimizer="foreach"), Plan(residency="device"), Plan(accumulation=3)]),
        (another_family("vae"), [FORLOOP, Plan(optimizer="fused")]),
        (a_task(model=Turned, epochs=9), [Plan(compile="step")]),
    ],
    ids=["mlp", "cnn", "gpt", "gru", "vae", "compiled"],
)
def test_honest_plans_are_trusted(task: hotloop.Task, plans: list[Plan]) -> None:
    found = prove_programs(task, [hotloop.lower(task, plan) for plan in plans])
    assert {one.plan: (one.parity, one.reason) for one in found if one.parity not in TRUSTED_CLASSES} == {}
    assert all(one.states >= 16 and one.free_steps >= 5 and one.first is None for one in found)


def test_the_baseline_is_bitwise_itself() -> None:
    assert prove(family("mlp"), BASELINE).parity == "bitwise"


@pytest.mark.more
def test_a_compiler_may_choose_the_strides_of_what_is_drawn() -> None:
    """Eager kernels draw in the order of memory, so a captured graph draws into tensors whose order is that anyhow."""

    def contiguous(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
        draws = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.bernoulli_.float)
        assert len(draws) == 1
        draws[0].target = lambda value, share: torch.empty(value.shape).bernoulli_(share)
        graph.recompile()
        return graph

    task = a_task(model=Turned, epochs=9)
    found = prove_programs(task, [Graphs(task, "step").program(contiguous)])[0]
    assert found.parity in TRUSTED_CLASSES, found.reason


# ---------------------------------------------------------------- draws


class Drawing(nn.Module):
    """Draws in the way that it is told."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.draw = nn.Linear(6, 3), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.draw(x))  # type: ignore[no-any-return]


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "randn": lambda x: x + 0.3 * torch.randn(x.shape),
    "randn of its dtype": lambda x: x + 0.3 * torch.randn(x.shape, dtype=x.dtype),
    "rand_like": lambda x: x * torch.rand_like(x),
    "normal in place": lambda x: x + torch.empty_like(x).normal_(0, 0.3),
    "uniform in place": lambda x: x + torch.empty_like(x).uniform_(-1, 1),
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout of features": lambda x: F.dropout1d(x[:, :, None], 0.4).squeeze(2),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.7)),
    "multinomial": lambda x: x[:, torch.multinomial(torch.ones(6, dtype=x.dtype), 6)],
    "of its own values": lambda x: x * torch.bernoulli(x.detach().sigmoid()),
    "around its own values": lambda x: torch.normal(x.detach(), 0.1),
    "permutation": lambda x: x[:, torch.randperm(6)],
    "gumbel": lambda x: F.gumbel_softmax(x, tau=1.0),
    "exponential": lambda x: x * torch.empty_like(x).exponential_(),
}


@pytest.mark.few("bernoulli")
@pytest.mark.parametrize("draw", DRAWS)
def test_float64_draws_what_the_step_draws(draw: str) -> None:
    task = a_task(model=lambda: Drawing(DRAWS[draw]))
    faulty = hotloop.lower(task)
    mask_repeated(faulty)
    honest, broken = prove_programs(task, [hotloop.lower(task), faulty])
    assert honest.parity == "bitwise", honest.reason
    assert broken.parity == "broken"


# ---------------------------------------------------------------- what it leaves behind


@pytest.mark.more
def test_programs_and_generators_are_left_as_they_were() -> None:
    task = family("cnn")
    program = hotloop.lower(task, FORLOOP)
    advance(program, 3)
    before, generators, threads = program.state(), generator_states(), torch.get_num_threads()
    prove_programs(task, [program])
    assert differing_paths(program.state(), before) == []
    assert generator_states() == generators
    assert torch.get_num_threads() == threads
    assert torch.get_default_dtype() == torch.float32
    assert not torch.are_deterministic_algorithms_enabled()
    advance(program, 3)
    alone = hotloop.lower(task, FORLOOP)
    advance(alone, 6)
    assert differing_paths(program.state(), alone.state()) == []


def test_they_are_left_so_when_the_proof_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    task = family("mlp")
    program = hotloop.lower(task, FORLOOP)
    advance(program, 3)
    before, generators = program.state(), generator_states()
    step, calls = EagerStep._run, []

    def interrupted(self: EagerStep, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 40:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(EagerStep, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prove_programs(task, [program])
    assert differing_paths(program.state(), before) == []
    assert generator_states() == generators


@pytest.mark.more
def test_one_baseline_is_enough_for_what_passes_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them can only allow more: the others are asked about what didn't pass, and for nothing else."""
    asked: list[tuple[bool, int]] = []
    compared = proof._compare_programs

    def recorded(task: Any, programs: Any, *given: Any, brief: bool) -> list[Parity]:
        asked.append((brief, len(programs)))
        return compared(task, programs, *given, brief=brief)

    monkeypatch.setattr(proof, "_compare_programs", recorded)
    task = family("mlp")
    honest, faulty = lower(task, Plan(optimizer="fused")), lower(task, Plan(optimizer="foreach"))
    zero_grad_skipped(faulty)
    found = [one.parity for one in prove_programs(task, [honest, faulty])]
    assert found[0] in ("bitwise", "fp32-equivalent") and found[1] == "broken"
    assert asked == [(True, 2), (False, 1)]


@pytest.mark.more
def test_what_fails_beside_one_baseline_may_pass_beside_all(monkeypatch: pytest.MonkeyPatch) -> None:
    task = family("mlp")
    program = lower(task, Plan(optimizer="fused"))
    alone = proof._compare_programs

    def strict(*given: Any, brief: bool) -> list[Parity]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hotloop.parity.verdict.TYPICAL_LIMIT", 1e-3 if brief else 4.0)
            return alone(*given, brief=brief)

    monkeypatch.setattr(proof, "_compare_programs", strict)
    assert prove_programs(task, [program])[0].parity in ("bitwise", "fp32-equivalent")


@pytest.mark.few("2-10-in all 10 single steps of the training")
@pytest.mark.parametrize(
    ("epochs", "states", "says"), [(2, 10, "in all 10 single steps of the training"), (9, 17, "in 17 single steps")]
)
def test_the_reason_says_how_many_steps_were_compared(epochs: int, states: int, says: str) -> None:
    """Two epochs of five batches, the last of which is smaller, have no state to compare twice."""
    task = a_task(epochs=epochs)
    programs = [lower(task, plan) for plan in (Plan(optimizer="foreach"), Plan(accumulation=2))]
    found = prove_programs(task, programs)
    assert [one.parity for one in found] == ["bitwise", "fp32-equivalent"]
    assert all(one.states == states and says in one.reason for one in found)


@pytest.mark.few("1-5")
@pytest.mark.parametrize(("epochs", "steps"), [(1, 5), (2, 10), (3, 10)])
def test_a_free_run_stays_within_the_schedule_and_crosses_the_end_of_an_epoch(epochs: int, steps: int) -> None:
    scheduled = lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)  # noqa: E731
    task, plan = a_task(epochs=epochs, schedule=scheduled), Plan(optimizer="foreach")
    programs = [lower(task, plan), lower(task, plan)]
    last_batch_dropped(programs[1])
    honest, faulty = prove_programs(task, programs)
    assert honest.parity in TRUSTED_CLASSES and honest.free_steps == steps
    assert faulty.parity == "broken", faulty.reason
