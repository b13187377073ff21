"""What a compiled step takes for a batch like its own, in which containers batches may come, and what it leaves behind."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop import weighing
from hotloop.errors import PlanError
from hotloop.plan import Plan
from tests.cpu.programs import a_task, advance, labelled
from tests.cpu.test_graphs import on_a_stand_in  # noqa: F401  a fixture, for all tests here
from tests.cpu.test_hyper import assert_as_eager, halving, uncompiled  # noqa: F401  a fixture, for all tests here

pytestmark = pytest.mark.usefixtures("uncompiled")
WHOLE = [Plan(compile="step"), Plan(graphs="step")]


# ---------------------------------------------------------------- other batches


def by_key(model: nn.Module, batch: Any) -> Tensor:
    """Another loss for each kind of batch."""
    target = batch["label"] if "label" in batch else batch["rotation"]
    loss = nn.functional.cross_entropy(model(batch["x"]), target)
    return loss * (1 if "label" in batch else 2) * (3 if batch.get("hard") else 1)


OTHERS: dict[str, Callable[[Tensor, Tensor], dict[str, Any]]] = {
    "another key": lambda x, y: {"x": x, "rotation": y},
    "a flag": lambda x, y: {"x": x, "label": y, "hard": True},
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("plan", WHOLE, ids=Plan.brief)
def test_a_batch_with_other_keys_runs_eagerly(plan: Plan, kind: str) -> None:
    x, y = labelled()
    task = a_task(step=by_key, data={"x": x, "label": y}, batch_size=8)
    said: list[str] = []
    program, plain = hotloop.lower(task, plan, said.append), hotloop.lower(task)
    losses = {
        one: [float(one.step(make(x[:8], y[:8]))) for make in (lambda x, y: {"x": x, "label": y}, OTHERS[kind])]
        for one in (program, plain)
    }
    assert losses[program] == pytest.approx(losses[plain], rel=1e-5)
    assert (
        said[-1] == "a batch of other keys, shapes, dtypes or strides than the first: steps on such batches run eagerly"
    )


@pytest.mark.parametrize("kind", OTHERS)
def test_batches_with_several_keys_are_not_alike(kind: str) -> None:
    """So that nothing is compiled for them."""
    x, y = labelled()
    kinds = (lambda x, y: {"x": x, "label": y}, OTHERS[kind])
    batches = [kinds[number % 2](x[:8], y[:8]) for number in range(8)]
    program = hotloop.lower(
        a_task(step=by_key, data=torch.utils.data.DataLoader(batches, batch_size=None), batch_size=None)
    )
    assert not weighing._alike(program)


def mixed(model: nn.Module, batch: Any) -> Tensor:
    """The loss of two labels for each sample, as mixup has them."""
    x, y, other, share = batch
    loss = nn.functional.cross_entropy
    return share * loss(model(x), y) + (1 - share) * loss(model(x), other)


@pytest.mark.parametrize("plan", [*WHOLE, Plan(compile="forward")], ids=Plan.brief)
def test_a_first_batch_that_holds_a_tensor_twice_is_two_inputs(plan: Plan) -> None:
    x, y = labelled()
    whole, share = torch.ones(()), torch.tensor(0.3)
    first = y[:8]
    batches = [[x[:8], first, first, whole], [x[8:16], y[8:16], y[16:], share]]
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    task = a_task(step=mixed, data=loader, batch_size=None)
    losses = {}
    for one in (Plan(), plan):
        program = hotloop.lower(task, one)
        losses[one] = [float(program.step(batch)) for batch in batches]
    assert losses[plan] == pytest.approx(losses[Plan()], rel=1e-5)
    assert program.compiled_steps == 2


def test_a_step_that_writes_to_a_tensor_that_its_batch_holds_twice_is_refused() -> None:
    def clamping(model: nn.Module, batch: Any) -> Tensor:
        batch[1].clamp_(0, 1)
        return mixed(model, batch)

    x, y = labelled()
    loader = torch.utils.data.DataLoader([[x, y, y, torch.ones(())]], batch_size=None)
    with pytest.raises(PlanError, match="it writes to a tensor of the batch, of shape \\(24,\\), whose memory another"):
        hotloop.lower(a_task(step=clamping, data=loader, batch_size=None), Plan(compile="step"))


# ---------------------------------------------------------------- containers


class Encoded(UserDict):
    """As tokenizers return it: a mapping that is no dict, with its items as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["data"][name]
        except KeyError:
            raise AttributeError(name) from None


def of_transformers(items: dict[str, Tensor]) -> Any:
    return pytest.importorskip("transformers").BatchEncoding(items)


@pytest.mark.parametrize("container", [Encoded, of_transformers])
def test_batches_in_mappings_that_are_no_dicts_are_captured(container: Callable[[dict[str, Tensor]], Any]) -> None:
    def collate(samples: list[tuple[Tensor, Tensor]]) -> Any:
        x, y = (torch.stack(column) for column in zip(*samples, strict=True))
        return container({"x": x, "label": y})

    def step(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch.x), batch["label"])

    loader = torch.utils.data.DataLoader(list(zip(*labelled(), strict=True)), batch_size=5, collate_fn=collate)
    assert_as_eager(a_task(step=step, data=loader, batch_size=None, schedule=halving), Plan(compile="step"))


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize("plan", WHOLE, ids=Plan.brief)
def test_a_whole_step_keeps_no_gradients_of_eager_ones(plan: Plan) -> None:
    """Their memory would be taken for the whole run, and who looked at them would see those of another step."""
    program = hotloop.lower(a_task(), plan)

    def held() -> set[bool]:
        return {value.grad is not None for value in program.model.parameters()}

    assert held() == {False}  # none of what the step was made ready with
    advance(program, 5)
    assert held() == {True}  # the last batch of the epoch is incomplete, and its step eager
    advance(program, 1)
    assert held() == {False}
