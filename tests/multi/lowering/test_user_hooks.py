"""Ranks that share a gradient refuse hooks that would see its parts, and keep those around an update."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.distributed.world import World
from hotloop.errors import PlanError
from hotloop.plan import Plan
from tests.lowering.checks.test_user_hooks import clamp, small, with_clamps
from tests.support.processes.rank_processes import of_ranks
from tests.support.programs import a_task, advance, state_after

pytestmark = pytest.mark.more

WHOLE = ("data", "sharded", "towers", "tensor")
SHARING = (*WHOLE, "stages")


def network(*, hooked: bool = False) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    if hooked:
        model[2].weight.register_hook(small)  # type: ignore[union-attr]
    return model


class Halved(torch.autograd.Function):
    """Half the gradient, of a tensor as it is."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient / 2


def halve_by_hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient / 2)


BACKWARDS: dict[str, Callable[[nn.Module], Any]] = {
    "the torch.autograd.Function Halved": lambda m: m.register_forward_hook(lambda _, inputs, y: Halved.apply(y)),
    "a module's hook on its backward": lambda m: m.register_full_backward_pre_hook(lambda _, given: (given[0] / 2,)),
    "a hook on a tensor's gradient": lambda m: m.register_forward_hook(halve_by_hook),
}


def bent(name: str) -> hotloop.Task:
    def model() -> nn.Module:
        made = network()
        BACKWARDS[name](made[0])  # type: ignore[index]
        return made

    return a_task(model=model)


def late(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer whose factory hangs a hook on a parameter as the ranks hold it."""
    given = list(parameters)
    given[-1].register_hook(small)
    return torch.optim.SGD(given, lr=0.1)


def clamped() -> hotloop.Task:
    return with_clamps(lambda optimizer: optimizer.register_step_post_hook(clamp), model=network)


def refusal(task: hotloop.Task, parallel: str) -> str:
    try:
        advance(hotloop.lower(task, Plan(parallel=parallel, ranks=2)), 1)  # type: ignore[arg-type]
    except PlanError as error:
        return str(error)
    return ""


def looked_at(world: World) -> dict[str, Any]:
    hooked = a_task(model=lambda: network(hooked=True))
    found: dict[str, Any] = {name: refusal(hooked, name) for name in (*SHARING, "local")}
    found |= {f"{name} late": refusal(a_task(model=network, optimizer=late), name) for name in SHARING}
    for (
        name
    ) in WHOLE:  # a rank of stages has no memory for the others' parameters, which torch says where one is clamped
        program = hotloop.lower(clamped(), Plan(parallel=name, ranks=2))  # type: ignore[arg-type]
        advance(program, 3)
        found[f"{name} clamped"] = program.state().parameters
    for name in BACKWARDS:
        found[name] = refusal(bent(name), "stages")
        program = hotloop.lower(bent(name), Plan(parallel="data", ranks=2))
        advance(program, 3)
        found[f"{name} shared"] = program.state().parameters
    return found


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("hooked")
    return of_ranks(folder, Plan(parallel="data", ranks=2), looked_at)


@pytest.mark.parametrize("parallel", SHARING)
def test_hooks_on_gradients_are_refused_where_ranks_share_these(seen: list[dict[str, Any]], parallel: str) -> None:
    for rank in seen:
        assert rank[parallel].startswith(f"parallel={parallel}, and the parameter '2.weight' has a hook")
        assert rank[f"{parallel} late"].startswith(f"parallel={parallel}, and the parameter '2.bias' has a hook")


def test_ranks_that_train_by_themselves_have_gradients_of_their_own(seen: list[dict[str, Any]]) -> None:
    assert [rank["local"] for rank in seen] == ["", ""]


@pytest.mark.parametrize("parallel", WHOLE)
def test_hooks_around_an_update_are_called_on_ranks(seen: list[dict[str, Any]], parallel: str) -> None:
    expected = state_after(clamped(), 3).parameters
    assert not torch.allclose(expected["2.weight"], state_after(a_task(model=network), 3).parameters["2.weight"])
    for rank in seen:
        torch.testing.assert_close(rank[f"{parallel} clamped"], expected)


@pytest.mark.parametrize("name", BACKWARDS)
def test_a_backward_that_no_export_has_is_refused_by_stages_alone(seen: list[dict[str, Any]], name: str) -> None:
    expected = state_after(bent(name), 3).parameters
    assert not torch.allclose(expected["0.weight"], state_after(a_task(model=network), 3).parameters["0.weight"])
    for rank in seen:
        assert rank[name].startswith(f"parallel=stages, and backward calls {name}, which torch.export leaves out")
        torch.testing.assert_close(rank[f"{name} shared"], expected)
