"""What a Task promises of optimizers, groups, clipping and averages, against numbers by hand or by a plain loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotloop
from hotloop.errors import TaskError
from tests.support.programs import a_task, advance, assert_resumes, labelled, last_state, trained
from tests.support.tasks.layers_and_samples import two_layers

# --- optimizers and parameter groups ------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,
    "Adagrad": torch.optim.Adagrad,
    "Adam": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "Adam, fused": lambda parameters: torch.optim.Adam(parameters, fused=True),
    "Adam, foreach": lambda parameters: torch.optim.Adam(parameters, foreach=True),
    "Adam, rate in a tensor": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.01)),
    "AdamW": torch.optim.AdamW,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, max_iter=4, line_search_fn="strong_wolfe"),
    "Muon": lambda parameters: torch.optim.Muon(parameters.where(lambda name, value: value.ndim == 2)),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, centered=True, momentum=0.9),
    "Rprop": torch.optim.Rprop,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
}


def test_lbfgs_asks_for_the_loss_as_often_as_it_likes() -> None:
    program = hotloop.lower(a_task(optimizer=OPTIMIZERS["LBFGS"], data=labelled(), batch_size=24))
    model = nn.Linear(6, 3)
    model.load_state_dict(program.model.state_dict())
    plain = OPTIMIZERS["LBFGS"](list(model.parameters()))
    x, y = labelled()

    def closure() -> Tensor:
        plain.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        loss = program.step((x, y))
        assert loss.equal(plain.step(closure).detach())
    assert all(value.equal(program.state().parameters[name]) for name, value in model.named_parameters())


def test_lbfgs_sees_the_same_dropout_at_each_look() -> None:
    seen: list[Tensor] = []

    class Watched(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            seen.append(out.detach() != 0)
            return out

    def step(model: nn.Module, batch: Any) -> Tensor:
        return model(torch.ones(4, 6)).square().mean()

    task = a_task(model=lambda: nn.Sequential(Watched(), nn.Linear(6, 3)), step=step, optimizer=OPTIMIZERS["LBFGS"])
    program = hotloop.lower(task)
    program.step(labelled())
    first = len(seen)
    program.step(labelled())
    assert first > 2
    assert all(mask.equal(seen[0]) for mask in seen[:first])
    assert not seen[first].equal(seen[0])


class Slowing(torch.optim.SGD):
    """Keeps a count that belongs to no parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.state["steps"] = 0

    def step(self, closure: Any = None) -> None:
        self.state["steps"] += 1
        self.param_groups[0]["lr"] = 0.1 / self.state["steps"]
        super().step()


def test_an_optimizers_own_state_is_kept_too() -> None:
    state = assert_resumes(a_task(optimizer=Slowing))
    assert state.optimizer["own"] == {"steps": 7}


def frozen_first() -> nn.Module:
    model = two_layers()
    model[0].requires_grad_(False)
    return model


def test_parameter_groups_and_frozen_parameters() -> None:
    seen: list[hotloop.Parameters] = []

    def optimizer(parameters: hotloop.Parameters) -> torch.optim.Optimizer:
        seen.append(parameters)
        groups = [
            {"params": parameters.where(lambda name, value: value.ndim > 1), "weight_decay": 0.5},
            {"params": parameters.where(lambda name, value: name.endswith("bias")), "lr": 0.0},
        ]
        return torch.optim.SGD(groups, lr=0.1)

    task = a_task(model=frozen_first, optimizer=optimizer, average=0.9)
    program = hotloop.lower(task)
    assert list(seen[0].named) == ["2.weight", "2.bias"] and seen[0].model is program.model
    before = program.state()
    assert [group["params"] for group in before.optimizer["groups"]] == [["2.weight"], ["2.bias"]]
    assert list(before.average) == ["2.weight", "2.bias"]
    advance(program, 1)
    after = program.state().parameters
    moved = [name for name, value in before.parameters.items() if not value.equal(after[name])]
    assert moved == ["2.weight"]
    start = before.parameters["2.weight"].clone().requires_grad_()
    index = task.roles.order.epoch(0)[:5]
    x, y = labelled()
    first = F.linear(x[index], before.parameters["0.weight"], before.parameters["0.bias"]).tanh()
    F.cross_entropy(F.linear(first, start, before.parameters["2.bias"]), y[index]).backward()
    expected = start.detach() - 0.1 * (start.grad + 0.5 * start.detach())
    torch.testing.assert_close(after["2.weight"], expected)


def test_groups_resume_exactly() -> None:
    def optimizer(parameters: hotloop.Parameters) -> torch.optim.Optimizer:
        first, *others = parameters
        return torch.optim.Adam([{"params": others}, {"params": [first], "lr": 0.1, "betas": (0.5, 0.9)}])

    assert_resumes(a_task(model=two_layers, optimizer=optimizer))


def test_gradients_of_what_no_optimizer_holds_do_not_pile_up() -> None:
    task = a_task(model=two_layers, optimizer=lambda parameters: torch.optim.SGD(list(parameters)[2:], lr=0.0))
    program = hotloop.lower(task)
    norms = []
    for _ in range(3):
        program.step(labelled())
        norms.append(float(program.model[0].weight.grad.norm()))
    assert norms[0] > 0 and norms[1] == norms[0] == norms[2]


def test_gradients_of_what_is_thawed_later_do_not_pile_up() -> None:
    everything = lambda parameters: torch.optim.SGD(parameters.model.parameters(), lr=0.0)  # noqa: E731
    program = hotloop.lower(a_task(model=frozen_first, optimizer=everything))
    program.step(labelled())
    program.model.requires_grad_(True)
    norms = []
    for _ in range(3):
        program.step(labelled())
        norms.append(float(program.model[0].weight.grad.norm()))
    assert norms[0] > 0 and norms[1] == norms[0] == norms[2]


def test_what_a_callback_gives_to_the_optimizer_is_clipped_with_the_rest() -> None:
    program = hotloop.lower(a_task(model=frozen_first, clip_norm=0.01))
    program.schedule_recheck([print])
    program.advance(1)
    program.optimizer.add_param_group({"params": list(program.model[0].requires_grad_(True).parameters())})
    program.advance(1)
    gradients = [value.grad for value in program.model.parameters()]
    assert float(torch.nn.utils.get_total_norm(gradients)) == pytest.approx(0.01, rel=1e-3)


def test_parameters_from_elsewhere_are_refused() -> None:
    stray = nn.Parameter(torch.zeros(3))
    with pytest.raises(TaskError, match="not the model's"):
        hotloop.lower(a_task(optimizer=lambda parameters: torch.optim.SGD([*parameters, stray], lr=0.1)))


# --- clipping and averaging ---------------------------------------------------------------------------------


def one_step(**fields: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The change of the weights in one step of plain gradient descent, and the gradients of a plain loop."""
    task = a_task(model=two_layers, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1.0), **fields)
    program = hotloop.lower(task)
    before = program.state().parameters
    model = two_layers()
    model.load_state_dict(before)
    x, y = labelled()
    F.cross_entropy(100 * model(x), y).backward()
    gradients = {name: value.grad for name, value in model.named_parameters()}
    program.step((x, y))
    after = program.state().parameters
    return {name: before[name] - after[name] for name in before}, gradients


def steep(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(100 * output, target)


def test_gradients_are_scaled_down_to_the_norm() -> None:
    change, gradients = one_step(loss=steep, clip_norm=0.5)
    norm = math.sqrt(sum(float(value.square().sum()) for value in gradients.values()))
    assert norm > 5
    for name, value in change.items():
        torch.testing.assert_close(value, gradients[name] * 0.5 / norm, rtol=1e-4, atol=1e-6)


def test_small_gradients_are_not_scaled_up() -> None:
    change, gradients = one_step(loss=steep, clip_norm=1e6)
    for name, value in change.items():
        torch.testing.assert_close(value, gradients[name], rtol=1e-4, atol=1e-5)


def test_gradient_elements_are_cut() -> None:
    change, gradients = one_step(loss=steep, clip_value=0.01)
    assert max(float(value.abs().max()) for value in gradients.values()) > 0.1
    for name, value in change.items():
        torch.testing.assert_close(value, gradients[name].clamp(-0.01, 0.01), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(clip_norm=1.0), "some are sparse"),
        (dict(clip_value=1.0), "some are sparse"),
        (dict(clip_value=1.0, model=lambda: Phases()), "complex parameters"),
    ],
)
def test_what_torch_cannot_clip_is_told(fields: dict[str, Any], message: str) -> None:
    tokens = torch.arange(24 * 6).view(24, 6) % 11, torch.arange(24) % 3
    task = a_task(**dict(model=lambda: nn.EmbeddingBag(11, 3, sparse=True), data=tokens) | fields)
    with pytest.raises(TaskError, match=message):
        advance(hotloop.lower(task), 1)


class Phases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(6, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.turn).abs()


def test_the_average_follows_the_weights(tmp_path: Path) -> None:
    task = a_task(model=two_layers, average=0.7, validation=6)
    program = hotloop.lower(task)
    expected = {name: value.double() for name, value in program.state().parameters.items()}
    for _ in range(6):
        advance(program, 1)
        for name, value in program.state().parameters.items():
            expected[name] = 0.7 * expected[name] + 0.3 * value.double()
    for name, value in program.state().average.items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)


def test_evaluation_uses_the_average_and_training_does_not(tmp_path: Path) -> None:
    run = trained(a_task(model=two_layers, average=0.9, validation=6, epochs=2), tmp_path / "run")
    plain = trained(a_task(model=two_layers, validation=6, epochs=2), tmp_path / "plain")
    state, without = last_state(run), last_state(plain)
    assert all(value.equal(without.parameters[name]) for name, value in state.parameters.items())
    held_out = hotloop.lower(run.task).parts.splits.validation
    x, y = held_out.columns
    for weights, rows in ((state.average, run.epochs), (without.parameters, plain.epochs)):
        model = two_layers()
        model.load_state_dict(weights)
        with torch.no_grad():
            loss = F.cross_entropy(model(x), y)
        assert rows[-1]["validation_loss"] == pytest.approx(float(loss), rel=1e-5)
    assert run.epochs[-1]["validation_loss"] != plain.epochs[-1]["validation_loss"]
