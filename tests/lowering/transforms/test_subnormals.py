"""What an optimizer keeps in compiled steps, where it fades below what its format holds in full."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.lowering.compile.capture import capture_step
from hotloop.lowering.compile.inputs import step_tensors
from hotloop.lowering.transforms.optimizer import SUBNORMAL_INTERVAL, zero_subnormals
from hotloop.plan import Plan
from tests.support.programs import a_task

TINY = torch.finfo(torch.float32).tiny


def test_only_numbers_below_the_format_become_zero() -> None:
    kept = torch.tensor([TINY, -TINY, TINY / 2, -TINY / 8, 0.0, 1.0, torch.inf, torch.nan])
    count, half = torch.tensor(TINY / 2), torch.tensor([1e-6, 1e-4], dtype=torch.float16)
    alike = torch.tensor([TINY / 2]).expand(3)
    zero_subnormals([kept, count, half, torch.tensor([1, 2]), alike])
    assert torch.equal(kept.nan_to_num(nan=7.0), torch.tensor([TINY, -TINY, 0, 0, 0, 1, torch.inf, 7]).nan_to_num())
    assert count == TINY / 2
    assert bool((half > 0).all()) and bool((alike > 0).all())


OPTIMIZERS = {
    "Adam": (lambda p: torch.optim.Adam(p), "exp_avg"),
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "momentum_buffer"),
}


def fading(kind: str) -> hotloop.Task:
    """A network one of whose inputs is always 0, so that its weights get no gradient."""
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    inputs[:, 1] = 0.0
    return a_task(
        model=lambda: nn.Linear(4, 3),
        data=(inputs, inputs[:, 0].gt(0).long()),
        batch_size=8,
        optimizer=OPTIMIZERS[kind][0],
    )


def faded(program: hotloop.lowering.program.Program, key: str) -> Tensor:
    """What is kept of those weights; brought near the end of the format's numbers before the next step."""
    (kept,) = [one[key] for one in program.optimizer.state.values() if one[key].ndim == 2]
    return kept[:, 1]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_captured_step_keeps_none_and_an_eager_one_does(kind: str) -> None:
    key = OPTIMIZERS[kind][1]
    program = hotloop.lower(fading(kind))
    program.advance(1)
    batch, samples = next(program.feed.epoch(0))
    faded(program, key).fill_(1.05 * TINY)
    hyper = {"0/lr": torch.full((), 1e-3, dtype=torch.float64)}
    captured = capture_step(program._step, batch, samples, hyper, whole=True)
    values = step_tensors(program._step, hyper, whole=True)
    flat = [value.detach().clone() for value in torch.utils._pytree.tree_leaves(values)]
    with torch.no_grad():
        captured.graph(*flat, *batch)
    before, after = (
        [one for one in tensors if one.shape == (3, 4) and bool((one[:, 1].abs() < 2 * TINY).all())]
        for tensors in (torch.utils._pytree.tree_leaves(values), flat)
    )
    assert any(bool((one[:, 1] == 1.05 * TINY).all()) for one in before)
    assert not any(bool((one[:, 1] != 0).any()) for one in after)
    program.advance(1)
    assert bool((faded(program, key) != 0).all()) and bool((faded(program, key) < TINY).all())


@pytest.mark.more
def test_the_plan_is_still_trusted() -> None:
    task = fading("Adam")
    assert hotloop.check(task, Plan(compile="step")).parity in ("bitwise", "fp32-equivalent")


@pytest.mark.parametrize(("optimizer", "kept"), [("fused", 0.0), ("default", 1.0)])
def test_a_fused_update_drops_them_every_so_many_steps_and_the_baseline_never(optimizer: str, kept: float) -> None:
    program = hotloop.lower(fading("Adam"), Plan(optimizer=optimizer))  # type: ignore[arg-type]
    program.advance(1)
    faded(program, "exp_avg").fill_(TINY / 2)
    left = [float((faded(program, "exp_avg") != 0).float().mean()) for _ in steps_of(program, 2 * SUBNORMAL_INTERVAL)]
    assert left[: SUBNORMAL_INTERVAL - 2] == [1.0] * (SUBNORMAL_INTERVAL - 2)
    assert left[SUBNORMAL_INTERVAL - 2 :] == [kept] * (len(left) - SUBNORMAL_INTERVAL + 2)


def steps_of(program: hotloop.lowering.program.Program, count: int) -> Iterator[int]:
    """Each of so many steps, once it is done."""
    for number in range(count):
        if program.advance(1).ended:
            program.end_epoch()
        yield number


def test_when_that_is_follows_from_the_steps_number_so_that_a_run_goes_on_as_it_would_have() -> None:
    task = fading("Adam")
    whole = hotloop.lower(task, Plan(optimizer="fused"))
    for _ in steps_of(whole, SUBNORMAL_INTERVAL - 3):
        pass
    faded(whole, "exp_avg").fill_(TINY / 2)
    begun_anew = hotloop.lower(task, Plan(optimizer="fused"))
    begun_anew.restore(whole.state())
    for one in (whole, begun_anew):
        for _ in steps_of(one, 5):
            pass
    assert bool((faded(whole, "exp_avg") == 0).all())
    assert torch.equal(faded(whole, "exp_avg"), faded(begun_anew, "exp_avg"))


class Counting(torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:
        self.state["calls"] = self.state.get("calls", 0) + 1
        return super().step(closure)


def test_an_optimizer_may_keep_what_belongs_to_no_parameter() -> None:
    task = fading("Adam")
    own = hotloop.Task(
        model=task.model, loss=task.loss, data=task.data, batch_size=8, seed=0, optimizer=lambda p: Counting(p)
    )
    program = hotloop.lower(own, Plan(optimizer="fused"))
    for _ in steps_of(program, SUBNORMAL_INTERVAL + 2):
        pass
    assert program.optimizer.state["calls"] == SUBNORMAL_INTERVAL + 2
