"""What torch's fused kernels can't take is updated as the baseline updates it: gaps, late and sparse gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotloop
from hotloop.core.feasibility import violations
from hotloop.core.task_parts.models import is_gapless
from hotloop.errors import PlanError
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.transforms import optimizer as update
from hotloop.plan import Plan
from hotloop.tuning.auto import feasibility_facts
from tests.support.programs import a_task, advance, labelled

CPU, FUSED = Plan(device="cpu"), Plan(device="cpu", optimizer="fused")

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
}


def ended(task: hotloop.Task, plan: Plan, steps: int = 7, say: Callable[[str], None] = lambda line: None) -> Any:
    program = hotloop.lower(task, plan, say)
    advance(program, steps)
    return {name: value.detach().clone() for name, value in program.model.named_parameters()}


def assert_as_plain(task: hotloop.Task, plan: Plan = FUSED, say: Callable[[str], None] = lambda line: None) -> None:
    """What differs is rounding: the same numbers in another order of operations."""
    plain, fused = ended(task, Plan(device="cpu", optimizer="forloop")), ended(task, plan, say=say)
    for name, value in plain.items():
        torch.testing.assert_close(fused[name], value, rtol=1e-4, atol=1e-6)


# --- gaps


def with_gaps() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].weight = nn.Parameter(torch.randn(8, 12)[:, :6])
    return model


def turned() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    model[0].weight = nn.Parameter(torch.randn(6, 8).t())
    return model


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_parameter_with_gaps_is_not_fused(name: str) -> None:
    """A kernel would walk through the memory between its rows."""
    task = a_task(model=with_gaps, optimizer=OPTIMIZERS[name])
    found, machine = feasibility_facts(task, CPU)
    assert "fused" not in found.implementations and "'0.weight'" in found.not_fused
    assert violations(FUSED, found, machine)
    with pytest.raises(PlanError, match=r"optimizer=fused can't be run here.*'0.weight'.* gaps") as caught:
        hotloop.lower(task, FUSED)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_transposed_parameter_is_fused_to_the_same_result(name: str) -> None:
    assert_as_plain(a_task(model=turned, optimizer=OPTIMIZERS[name]))


SHAPED = {
    "rows of a larger one": (torch.zeros(8, 3)[2:6], True),
    "transposed": (torch.zeros(4, 3).t(), True),
    "channels last": (torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last), True),
    "columns of a larger one": (torch.zeros(4, 3, 2, 2)[:, :1], False),
    "each second row": (torch.zeros(8, 3)[::2], False),
    "one row": (torch.zeros(8, 3)[::8], True),
    "nothing": (torch.zeros(0, 3), True),
    "a number": (torch.zeros(()), True),
    "expanded": (torch.zeros(1, 3).expand(4, 3), False),
}


@pytest.mark.parametrize("name", SHAPED)
def test_what_has_gaps(name: str) -> None:
    value, expected = SHAPED[name]
    assert is_gapless(value) is expected


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_are_laid_out_as_their_parameters(name: str) -> None:
    """As a compiled program or another rank may hand over a gradient with strides of its own."""
    made = [OPTIMIZERS[name]([nn.Parameter(torch.ones(4, 3))]) for _ in range(2)]
    for group in made[1].param_groups:
        group.update(foreach=False, fused=True)
    made[1].register_step_pre_hook(update._match_strides)
    for step in range(3):
        gradient = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).t()
        for optimizer in made:
            optimizer.param_groups[0]["params"][0].grad = gradient.clone()
            optimizer.step()
    plain, fused = (one.param_groups[0]["params"][0] for one in made)
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-6)


# --- late gradients


class Branches(nn.Module):
    """Its second branch is used from the third step on, and the third never."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        found: Tensor = self.one(x)
        return found + self.two(x) if self.seen > 2 else found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_may_get_their_first_gradient_late(name: str) -> None:
    said: list[str] = []
    assert_as_plain(a_task(model=Branches, optimizer=OPTIMIZERS[name]), say=said.append)
    about = [line for line in said if "optimizer=fused" in line]
    assert about == (["optimizer=fused: some parameters get their first gradient later than others, so such steps"
                      " update parameter by parameter"] if name == "SGD" else [])  # fmt: skip


def test_only_the_step_that_needs_it_goes_parameter_by_parameter() -> None:
    program = hotloop.lower(a_task(model=Branches, optimizer=OPTIMIZERS["SGD"]), FUSED)
    plain: list[int] = []
    program.optimizer.register_step_pre_hook(
        lambda optimizer, args, kwargs: None if optimizer.param_groups[0]["fused"] else plain.append(len(plain))
    )
    advance(program, 2)
    assert plain == []
    advance(program, 1)
    assert plain == [0]
    advance(program, 3)
    assert plain == [0] and program.optimizer.param_groups[0]["fused"] is True


def test_a_run_with_late_gradients_resumes_bitwise() -> None:
    task = a_task(model=Branches, optimizer=OPTIMIZERS["SGD"])
    whole = ended(task, FUSED)
    first = hotloop.lower(task, FUSED)
    advance(first, 2)
    then = hotloop.lower(task, FUSED)
    then.restore(first.state())
    advance(then, 5)
    assert all(value.equal(whole[name]) for name, value in then.model.named_parameters())


# --- counts of steps


def test_counts_that_a_constructor_made_are_where_the_kernel_reads_them() -> None:
    """Adagrad makes them before it is switched to its fused form: on the CPU, wherever the parameters are."""
    parts = update.apply_optimizer(LoweringContext.from_task(a_task(optimizer=OPTIMIZERS["Adagrad"]), FUSED))
    optimizer = parts.build_optimizer(parts.model.to("meta"))
    assert {state["step"].device.type for state in optimizer.state.values()} == {"meta"}


# --- sparse gradients


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Parameter(torch.randn(9, 4)), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.embedding(x, self.words, sparse=True).mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["plain SGD", "Adagrad"])
def test_sparse_gradients_of_a_function_are_taken_all_the_same(name: str, tmp_path) -> None:
    optimizer = {"plain SGD": lambda p: torch.optim.SGD(p, lr=0.1), **OPTIMIZERS}[name]
    data = (torch.randint(0, 9, (24, 6), generator=torch.Generator().manual_seed(2)), labelled()[1])
    task, said = a_task(model=Words, data=data, optimizer=optimizer), []  # type: ignore[var-annotated]
    assert_as_plain(task, say=said.append)
    assert [line for line in said if "sparse gradients" in line] == said[-1:]
    run = hotloop.fit(task, run=tmp_path / "run", plan="auto", device="cpu", progress=False)
    assert run.final is not None


class Turned(nn.Module):
    """The gradient of its weight comes transposed out of a compiled program."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight.t()[None] * x[:, :, None]).sum(1)


@pytest.mark.more
def test_gradients_out_of_a_compiled_program_are_laid_out_too() -> None:
    task = a_task(model=Turned, optimizer=OPTIMIZERS["Adam"])
    assert_as_plain(task, FUSED.with_axes(compile="forward"))
