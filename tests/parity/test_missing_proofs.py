"""What can't be compared or run is unproven, or says where it fails."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotloop
from hotloop.core.processes import Deadline
from hotloop.core.records.race import TRUSTED_CLASSES
from hotloop.errors import HotloopError
from hotloop.lowering.build import lower
from hotloop.parity import proof
from hotloop.parity.proof import prove, prove_plans, prove_programs
from hotloop.parity.references import Float64Reference
from hotloop.plan import BASELINE, Plan
from hotloop.tuning import race
from tests.support.programs import a_task
from tests.support.tasks.model_families import family
from tests.test_task_optimizers import OPTIMIZERS

pytestmark = pytest.mark.usefixtures("one_thread")

# ---------------------------------------------------------------- what can't be compared


class Norm(nn.Module):
    """As many language models have it: the mean of squares is always fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.bfloat16)
        return (wide * wide.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt()).to(x.dtype) * self.weight


class Bits(nn.Linear):
    """Clears the sign, of a number of 32 bits."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x.view(torch.int32) & 0x7FFFFFFF).view(x.shape).view(torch.float32))


class OwnGenerator(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn(x.shape, generator=self.generator))


class Clock(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (1 + time.perf_counter() % 1))


class NoDouble(nn.Linear):
    def _apply(self, function: Callable, recurse: bool = True) -> Any:
        if function(torch.zeros(1)).dtype == torch.float64:
            raise RuntimeError("weights of 32 bits alone")
        return super()._apply(function, recurse)


class Coarse(torch.optim.Optimizer):
    """Steps in bf16, with a loss that it asks for itself."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for value in self.param_groups[0]["params"]:
                value -= 0.1 * value.grad.bfloat16()
        return loss


class Rows(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter((torch.ones(6) * number, torch.tensor(number % 3)) for number in range(24))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"model": lambda: nn.Sequential(Norm(), nn.Linear(6, 3))}, "'0' (Norm) turns float64 into bfloat16"),
        ({"model": lambda: Bits(6, 3)}, "can't be run in float64"),
        ({"model": lambda: NoDouble(6, 3)}, "weights of 32 bits alone"),
        ({"optimizer": OPTIMIZERS["Muon"]}, "the optimizer (Muon) turns float64 into bfloat16"),
        ({"optimizer": Coarse}, "the optimizer (Coarse) turns float64 into bfloat16"),
        ({"model": lambda: Clock(6, 3)}, "too random to compare"),
        ({"data": torch.utils.data.DataLoader(Rows(), batch_size=5), "batch_size": None}, "stream"),
    ],
    ids=["cast inside", "bits", "no double", "Muon", "own optimizer", "clock", "stream"],
)
def test_what_can_t_be_compared_is_unproven_and_named(fields: dict[str, Any], says: str) -> None:
    found = prove(a_task(**fields), BASELINE)
    assert found.parity == "unproven"
    assert says in found.reason
    assert "\n" not in found.reason


def test_a_generator_of_the_models_own_follows_from_the_step() -> None:
    assert prove(a_task(model=OwnGenerator), BASELINE).parity == "bitwise"


@pytest.mark.parametrize("name", sorted(set(OPTIMIZERS) - {"Muon"}))
def test_an_optimizer_that_counts_in_fp32_alone_has_a_truth(name: str) -> None:
    task = a_task(optimizer=OPTIMIZERS[name])
    truth, program = Float64Reference(task, torch.device("cpu")), lower(task, BASELINE)
    batch, _ = next(iter(program.feed.epoch(0)))
    for _ in range(2):
        truth.step(program.state(), batch)
        program.step(batch)
    assert truth.watch.narrowed is None and not truth.watch.draws


# ---------------------------------------------------------------- what can't be run


class Failing(nn.Linear):
    def __init__(self, step: int) -> None:
        super().__init__(6, 3)
        self.step = step
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.steps == self.step:
            raise ValueError("planted")
        if self.training:
            self.steps += 1
        return super().forward(x)


class OfFive(nn.Linear):
    """For batches of five samples; the epoch's last has four."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(5, 6) if self.training else x)


FAILING: dict[str, tuple[dict[str, Any], str]] = {
    "at a State that is compared": (
        {"model": lambda: Failing(7)},
        "step 8 (epoch 2, batch 3) raised ValueError: planted",
    ),
    "on the way to the next": ({"model": lambda: Failing(9)}, "step 10 (epoch 2, batch 5) raised ValueError: planted"),
    "in the free run": ({"model": lambda: Failing(53)}, "raised ValueError: planted"),
    "with a smaller batch": ({"model": lambda: OfFive(6, 3)}, "step 5 (epoch 1, batch 5) raised RuntimeError: shape"),
}


@pytest.mark.few("at a State that is compared", "on the way to the next", "with a smaller batch")
@pytest.mark.parametrize("where", FAILING)
def test_a_training_that_fails_is_no_fault_of_the_proof(where: str) -> None:
    """Not of float64 either; `race` shows the speed all the same."""
    fields, says = FAILING[where]
    task = a_task(**fields, epochs=30)
    with pytest.raises(HotloopError, match=re.escape(says)):
        prove(task, BASELINE)
    plans, deadline = [Plan(optimizer="foreach")], Deadline()
    [found] = race._prove_in_time(task, plans, race.prove_all, lambda doing, share: None, deadline)
    assert found.parity == "unproven" and says in found.reason and "float64" not in found.reason


class Flattening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 4, 3), nn.Linear(4 * 4 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x))
        return self.last(y.view(len(y), -1))  # type: ignore[no-any-return]


def pictures(**fields: Any) -> hotloop.Task:
    x = torch.randn(40, 2, 6, 6, generator=torch.Generator().manual_seed(1))
    return a_task(**{"model": Flattening, "data": (x, x.flatten(1)[:, :3].argmax(1)), "epochs": 3} | fields)


@pytest.mark.more
def test_a_plan_whose_step_fails_is_broken_and_says_where() -> None:
    found = prove(pictures(), Plan(layout="channels_last"))
    assert found.parity == "broken" and found.first == "step 1"
    assert "raised RuntimeError: view size is not compatible" in found.reason


@pytest.mark.more
def test_a_harmless_change_that_the_model_can_t_take_is_left_out() -> None:
    task = pictures()
    program = hotloop.lower(task, Plan(optimizer="foreach"))
    (found,) = proof._compare_programs(
        task, [program], None, lambda done, total: None, brief=False
    )  # beside channels_last, too
    assert found.parity in TRUSTED_CLASSES and found.states >= 16


def test_a_step_that_fails_by_itself_is_one_line() -> None:
    def loss(out: Tensor, y: Tensor) -> Tensor:
        raise ZeroDivisionError("of the user's own")

    with pytest.raises(hotloop.HotloopError, match="ZeroDivisionError: of the user's own"):
        hotloop.check(a_task(loss=loss, epochs=9), Plan(optimizer="foreach"))


# ---------------------------------------------------------------- no memory

TOO_MUCH = 1 << 50
"""Bytes that no machine has; torch's own allocator refuses them."""


class Greedy(nn.Linear):
    """Takes more memory than there is where it computes in float64."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            torch.empty(TOO_MUCH, dtype=torch.uint8)
        return super().forward(x)


def test_a_proof_without_memory_is_none() -> None:
    task = a_task(model=lambda: Greedy(6, 3), epochs=9)
    found = prove_plans(task, [BASELINE, Plan(optimizer="foreach")])
    assert [one.parity for one in found] == ["unproven", "unproven"] and all(one.short_of_memory for one in found)
    assert all("there was no memory left for the proof" in one.reason and "\n" not in one.reason for one in found)


@pytest.mark.more
def test_a_plan_without_memory_for_its_step_is_not_broken_and_others_are_proven() -> None:
    task = family("mlp")
    honest, greedy = lower(task, Plan(optimizer="foreach")), lower(task, Plan(optimizer="forloop"))
    greedy._step._compute = lambda batch: torch.empty(TOO_MUCH)  # type: ignore
    found = prove_programs(task, [honest, greedy])
    assert [one.parity for one in found] == ["bitwise", "unproven"], found
    assert [one.short_of_memory for one in found] == [False, True]
    assert "there was no memory for its step in the proof" in found[1].reason


def test_a_race_keeps_its_times_where_there_is_no_memory_for_the_proof() -> None:
    task = a_task(model=lambda: Greedy(6, 3), epochs=9)
    verdict = hotloop.race(
        task, ["baseline", Plan(device="cpu", optimizer="foreach")], time_limit="0.01s", progress=False
    )
    timing = verdict.plans[1]
    assert timing.step_ms and timing.parity == "unproven" and "no memory left" in str(timing.parity_reason)
    assert timing.short_of_memory
