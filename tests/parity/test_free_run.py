"""The free run of a proof: what shows from one step to the next alone, in whatever is kept."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.core.records.race import TRUSTED_CLASSES
from hotloop.lowering.build import lower
from hotloop.lowering.program import Program
from hotloop.parity import free_run
from hotloop.parity.proof import prove_programs
from hotloop.plan import Plan
from tests.support.programs import a_task

HONEST = Plan(optimizer="forloop")


class Counting(nn.Module):
    """Has a batch normalisation's buffers, and counts its steps where only `get_extra_state` shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer, self.seen = nn.BatchNorm1d(6), nn.Linear(6, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.layer(self.norm(x))  # type: ignore[no-any-return]

    def get_extra_state(self) -> Any:
        return {"kept": self.seen % 2}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["kept"]


def scaled(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.mul_(1.01)


def state_of(program: Program, key: str) -> Tensor:
    (state,) = list(program.optimizer.state.values())[:1]
    return state[key]  # type: ignore[no-any-return]


FAULTS: dict[str, tuple[Callable[[Program], Any], str]] = {
    "buffers": (lambda program: scaled(program.model.norm.running_mean), "the buffers 'running_mean'"),  # type: ignore
    "optimizer": (lambda program: scaled(state_of(program, "exp_avg")), "the optimizer's 'exp_avg'"),
    "its steps": (lambda program: state_of(program, "step").add_(1), "the optimizer's 'step'"),
    "parameters": (lambda program: scaled(program.model.layer.weight), "the parameters"),  # type: ignore[union-attr]
    "sum": (
        lambda program: program._step.sums.__setitem__("loss", 1.01 * program._step.sums["loss"]),
        "the sums of the loss",
    ),
    "extra": (lambda program: setattr(program.model, "seen", 7), "the parameters"),
}


def goes_wrong_between_steps(program: Program, fault: Callable[[Program], Any]) -> None:
    """As a replay of several steps may: each by itself is as it should be."""
    advance = program.advance

    def several(steps: int) -> Any:
        outcome = advance(steps)
        if steps > 1 and not outcome.ended:  # at the end, after which nothing follows from it
            fault(program)
        return outcome

    program.advance = several  # type: ignore[method-assign]


@pytest.mark.few("optimizer")
@pytest.mark.parametrize("name", FAULTS)
def test_what_goes_wrong_from_one_step_to_the_next_is_seen_in_all_that_is_kept(name: str) -> None:
    fault, first = FAULTS[name]
    task = a_task(model=Counting, optimizer=torch.optim.Adam, batch_size=4, epochs=9)
    programs = [lower(task, HONEST) for _ in range(2)]
    goes_wrong_between_steps(programs[1], fault)
    honest, faulty = prove_programs(task, programs)
    assert honest.parity in TRUSTED_CLASSES, honest.reason
    assert faulty.parity == "broken" and str(faulty.first).startswith(f"{first}, within"), faulty.reason
    assert ("extra/" in faulty.reason) is (name == "extra")


@pytest.mark.few("num_batches_tracked")
@pytest.mark.parametrize("buffer", ["running_mean", "num_batches_tracked"])
def test_a_count_that_is_another_is_no_proof_and_a_tensor_that_is_is_a_fault(buffer: str) -> None:
    task = a_task(model=Counting, optimizer=torch.optim.Adam, batch_size=4, epochs=9)
    program = lower(task, HONEST)
    goes_wrong_between_steps(program, lambda program: getattr(program.model.norm, buffer).add_(1))  # type: ignore
    (found,) = prove_programs(task, [program])
    assert (found.parity == "unproven") is (buffer == "num_batches_tracked"), found.reason
    assert buffer in found.reason


def counted(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Gives an accuracy; which answer is the largest may hang by the last bit."""
    x, y = batch
    out = model(x)
    right = (out.argmax(1) == y).float().mean()
    return {"loss": nn.functional.cross_entropy(out, y), "right": right}


def test_a_share_of_right_answers_that_rounding_turns_is_no_fault() -> None:
    task = a_task(step=counted, optimizer=torch.optim.Adam, batch_size=4, epochs=9)
    program = lower(task, HONEST)
    sums = lambda program: program._step.sums  # noqa: E731
    goes_wrong_between_steps(program, lambda program: sums(program).update(right=sums(program)["right"] + 0.25))
    (found,) = prove_programs(task, [program])
    assert found.parity in TRUSTED_CLASSES, found.reason


class Adaptive(torch.optim.SGD):
    """Writes a number into its groups that it computes, as optimizers do that find the learning rate."""

    wrong = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            sizes = [float(one.grad.norm()) for one in group["params"] if one.grad is not None]
            group["d"] = max(group.get("d", 1e-3), sum(sizes)) * self.wrong
        return super().step(closure)


@pytest.mark.few("1.0")
@pytest.mark.parametrize("wrong", [1.0, 1.001])
def test_a_number_that_an_optimizer_computes_may_be_off_by_rounding_and_no_more(wrong: float) -> None:
    task = a_task(optimizer=lambda parameters: Adaptive(parameters, lr=0.01), epochs=9)
    program = hotloop.lower(task, Plan(accumulation=2))  # adds up in another order
    program.optimizer.wrong = wrong  # type: ignore[attr-defined]
    (found,) = prove_programs(task, [program])
    assert (found.parity in TRUSTED_CLASSES) is (wrong == 1.0), found.reason


def test_a_free_run_has_two_whole_replays_before_the_end_of_an_epoch_and_one_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of_a_plan: Any = SimpleNamespace(parts=SimpleNamespace(plan=Plan(graphs=16)))
    assert (free_run._steps_per_replay(of_a_plan), free_run._steps_per_replay(lower(a_task()))) == (16, 1)
    monkeypatch.setattr(free_run, "_steps_per_replay", lambda program: 16)
    task = a_task(epochs=20)
    (found,) = prove_programs(task, [lower(task, HONEST)])
    assert found.free_steps == 49 and found.parity in TRUSTED_CLASSES
