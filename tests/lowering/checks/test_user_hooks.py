"""Hooks of the user's own are called, or the plan that would pass them by is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import hotloop
from hotloop.errors import PlanError, TaskError
from hotloop.lowering.program import Program
from hotloop.lowering.steps import cuda_graph
from hotloop.lowering.steps.data_parallel import find_joint_ops
from hotloop.lowering.transforms.optimizer import describe_update_hook
from hotloop.plan import Plan
from tests.lowering.compile.test_optimizer_scalars import uncompiled  # noqa: F401  a fixture
from tests.support.fake_graph_recorder import FakeRecorder
from tests.support.programs import a_task, advance, state_after

GRAPHS = Plan(graphs="step")
WHOLE = [Plan(compile="step"), Plan(compile="package"), GRAPHS]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs on this CPU."""
    monkeypatch.setattr("hotloop.lowering.build._check_plan", lambda parts: None)
    monkeypatch.setattr(cuda_graph, "GraphRecorder", FakeRecorder)


# --- gradients


def small(gradient: Tensor) -> Tensor:
    return gradient.clamp(-1e-3, 1e-3)


def shrink(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.clamp_(-1e-3, 1e-3)


def linear(hang: Callable[[Tensor], Any]) -> nn.Module:
    model = nn.Linear(6, 3)
    hang(model.weight)
    return model


GRADIENTS: dict[str, Callable[[Tensor], Any]] = {
    "hook": lambda weight: weight.register_hook(small),
    "post": lambda weight: weight.register_post_accumulate_grad_hook(shrink),
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("plan", [*WHOLE, Plan(compile="forward"), Plan(accumulation=2)], ids=Plan.brief)
@pytest.mark.usefixtures("stand_in")
def test_hooks_on_gradients_are_refused_where_they_would_not_be_called_on_the_batch_s(name: str, plan: Plan) -> None:
    with pytest.raises(PlanError, match="the parameter 'weight' has a hook on its gradient, which would not") as caught:
        hotloop.lower(a_task(model=lambda: linear(GRADIENTS[name])), plan)
    assert "\n" not in str(caught.value)


def test_hooks_on_gradients_that_the_optimizers_factory_hangs_up_are_refused_too() -> None:
    def factory(parameters: Any) -> torch.optim.Optimizer:
        given = list(parameters)
        given[0].register_hook(small)
        return torch.optim.SGD(given, lr=0.1)

    with pytest.raises(PlanError, match="accumulation=2, and the parameter 'weight' has a hook"):
        hotloop.lower(a_task(optimizer=factory), Plan(accumulation=2))


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_module_with_hooks_on_gradients_can_t_be_copied(name: str) -> None:
    with pytest.raises(TaskError, match=r"the parameter 'weight' of the model has a hook .* which a copy"):
        hotloop.lower(a_task(model=linear(GRADIENTS[name])))


def test_a_hook_that_was_taken_off_again_is_none() -> None:
    model = linear(lambda weight: weight.register_hook(small).remove())
    advance(hotloop.lower(a_task(model=model), Plan(accumulation=2)), 1)


# --- the update


@torch.no_grad()
def clamp(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for value in optimizer.param_groups[0]["params"]:
        value.clamp_(-0.05, 0.05)


def replace_step(optimizer: torch.optim.Optimizer) -> None:
    step = optimizer.step

    @functools.wraps(step)
    def clamping(owner: torch.optim.Optimizer) -> None:
        step()
        clamp(owner)

    optimizer.step = clamping.__get__(optimizer)  # type: ignore[method-assign]


AROUND: dict[str, tuple[Callable[[torch.optim.Optimizer], Any], str]] = {
    "before": (lambda optimizer: optimizer.register_step_pre_hook(clamp), "a hook around SGD.step"),
    "after": (lambda optimizer: optimizer.register_step_post_hook(clamp), "a hook around SGD.step"),
    "replaced": (replace_step, "a function in the place of SGD.step"),
}


def with_clamps(hang: Callable[[torch.optim.Optimizer], Any], **fields: Any) -> hotloop.Task:
    def factory(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        hang(optimizer)
        return optimizer

    return a_task(optimizer=factory, **fields)


def constant(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


@pytest.mark.parametrize("schedule", [None, constant])
@pytest.mark.parametrize("name", AROUND)
@pytest.mark.parametrize("plan", WHOLE, ids=Plan.brief)
@pytest.mark.usefixtures("stand_in")
def test_what_stands_around_an_update_is_refused_where_it_would_not_be_called(
    plan: Plan, name: str, schedule: Any
) -> None:
    hang, says = AROUND[name]
    with pytest.raises(PlanError, match=says) as caught:
        hotloop.lower(with_clamps(hang, schedule=schedule), plan)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("plan", [Plan(compile="step")], ids=Plan.brief)
def test_a_hook_around_all_optimizers_counts(plan: Plan) -> None:
    handle = register_optimizer_step_post_hook(clamp)
    try:
        with pytest.raises(PlanError, match=r"a hook around SGD\.step"):
            hotloop.lower(a_task(), plan)
    finally:
        handle.remove()


@pytest.mark.parametrize("name", AROUND)
def test_an_update_outside_of_what_is_compiled_keeps_what_stands_around_it(name: str) -> None:
    task = with_clamps(AROUND[name][0], schedule=constant)
    program = hotloop.lower(task, Plan(compile="forward"))
    advance(program, 3)
    torch.testing.assert_close(program.state().parameters, state_after(task, 3).parameters)
    assert not torch.allclose(program.model.weight, state_after(a_task(), 3).parameters["weight"])  # type: ignore[arg-type]


class Decorated(torch.optim.SGD):
    """A class whose `step` has a decorator of the user's own."""

    def clamping(step: Any) -> Any:  # type: ignore[misc]
        @functools.wraps(step)
        def run(self: Any, closure: Any = None) -> None:
            step(self)
            clamp(self)

        return run

    @clamping
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for value in self.param_groups[0]["params"]:
            value.sub_(value.grad, alpha=0.1)


def bending(model: nn.Module) -> nn.Module:
    """Hooks of modules: on what goes in and out, forward and backward."""
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
    model.register_forward_hook(lambda module, inputs, output: output * 3)
    model.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 0.5,))
    model[1].register_full_backward_hook(lambda module, into, out: (into[0] * 0.25,))  # type: ignore[index,operator]
    return model


def test_hooks_of_modules_and_decorators_of_a_class_are_part_of_what_is_compiled() -> None:
    plain = lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))  # noqa: E731
    task = a_task(model=lambda: bending(plain()), optimizer=lambda p: Decorated(p, lr=0.1))
    program = hotloop.lower(task, Plan(compile="step"))
    advance(program, 3)
    torch.testing.assert_close(program.state().parameters, state_after(task, 3).parameters)
    without = a_task(model=plain, optimizer=lambda p: Decorated(p, lr=0.1))
    assert not torch.allclose(program.model[0].weight, state_after(without, 3).parameters["0.weight"])  # type: ignore[index,union-attr,arg-type]


def test_hotloops_own_hooks_of_fused_updates_are_none_of_the_users() -> None:
    advance(hotloop.lower(a_task(), Plan(compile="step", optimizer="fused")), 3)


LATER: dict[str, Callable[[Program], Any]] = {
    "a gradient's": lambda program: program.model.weight.register_hook(small),  # type: ignore[operator,union-attr]
    "an update's": lambda program: program.optimizer.register_step_post_hook(clamp),
}


@pytest.mark.few("a gradient's-compile=step", "an update's-graphs=step")
@pytest.mark.usefixtures("stand_in", "uncompiled")
@pytest.mark.parametrize("plan", [Plan(compile="step"), GRAPHS], ids=Plan.brief)
@pytest.mark.parametrize("name", LATER)
def test_a_hook_that_a_callback_hangs_up_is_called_from_the_next_epoch_on(name: str, plan: Plan) -> None:
    programs = [hotloop.lower(a_task(batch_size=6), one) for one in (plan, Plan())]
    for program in programs:
        advance(program, 4)  # an epoch
        program.schedule_recheck([print])
        LATER[name](program)
        advance(program, 4)
    found, expected = (program.state().parameters for program in programs)
    torch.testing.assert_close(found, expected)


# --- not a user's own


def test_an_optimizer_that_never_got_torch_s_own_fields_has_no_hooks() -> None:
    class Bare(torch.optim.SGD):
        """A wrapper, say, that leaves the constructor of its base out."""

        def __init__(self) -> None:
            pass

    assert describe_update_hook(Bare()) is None


def test_what_torch_counts_steps_with_is_no_hook_of_the_user_s() -> None:
    handle = register_optimizer_step_post_hook(torch.profiler._optimizer_post_hook)
    try:
        assert describe_update_hook(torch.optim.SGD(nn.Linear(2, 2).parameters())) is None
    finally:
        handle.remove()


@torch.library.custom_op("hotloop_tests::halved", mutates_args=())
def halved(x: Tensor) -> Tensor:
    """x / 2, as an operator of a library's."""
    return x / 2


halved.register_fake(torch.empty_like)
halved.register_autograd(lambda context, gradient: gradient / 2)


class Halving(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return halved(super().forward(x))


def test_the_backward_of_a_library_s_operator_is_one_that_an_export_has() -> None:
    parts = hotloop.lower(a_task(model=lambda: Halving(6, 3)), Plan(device="cpu")).parts
    assert find_joint_ops(parts).scripted == ""
