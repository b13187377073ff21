"""What a compiled step takes for a batch or a state like its own, in which containers batches come, and what it leaves."""

from __future__ import annotations

import io
import logging
from collections import UserDict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.core.state import State
from hotloop.errors import PlanError
from hotloop.lowering.compile import symbolic_numbers
from hotloop.lowering.compile.capture import CapturedStep, capture_step
from hotloop.lowering.steps import compiled_step
from hotloop.plan import Plan
from tests.lowering.compile.test_optimizer_scalars import assert_as_eager, halving, uncompiled  # noqa: F401  a fixture, for all tests here
from tests.lowering.steps.test_cuda_graph import on_a_stand_in  # noqa: F401  a fixture, for all tests here
from tests.support.eager_comparison import STEP, Layer, assert_trains_as_eagerly, refusal
from tests.support.programs import a_task, advance, labelled, state_after, through_file

pytestmark = pytest.mark.usefixtures("uncompiled")
WHOLE = [Plan(compile="step"), Plan(graphs="step")]


# ---------------------------------------------------------------- other batches


def by_key(model: nn.Module, batch: Any) -> Tensor:
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
    with pytest.raises(
        PlanError,
        match="the step writes to a tensor of the batch, of shape \\(24,\\), which shares memory with another",
    ):
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


@pytest.mark.parametrize("container", [Encoded, pytest.param(of_transformers, marks=pytest.mark.more)])
def test_batches_in_mappings_that_are_no_dicts_are_captured(container: Callable[[dict[str, Tensor]], Any]) -> None:
    def collate(samples: list[tuple[Tensor, Tensor]]) -> Any:
        x, y = (torch.stack(column) for column in zip(*samples, strict=True))
        return container({"x": x, "label": y})

    def step(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch.x), batch["label"])

    loader = torch.utils.data.DataLoader(list(zip(*labelled(), strict=True)), batch_size=5, collate_fn=collate)
    assert_as_eager(a_task(step=step, data=loader, batch_size=None, schedule=halving), Plan(compile="step"))


# ---------------------------------------------------------------- the optimizer's state


class Backwards(torch.optim.Optimizer):
    """Momentum, of the last parameter first."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for value in reversed(group["params"]):
                state = self.state[value]
                if not state:
                    state["momentum"] = torch.zeros_like(value)
                state["momentum"].mul_(0.9).add_(value.grad)
                value.sub_(state["momentum"], alpha=group["lr"])


def equal_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), nn.Linear(6, 6, bias=False))


def assert_goes_on(
    task: hotloop.Task, before: Plan, plan: Plan, change: Callable[[State], None] = lambda state: None
) -> None:
    """A training that was begun under one plan goes on compiled under another, as if under the baseline throughout."""
    begun, program = hotloop.lower(task, before), hotloop.lower(task, plan)
    advance(begun, 3)
    change(state := begun.state())
    program.restore(through_file(state))
    advance(program, 5)
    assert program.compiled_steps == 5
    expected = state_after(task, 8).parameters
    torch.testing.assert_close(program.state().parameters, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("plan", WHOLE, ids=Plan.brief)
def test_each_parameter_keeps_its_own_state_whatever_the_order_in_which_it_was_made(plan: Plan) -> None:
    assert_goes_on(a_task(model=equal_layers, optimizer=Backwards, batch_size=6), plan, plan)


@pytest.mark.parametrize("plan", WHOLE, ids=Plan.brief)
def test_a_state_whose_keys_were_made_in_another_order_is_compiled_too(plan: Plan) -> None:
    task = a_task(optimizer=lambda p: torch.optim.Adam(p, lr=0.01), batch_size=6)

    def reverse_keys(state: State) -> None:
        for values in state.optimizer["state"].values():
            pairs = list(values.items())[::-1]
            values.clear()
            values.update(pairs)

    assert_goes_on(task, Plan(), plan, reverse_keys)


@pytest.mark.parametrize("plan", WHOLE, ids=Plan.brief)
def test_a_state_that_the_step_was_not_compiled_for_is_told_and_trained_eagerly(plan: Plan) -> None:
    said: list[str] = []
    task = a_task(optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), batch_size=6)
    program = hotloop.lower(task, plan, said.append)
    advance(program, 3)
    assert not [line for line in said if "eagerly" in line]  # though its first step made the state
    state = program.state()
    state.optimizer["state"]["bias"]["more"] = torch.zeros(3)
    program.restore(state)
    advance(program, 4)
    told = "there is state/bias/more, which the compiled step doesn't have: while that is so, steps run eagerly"
    assert [line for line in said if "eagerly" in line] == [told]
    assert program.compiled_steps == 2
    torch.testing.assert_close(program.state().parameters, state_after(task, 7).parameters)


# ---------------------------------------------------------------- gradients


class Summed(nn.Module):
    """A linear layer whose weight is a sum: both terms get the same gradient, or one the other's, turned."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned = turned
        self.one = nn.Parameter(torch.randn(3, 6))
        self.other = nn.Parameter(torch.randn(6, 3) if turned else torch.randn(3, 6))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.one + (self.other.T if self.turned else self.other))


@pytest.mark.parametrize("turned", [False, True], ids=["equal", "turned"])
@pytest.mark.parametrize("plan", [*WHOLE, Plan(compile="forward")], ids=Plan.brief)
def test_a_gradient_of_two_parameters_is_clipped_once_for_each(plan: Plan, turned: bool) -> None:
    task = a_task(model=partial(Summed, turned), clip_norm=0.1)
    program = hotloop.lower(task, plan)
    advance(program, 7)
    assert program.compiled_steps
    torch.testing.assert_close(program.state().parameters, state_after(task, 7).parameters)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = self.again = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.again(self.first(x).relu()))  # type: ignore[no-any-return]


def test_a_layer_of_two_names_keeps_its_parameters() -> None:
    program = hotloop.lower(a_task(model=Twice), STEP)
    own = dict(program.model.named_parameters(remove_duplicate=False))
    assert own["again.0.weight"] is own["first.0.weight"] and isinstance(own["first.0.weight"], nn.Parameter)
    assert_trains_as_eagerly(model=Twice)


def test_equal_gradients_that_a_compiler_makes_one_are_clipped_once_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def sharing(captured: CapturedStep, *others: Any) -> Callable[[list[Tensor]], Any]:
        def run(flat: list[Tensor]) -> list[Tensor]:
            loss, one, other = captured.graph(*flat)
            assert one.equal(other)
            return [loss, one, one]

        return run

    monkeypatch.setattr(compiled_step, "_compile", sharing)
    task = a_task(model=partial(Summed, False), clip_norm=0.1)
    program = hotloop.lower(task, Plan(compile="forward"))
    advance(program, 7)
    torch.testing.assert_close(program.state().parameters, state_after(task, 7).parameters)


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


def test_what_torch_logs_of_a_step_that_it_cannot_follow_is_told_in_a_line_instead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = torch.library.Library("hotloop_tests", "FRAGMENT")  # lives as long as this test
    library.define("unknown_shape(Tensor x) -> Tensor")
    library.impl("unknown_shape", torch.clone, "CPU")
    library.impl("unknown_shape", _refusing, "Meta")
    written = io.StringIO()
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(logger, "handlers", [logging.StreamHandler(written)])
    assert "only on weekdays" in refusal(model=_Unknown)
    assert not written.getvalue()


def _refusing(x: Tensor) -> Tensor:
    raise RuntimeError("only on weekdays")


class _Unknown(Layer):
    """Has an operation whose result torch can't tell the shape of, and logs that with a traceback."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.ops.hotloop_tests.unknown_shape(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.NAdam, torch.optim.Adamax])
def test_powers_that_nobody_asks_about_are_captured_as_torch_does(
    optimizer: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    power = torch.SymFloat.__pow__
    batch = tuple(value[:5] for value in labelled())
    codes, taken = [], []
    unasked = symbolic_numbers._skip_guard
    monkeypatch.setattr(symbolic_numbers, "_skip_guard", lambda asking: taken.append(asking) or unasked(asking))
    for ask in (symbolic_numbers.skip_power_guards, nullcontext):
        monkeypatch.setattr(symbolic_numbers, "skip_power_guards", ask)
        program = hotloop.lower(a_task(optimizer=optimizer), Plan())
        advance(program, 1)
        codes.append(capture_step(program._step, batch, 5, {}, whole=True).graph.code)
    assert codes[0] == codes[1] and "pow" in codes[0] and set(taken) == {power}
    assert torch.SymFloat.__pow__ is power
