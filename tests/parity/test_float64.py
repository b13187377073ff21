"""The truth in float64, of Tasks that say fp32 by name, keep constants, have complex numbers, or whose loss cancels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hotloop
from hotloop.core.records.race import TRUSTED_CLASSES
from hotloop.lowering.program import Program
from hotloop.parity.comparison import run_one_step
from hotloop.parity.proof import prove, prove_programs
from hotloop.parity.references import Float64Reference
from hotloop.parity.trajectory import walk_states
from hotloop.plan import BASELINE, Plan
from tests.support.planted_step_faults import mask_repeated
from tests.support.programs import a_task, labelled
from tests.training.test_module_kinds import Waves

pytestmark = pytest.mark.usefixtures("one_thread")

WEIGHTS = torch.tensor([0.5, 1.0, 2.0])
MIXED = torch.randn(6, 6, generator=torch.Generator().manual_seed(3))


class Through(nn.Module):
    """A layer behind some function of its input."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.drop, self.layer = function, nn.Dropout(0.3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.drop(self.function(x)))  # type: ignore[no-any-return]


def summed(x: Tensor) -> Tensor:
    total = torch.zeros(6, dtype=torch.float32)
    total += x.sum(0)
    return x + total


def masked_twice(x: Tensor) -> Tensor:
    mask = (x > -1).float()
    return F.relu(x * mask, inplace=True) + (1.0 - mask.float())


def counted(x: Tensor) -> Tensor:
    counts = torch.tensor([0.0] * 6, dtype=torch.float32)
    counts.index_add_(0, x.argmax(1), torch.ones(len(x), dtype=torch.float32))
    return x + counts / len(x)


def overwritten(x: Tensor) -> Tensor:
    y = x.clone()
    y[x > 1] = WEIGHTS[0]
    return y.index_add(0, torch.tensor([0, 1]), MIXED[:2])


def recomputed(x: Tensor) -> Tensor:
    def masked(x: Tensor, mask: Tensor) -> Tensor:
        return (x * mask.float()).tanh()

    return checkpoint(masked, x, (x > 0).float(), use_reentrant=False)  # type: ignore[no-any-return]


KEPT: dict[int, Tensor] = {}


def kept(x: Tensor) -> Tensor:
    """A constant for each length, which is made where it is needed first."""
    if len(x) not in KEPT:
        KEPT[len(x)] = torch.arange(len(x), dtype=torch.float32)[:, None] / len(x)
    return x + KEPT[len(x)].float()


def pixels() -> tuple[Tensor, Tensor]:
    x, y = labelled()
    return (x.abs() * 80).clamp(max=255).to(torch.uint8), y


SAYS_FP32: dict[str, tuple[Callable[[Tensor], Tensor], dict[str, Any]]] = {
    "whole numbers": (lambda x: x.float() / 255, {"data": pixels()}),
    "a factory": (lambda x: x @ torch.eye(6, dtype=torch.float32), {}),
    "a constant outside": (lambda x: x @ MIXED, {}),
    "a sum that it begins": (summed, {}),
    "a mask, said twice": (masked_twice, {}),
    "classes": (lambda x: x, {"loss": lambda scores, y: F.cross_entropy(scores, y, weight=WEIGHTS)}),
    "a count in place": (counted, {}),
    "elements that are overwritten": (overwritten, {}),
    "a tensor of its own": (lambda x: x * torch.tensor([0.3] * 6).float(), {}),
    "what is computed again": (recomputed, {}),
    "what is kept": (kept, {}),
    "one of many": (lambda x: x + F.one_hot(x.argmax(1), 6).float() @ MIXED, {}),
    "a cast": (lambda x: x.float() * 0.7, {}),
    "a norm": (lambda x: x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-6).type_as(x), {}),
    "a softmax": (lambda x: x.softmax(1, dtype=torch.float32), {}),
    "scores": (lambda x: x, {"loss": lambda output, target: F.cross_entropy(output.float(), target)}),
}


@pytest.mark.few("whole numbers")
@pytest.mark.parametrize("name", SAYS_FP32)
def test_what_the_task_calls_fp32_is_what_it_computes_with(name: str) -> None:
    function, fields = SAYS_FP32[name]
    task = a_task(model=lambda: Through(function), **fields)
    faulty = hotloop.lower(task)
    mask_repeated(faulty)
    honest, broken = prove_programs(task, [hotloop.lower(task), faulty])
    assert honest.parity == "bitwise", honest.reason
    assert broken.parity == "broken"


COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    "a constant outside": lambda x: x @ MIXED.to(x.dtype),
    "computed of constants": lambda x: x * (MIXED.to(x.dtype)[0] / MIXED.to(x.dtype).sum()),
    "summed up": lambda x: x + MIXED.to(x.dtype).cumsum(0)[5],
    "a cast": lambda x: x * 0.7,
    "a sum": lambda x: x / (1 + x.square().sum(1, keepdim=True)),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_the_truth_is_what_float64_comes_to(name: str) -> None:
    """As it is written here, with all numbers in float64; the same in the Task with constants in fp32."""
    said: dict[str, Callable[[Tensor], Tensor]] = {
        "a constant outside": lambda x: x @ MIXED,
        "computed of constants": lambda x: x * (MIXED[0] / MIXED.sum()),
        "summed up": lambda x: x + MIXED.cumsum(0)[5],
        "a cast": lambda x: x.to(torch.float32) * 0.7,
        "a sum": lambda x: x / (1 + x.square().sum(1, keepdim=True, dtype=torch.float32)),
    }
    task = a_task(model=lambda: Still(said[name]))
    program = hotloop.lower(task)
    (x, y), _ = next(iter(program.feed.epoch(0)))
    weights = {key: value.double() for key, value in program.state().parameters.items()}
    scores = F.linear(COMPUTED[name](x.double()), weights["layer.weight"], weights["layer.bias"])
    exact = Float64Reference(task, torch.device("cpu")).step(program.state(), (x, y))["loss", "loss"]
    assert float(exact) == pytest.approx(float(F.cross_entropy(scores, y, reduction="sum")), rel=1e-13)


class Still(Through):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__(function)
        self.drop = nn.Identity()  # type: ignore[assignment]


def test_whole_numbers_are_cut_off_as_fp32_cuts_them_off() -> None:
    """100 * 0.29 is 29 in fp32, and a hair less in float64."""

    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.places, self.layer = nn.Embedding(30, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            at = (torch.arange(101, dtype=torch.float32) * 0.29).long()
            return self.layer(x + self.places(at).mean(0))  # type: ignore[no-any-return]

    task = a_task(model=Places)
    program = hotloop.lower(task)
    batch, _ = next(iter(program.feed.epoch(0)))
    start = program.state()
    exact, plain = (
        Float64Reference(task, torch.device("cpu")).step(start, batch),
        run_one_step(program, start, batch)[0],
    )
    key = ("gradient", "places.weight")
    assert float((exact[key] - plain[key]).norm() / exact[key].norm()) < 1e-6


def written_to(x: Tensor) -> Tensor:
    total = torch.zeros(2, 6, dtype=torch.float32)
    total[0].add_(x.sum(0))
    return x + total.half()[0]


def beside_a_constant(x: Tensor) -> Tensor:
    return x + (x + torch.ones(6, dtype=torch.float32)).half()


@pytest.mark.parametrize("function", [written_to, beside_a_constant])
def test_what_follows_from_the_input_is_no_constant(function: Callable[[Tensor], Tensor]) -> None:
    found = prove(a_task(model=lambda: Through(function)), BASELINE)
    assert found.parity == "unproven" and "turns float64 into float16" in found.reason


def turned(program: Program) -> None:
    """A product with a complex number that is a hair off."""
    step = program._step._compute

    def off(batch: Any) -> Any:
        with torch.no_grad():
            program.model.gains.mul_(1 + 1e-4j)
        return step(batch)

    program._step._compute = off  # type: ignore[method-assign]


@pytest.mark.more
def test_complex_numbers_have_a_truth() -> None:
    task = a_task(model=Waves)
    faulty = hotloop.lower(task)
    turned(faulty)
    honest, broken = prove_programs(task, [hotloop.lower(task, Plan(accumulation=5)), faulty])
    assert honest.parity in TRUSTED_CLASSES, honest.reason
    assert broken.parity == "broken"


class Advantage(nn.Module):
    """Chances from scores that begin with zeros: their logarithms are alike, so what weighs them to zero in sum cancels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


def cancelling(scores: Tensor, y: Tensor) -> Tensor:
    weights = torch.arange(len(y), dtype=scores.dtype).sqrt()
    return (F.cross_entropy(scores, y, reduction="none") * (weights - weights.mean())).mean()


def rate_off(program: Program) -> None:
    program.optimizer.param_groups[0]["lr"] *= 1.001


@pytest.mark.more
def test_a_loss_that_cancels_to_nothing_is_no_reason_to_give_up() -> None:
    task = a_task(model=Advantage, loss=cancelling)
    truth, program = Float64Reference(task, torch.device("cpu")), hotloop.lower(task)
    batch, _ = next(iter(program.feed.epoch(0)))
    exact = truth.step(program.state(), batch)["loss", "loss"]
    assert abs(float(exact)) < 1e-6, "nothing but rounding is left of it"
    plain, faulty = hotloop.lower(task, Plan(compile="step")), hotloop.lower(task)
    step = faulty._step._update
    faulty._step._update = lambda: (rate_off(faulty), step())[1]  # type: ignore[method-assign]
    honest, broken = prove_programs(task, [plain, faulty])
    assert honest.parity in TRUSTED_CLASSES, honest.reason
    assert broken.parity == "broken"


def test_a_schedule_by_epochs_leaves_the_free_run_its_steps() -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=9)

    task = a_task(schedule=schedule, schedule_every="epoch", epochs=9, batch_size=2)
    found = prove(task, BASELINE)
    assert found.parity == "bitwise" and found.states >= 16 and found.free_steps == 10, found.reason


@pytest.mark.parametrize("batch_size", [5, 7, 9, 13])
def test_states_do_not_all_stand_before_the_same_batch(batch_size: int) -> None:
    """Epochs of 5, 4, 3 and 2 batches, of which the last has fewer samples."""
    program = hotloop.lower(a_task(batch_size=batch_size, epochs=40))
    lengths = [len(stop.batch[0]) for stop in walk_states(program)]
    assert len(lengths) == 17 and lengths.count(batch_size) >= 8 and lengths.count(batch_size) < 17


class Padded(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 120

    def __getitem__(self, sample: int) -> tuple[Tensor, int]:
        row = torch.randn(4 + sample % 13, generator=torch.Generator().manual_seed(sample))
        return row, int(row[0] > 0)


def padded(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    rows = nn.utils.rnn.pad_sequence([row for row, _ in samples], batch_first=True)
    return rows.mean(1, keepdim=True).expand(-1, rows.shape[1]).contiguous(), torch.tensor([y for _, y in samples])


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.mean(1, keepdim=True))  # type: ignore[no-any-return]


@pytest.mark.more
def test_a_compiled_step_that_few_batches_take_is_unproven() -> None:
    loader = torch.utils.data.DataLoader(Padded(), batch_size=3, shuffle=True, collate_fn=padded)
    task = a_task(model=Mean, data=loader, batch_size=None, epochs=2)
    found = prove(task, Plan(device="cpu", compile="step"))
    assert found.parity == "unproven" and "took its compiled program" in found.reason
