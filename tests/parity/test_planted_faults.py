"""Planted faults are broken, and their place is named."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hotloop
from bench.graph_mutations import Graphs
from bench.yardstick import Yardstick
from hotloop.core.records.race import TRUSTED_CLASSES, Parity
from hotloop.lowering.program import Program
from hotloop.parity.proof import prove_programs
from hotloop.plan import Plan
from tests.support.planted_step_faults import (
    average_decay_off,
    clipped_twice,
    input_changed,
    last_batch_dropped,
    loss_scaled,
    mask_repeated,
    rate_off,
    state_of_the_step_before,
    statistics_not_updated,
    transposed_copy,
    zero_grad_skipped,
)
from tests.support.programs import a_task
from tests.support.tasks.model_families import family
from tests.support.tasks.parity_families import another_family

pytestmark = pytest.mark.usefixtures("one_thread")

FORLOOP = Plan(optimizer="forloop")


FAULTS: dict[str, tuple[Callable[[Program], None], str]] = {
    "zero_grad skipped": (zero_grad_skipped, "gradient"),
    "last batch dropped": (last_batch_dropped, "the parameters, within"),
    "dropout mask repeated": (mask_repeated, "loss 'loss' at step 2"),
    "statistics not updated": (statistics_not_updated, "buffer '1.running_"),
    "input changed": (input_changed, "count 'tensors 0 of the batch"),
    "clipped twice": (clipped_twice, "gradient"),
    "optimizer state of the step before": (state_of_the_step_before, "optimizer 'state/"),
    "transposed copy": (transposed_copy, "loss 'loss' at step 1"),
    "decay of the average off by 1 %": (average_decay_off, "average"),
    "learning rate off by 20 %": (rate_off, "update"),
}


@pytest.fixture(scope="module")
def judged(one_thread: None) -> dict[str, Parity]:
    """All faults of one network, proven together."""
    task = another_family("batchnorm", clip_norm=0.5, average=0.9)
    programs = [hotloop.lower(task, FORLOOP) for _ in FAULTS]
    for program, (plant, _) in zip(programs, FAULTS.values(), strict=True):
        plant(program)
    return dict(zip(FAULTS, prove_programs(task, programs), strict=True))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_broken_and_its_place_is_named(judged: dict[str, Parity], fault: str) -> None:
    found = judged[fault]
    assert found.parity == "broken", found.reason
    assert found.first is not None and found.first.startswith(FAULTS[fault][1]), found.first


@pytest.fixture(scope="module")
def graphs() -> Graphs:
    return Graphs(family("cnn"), "step")


@pytest.mark.more
def test_a_stale_rate_in_a_graph_is_broken() -> None:
    """The schedule of the captured step: each update with the rate of the step before."""

    def stale(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
        rates = [node for node in graph.graph.nodes if "_local_scalar_dense" in str(node.target)]
        with graph.graph.inserting_after(rates[0]):
            new = graph.graph.call_function(_Before(), (rates[0],))
        rates[0].replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
        graph.recompile()
        return graph

    task = another_family("mlp")
    graphs = Graphs(task, "step")
    honest, faulty = prove_programs(task, [graphs.program(), graphs.program(stale)])
    assert honest.parity in TRUSTED_CLASSES
    assert faulty.parity == "broken"
    assert faulty.first is not None and faulty.first.startswith("update")


class _Before:
    """Gives what it was given one call before."""

    __name__ = "before"

    def __init__(self) -> None:
        self.last: Any = None

    def __call__(self, value: Any) -> Any:
        given, self.last = self.last, value
        return value if given is None else given


@pytest.mark.more
def test_mutants_that_change_a_step_clearly_are_caught(graphs: Graphs) -> None:
    """At random from the fuzzer; what a mutant does is measured apart from parity, which has to agree."""
    yardstick = Yardstick(graphs.program(), steps=10)
    made = []
    for number in range(18):
        program, mutation = graphs.mutant(random.Random(number))
        made.append((program, mutation, yardstick.of(program)))
    found = prove_programs(graphs.task, [program for program, _, _ in made])
    clear = [(m, p) for (_, m, effect), p in zip(made, found, strict=True) if effect.multiple > 1000]
    nothing = [(m, p) for (_, m, effect), p in zip(made, found, strict=True) if effect.multiple == 0]
    assert len(clear) >= 5
    assert [(m, p.reason) for m, p in clear if p.parity != "broken"] == []
    assert [(m, p.reason) for m, p in nothing if p.parity not in TRUSTED_CLASSES] == []


# ---------------------------------------------------------------- reduced precision


@pytest.mark.more
def test_an_optimizer_that_calls_the_loss_itself_is_compared() -> None:
    task = a_task(optimizer=lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2), epochs=4)
    honest, faulty = hotloop.lower(task), hotloop.lower(task)
    loss_scaled(faulty)
    assert [one.parity for one in prove_programs(task, [honest, faulty])] == ["bitwise", "broken"]
