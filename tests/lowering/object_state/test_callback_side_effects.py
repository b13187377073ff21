"""What callbacks change or replace is seen at the next epoch, compiled or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotloop
from hotloop.core.callback import has_user_callbacks
from hotloop.errors import TaskError
from hotloop.lowering.steps import cuda_graph
from hotloop.plan import Plan
from tests.lowering.compile.test_optimizer_scalars import uncompiled  # noqa: F401  a fixture
from tests.support.eager_comparison import STEP
from tests.support.fake_graph_recorder import FakeRecorder
from tests.support.programs import a_task, last_state, trained

BETA, SHARE = {"share": 0.0}, torch.zeros(())


def warming(model: nn.Module, batch: Any) -> Tensor:
    output = model(batch[0])
    return F.cross_entropy(output, batch[1]) + (BETA["share"] + SHARE) * output.square().mean()


def warm_number(view: Any) -> None:
    BETA["share"] = min(1.0, view.epoch / 2)


def warm_tensor(view: Any) -> None:
    SHARE.fill_(min(1.0, view.epoch / 2))


def schedule_dropout(holder: list[nn.Module]) -> Callable[[Any], None]:
    def callback(view: Any) -> None:
        for model in holder:
            model.get_submodule("1").p = min(0.5, view.epoch / 4)  # type: ignore[assignment]

    return callback


def with_dropout(holder: list[nn.Module]) -> nn.Module:
    holder.append(nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.0)))
    return holder[-1]


HOLDER: list[nn.Module] = []
CHANGING = {
    "number": {"step": warming, "callbacks": [warm_number]},
    "tensor": {"step": warming, "callbacks": [warm_tensor]},
    "attribute": {"model": partial(with_dropout, HOLDER), "callbacks": [schedule_dropout(HOLDER)]},
}


@pytest.fixture
def at_first() -> Any:
    def put_back() -> None:
        BETA["share"] = 0.0
        SHARE.zero_()

    put_back()
    yield put_back
    put_back()


@pytest.mark.few("tensor-compile=step", "attribute-graphs=step")
@pytest.mark.parametrize("plan", [STEP, Plan(compile="forward"), Plan(graphs="step")], ids=Plan.brief)
@pytest.mark.parametrize("name", CHANGING)
def test_what_a_callback_changes_is_seen_at_the_next_epoch_and_trained_eagerly(
    name: str, plan: Plan, tmp_path: Path, at_first: Callable[[], None], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("hotloop.lowering.build._check_plan", lambda parts: None)
    monkeypatch.setattr(cuda_graph, "GraphRecorder", FakeRecorder)
    expected = last_state(trained(a_task(epochs=3, **CHANGING[name]), tmp_path / "eager"))
    at_first()
    run = trained(a_task(epochs=3, **CHANGING[name]), tmp_path / "compiled", plan=plan, progress=True)
    torch.testing.assert_close(last_state(run).parameters, expected.parameters)
    assert " ".join(capsys.readouterr().err.split()).count("a callback changes what the step does") == 1


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(x))


class Replacing:
    """At the end of each epoch, puts other memory in the place of something that the step works on."""

    def __init__(self, what: Callable[[Any], None], of: str) -> None:
        self.what, self.of = what, of
        self.made: dict[str, list[Any]] = {"model": [], "optimizer": []}

    def model(self) -> nn.Module:
        self.made["model"].append(Normed())
        return self.made["model"][-1]

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        self.made["optimizer"].append(torch.optim.SGD(parameters, lr=0.1, momentum=0.9))
        return self.made["optimizer"][-1]

    def __call__(self, view: Any) -> None:
        for one in self.made[self.of] if view.event == "epoch" else ():
            self.what(one)

    def task(self) -> hotloop.Task:
        fields = {"model": self.model, "optimizer": self.optimizer, "callbacks": [self]}
        return a_task(batch_size=6, epochs=3, **fields)  # all batches are full, so that no eager step stands between


def other_data(model: Normed) -> None:
    for value in model.parameters():
        value.data = value.data.clamp(-0.1, 0.1)


def another_buffer(model: Normed) -> None:
    model.norm.running_mean = model.norm.running_mean * 0.5  # type: ignore[operator]


def other_parameters(model: Normed) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def another_state(optimizer: torch.optim.Optimizer) -> None:
    saved = optimizer.state_dict()
    for state in saved["state"].values():
        state["momentum_buffer"] = state["momentum_buffer"] * 0.5
    optimizer.load_state_dict(saved)


def another_order(optimizer: torch.optim.Optimizer) -> None:
    """Of the norm's weight and bias, which have one shape."""
    saved = optimizer.state_dict()
    items = list(saved["state"].items())
    saved["state"] = dict([*items[1::-1], *items[2:]])
    optimizer.load_state_dict(saved)


def freezing(model: Normed) -> None:
    model.layer.bias.requires_grad_(False)


@pytest.mark.more
@pytest.mark.few("another_state-optimizer-compile=step")
@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize(
    "plan",
    [STEP, *(pytest.param(one, marks=pytest.mark.more) for one in (Plan(compile="forward"), Plan(graphs="step")))],
    ids=Plan.brief,
)
@pytest.mark.parametrize(
    ("what", "of"),
    [
        (other_data, "model"),
        (another_buffer, "model"),
        (freezing, "model"),
        (another_state, "optimizer"),
        (another_order, "optimizer"),
    ],
)
def test_what_a_callback_replaces_is_what_trains_from_there_on(
    what: Any, of: str, plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotloop.lowering.build._check_plan", lambda parts: None)
    monkeypatch.setattr(cuda_graph, "GraphRecorder", FakeRecorder)
    expected = last_state(trained(Replacing(what, of).task(), tmp_path / "eager"))
    found = last_state(trained(Replacing(what, of).task(), tmp_path / "compiled", plan=plan))
    torch.testing.assert_close(found.parameters, expected.parameters)
    torch.testing.assert_close(found.buffers, expected.buffers)
    torch.testing.assert_close(found.optimizer["state"], expected.optimizer["state"])


@pytest.mark.usefixtures("uncompiled")
def test_parameters_that_are_not_the_optimizer_s_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="a parameter that is not the model's"):
        trained(Replacing(other_parameters, "model").task(), tmp_path / "run", plan=STEP)


def test_a_callback_that_changes_nothing_leaves_the_step_compiled(tmp_path: Path, capsys: Any) -> None:
    seen: list[Any] = []
    trained(a_task(epochs=3, callbacks=[seen.append]), tmp_path / "run", plan=STEP, progress=True)
    assert seen and "a callback changes" not in capsys.readouterr().err


def test_without_callbacks_of_the_user_s_nobody_looks_again() -> None:
    program = hotloop.lower(a_task(), STEP)
    assert program.recheck_s == 0 < program._step.recheck_s
    program.schedule_recheck([])
    assert not program._step._recheck.due  # type: ignore[attr-defined]
    program.schedule_recheck([Reading()])
    assert not program._step._recheck.due  # type: ignore[attr-defined]
    program.schedule_recheck([Reading(), print])
    assert program._step._recheck.due  # type: ignore[attr-defined]


class Reading:
    """A callback that says of itself that it changes nothing."""

    read_only = True

    def __call__(self, view: hotloop.View) -> None:
        pass


@pytest.mark.parametrize(("word", "looked"), [(True, False), (False, True), ("", True)])
def test_only_who_says_so_is_taken_at_his_word(word: object, looked: bool) -> None:
    def callback(view: hotloop.View) -> None:
        pass

    callback.read_only = word  # type: ignore[attr-defined]
    assert has_user_callbacks([callback]) is looked
