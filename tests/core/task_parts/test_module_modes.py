"""Modules that stay in evaluation mode, and modules that merge weights when they are switched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotloop
from hotloop.core.task_parts import models
from hotloop.core.task_parts.models import evaluation_mode, modules_in_eval, set_training
from hotloop.plan import Plan
from hotloop.training.run import Run
from tests.support.plain_loops import assert_equal_weights, difference_of_resumed, fitted, plain_loop
from tests.support.programs import a_task, advance, labelled, last_state


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))


def frozen_norm() -> nn.Module:
    model = normed()
    model[1].eval().requires_grad_(False)  # type: ignore[index]
    return model


def nested() -> nn.Module:
    """A pretrained part in evaluation mode as a whole, such as `from_pretrained` returns it."""
    model = nn.Sequential(normed(), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[0].eval()
    return model


class Frozen(nn.Sequential):
    """Overrides train(): its norms stay in evaluation mode whoever asks."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.training = False
        return self


def overriding() -> nn.Module:
    return Frozen(*normed())  # type: ignore[misc]


def without_dropout() -> nn.Module:
    model = normed()
    model[2].eval()  # type: ignore[index]
    return model


FROZEN: dict[str, Callable[[], nn.Module]] = {
    "a norm": frozen_norm,
    "a part": nested,
    "a class that overrides train": overriding,
    "dropout": without_dropout,
}


@pytest.mark.few("a norm", "a part")
@pytest.mark.parametrize("name", FROZEN)
def test_modules_stay_in_the_mode_of_the_factory_and_the_run_resumes(tmp_path: Path, name: str) -> None:
    def make() -> hotloop.Task:
        return a_task(model=FROZEN[name], validation=labelled(), epochs=4)

    assert difference_of_resumed(make, tmp_path) == []
    state = last_state(Run.open(tmp_path / "parts"))
    counts = {key: int(value) for key, value in state.buffers.items() if key.endswith("num_batches_tracked")}
    expected = {"a norm": {"1": 0}, "a part": {"0.1": 0, "1": 20}, "dropout": {"1": 20}}
    expected["a class that overrides train"] = {"1": 0}
    assert counts == {f"{place}.num_batches_tracked": count for place, count in expected[name].items()}


@pytest.mark.few("{}", "{'accumulation': 2}")
@pytest.mark.parametrize("axes", [{}, {"accumulation": 2}, {"compile": "step"}, {"compile": "forward"}], ids=str)
def test_every_plan_keeps_a_frozen_norm_and_trains_as_the_plain_loop(axes: dict[str, Any]) -> None:
    def model() -> nn.Module:
        made = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        made[1].eval()
        return made

    task = a_task(model=model, epochs=2)
    program = hotloop.lower(task, Plan(**axes))
    advance(program, 10)
    for (name, value), expected in zip(program.model.named_parameters(), plain_loop(task).parameters(), strict=True):
        torch.testing.assert_close(value, expected, msg=name)
    assert int(program.model[1].num_batches_tracked) == 0  # type: ignore[index]
    program.close()


def test_ignoring_the_factorys_modes_would_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that `in_eval` guards against."""
    monkeypatch.setattr(models, "set_training", lambda model, in_eval: model.train())
    monkeypatch.setattr(hotloop.lowering.program, "set_training", lambda model, in_eval: model.train())
    program = hotloop.lower(a_task(model=frozen_norm))
    advance(program, 3)
    assert int(program.model[1].num_batches_tracked) == 3  # type: ignore[index]


def test_the_profile_and_the_replay_of_a_trouble_keep_them_too() -> None:
    program = hotloop.lower(a_task(model=frozen_norm))
    program.run_eagerly()
    batch = tuple(value[:5] for value in labelled())
    program.step(batch)
    program.prepare(batch, 5)
    assert int(program.model[1].num_batches_tracked) == 0  # type: ignore[index]


def said_of(model: Callable[[], nn.Module]) -> list[str]:
    lines: list[str] = []
    hotloop.lower(a_task(model=model), say=lines.append)
    return [line for line in lines if "mode" in line]


def test_what_stays_in_evaluation_mode_is_said() -> None:
    (line,) = said_of(frozen_norm)
    assert line == "'1' (BatchNorm1d) in evaluation mode throughout training, as the model factory returned the model"
    assert said_of(normed) == []


def test_a_model_in_evaluation_mode_as_a_whole_is_trained_as_a_whole_and_that_is_said() -> None:
    program = hotloop.lower(a_task(model=lambda: normed().eval()))
    advance(program, 2)
    assert all(module.training for module in program.model.modules())
    assert int(program.model[1].num_batches_tracked) == 2  # type: ignore[index]
    (line,) = said_of(lambda: normed().eval())
    assert line.startswith("the model factory returned the model in evaluation mode as a whole")


class Switch:
    """A callback that changes modes of the model that its factory made last."""

    def __init__(self, change: Callable[[nn.Module], Any], base: Callable[[], nn.Module] = normed) -> None:
        self.change, self.base = change, base

    def model(self) -> nn.Module:
        self.made = self.base()
        return self.made

    def __call__(self, view: hotloop.View) -> None:
        if view.event == "epoch" and view.epoch == 1:
            self.change(self.made)


SWITCHES: dict[str, tuple[Callable[[nn.Module], Any], int]] = {
    "single": (lambda model: model[1].eval(), 5),  # type: ignore[index]
    "whole": (lambda model: model.eval(), 20),
    "back and forth": (lambda model: model.eval().train(), 20),
}


@pytest.mark.few("back and forth")
@pytest.mark.parametrize("name", SWITCHES)
def test_a_callback_may_put_single_modules_into_evaluation_mode_for_good(tmp_path: Path, name: str) -> None:
    change, batches = SWITCHES[name]

    def make() -> hotloop.Task:
        switch = Switch(change)
        return a_task(model=switch.model, callbacks=[switch], epochs=4)

    assert difference_of_resumed(make, tmp_path, epoch=3) == []
    assert int(last_state(Run.open(tmp_path / "parts")).buffers["1.num_batches_tracked"]) == batches


def test_a_callback_that_evaluates_the_model_leaves_a_frozen_norm_frozen(tmp_path: Path) -> None:
    switch = Switch(lambda model: model.eval().train(), frozen_norm)
    run = fitted(a_task(model=switch.model, callbacks=[switch], epochs=3), tmp_path / "run")
    assert int(last_state(run).buffers["1.num_batches_tracked"]) == 0


# --- merging


class Merged(nn.Module):
    """A linear layer with a low-rank part, which `eval()` adds to the weight and `train()` takes away again."""

    def __init__(self, features: int = 6, outputs: int = 3, trained: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, features) * 0.3, requires_grad=trained)
        self.down = nn.Parameter(torch.randn(2, features) * 0.3)
        self.up = nn.Parameter(torch.zeros(outputs, 2))
        self.merged = False

    def train(self, mode: bool = True) -> Merged:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (-1 if mode else 1) * self.up.data @ self.down.data
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight if self.merged else self.weight + self.up @ self.down)


class Replaced(Merged):
    """The same, with another Parameter object for the merged weight."""

    def train(self, mode: bool = True) -> Replaced:
        nn.Module.train(self, mode)
        if mode == self.merged:
            change = (-1 if mode else 1) * self.up.data @ self.down.data
            self.weight = nn.Parameter(self.weight.data + change, requires_grad=self.weight.requires_grad)
            self.merged = not mode
        return self


class Buffered(nn.Module):
    """Computes a scale for evaluation from its weight, and keeps it in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("scale", torch.ones(()))

    def train(self, mode: bool = True) -> Buffered:
        super().train(mode)
        self.scale.fill_(1.0 if mode else float(self.layer.weight.detach().norm()))
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


MERGING: dict[str, Callable[[], nn.Module]] = {
    "low rank": Merged,
    "low rank, trained": lambda: Merged(trained=True),
    "in a row": lambda: nn.Sequential(Merged(6, 6), nn.Tanh(), Merged(6, 3)),
    "another object": Replaced,
    "a buffer": Buffered,
}


@pytest.mark.few("low rank-averaged", "low rank, trained-averaged", "another object-averaged")
@pytest.mark.parametrize("average", [None, 0.8], ids=["last", "averaged"])
@pytest.mark.parametrize("name", MERGING)
def test_one_loss_in_every_path_and_the_weights_of_a_plain_loop(
    tmp_path: Path, name: str, average: float | None
) -> None:
    def make() -> hotloop.Task:
        return a_task(model=MERGING[name], validation=labelled(), epochs=3, average=average)

    run = fitted(make(), tmp_path / "run", checkpoint_every="2")
    state, (x, y) = last_state(run), labelled()
    for value, expected in zip(state.parameters.values(), plain_loop(make()).parameters(), strict=True):
        assert torch.equal(value, expected), "a switch has changed what was trained on"
    reference = MERGING[name]()
    reference.load_state_dict({**state.parameters, **state.buffers, **state.average})
    loss = nn.CrossEntropyLoss()
    with torch.no_grad():
        expected = float(loss(reference.eval()(x), y))
    chosen: Any = {"task": make(), "weights": "last"}
    hotloop.export(run, tmp_path / "last.safetensors", **chosen)
    hotloop.export(run, tmp_path / "last.pt", **chosen)
    exported = MERGING[name]()
    exported.load_state_dict(torch.load(tmp_path / "last.pt", weights_only=True))
    with torch.no_grad():
        found = {
            "the run": run.epochs[-1]["validation_loss"],
            "evaluate": hotloop.evaluate(run, on="validation", **chosen).loss,
            "load_model": float(loss(hotloop.load_model(run, **chosen)(x), y)),
            "predict": float(loss(torch.as_tensor(hotloop.predict(run, x, **chosen)), y)),
            "export": float(loss(exported.eval()(x), y)),
        }
    assert found == pytest.approx(dict.fromkeys(found, expected), abs=1e-6)


@pytest.mark.few("low rank-averaged")
@pytest.mark.parametrize("average", [None, 0.8], ids=["last", "averaged"])
@pytest.mark.parametrize("name", MERGING)
def test_a_merging_module_resumes_to_the_last_bit(tmp_path: Path, name: str, average: float | None) -> None:
    def make() -> hotloop.Task:
        return a_task(model=MERGING[name], validation=labelled(), epochs=4, average=average)

    assert difference_of_resumed(make, tmp_path) == []


def test_the_order_of_average_and_eval_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that swapping averages in before `eval()` guards against."""
    task = a_task(model=Merged, validation=labelled(), epochs=3, average=0.8)
    right = fitted(task, tmp_path / "right").epochs[-1]["validation_loss"]
    program = hotloop.lowering.program.Program
    swap, inference = program._swap_average, program.inference

    @hotloop.lowering.program.contextmanager
    def wrong(self: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(program, "_swap_average", lambda self: None)
            with inference(self) as model:
                swap(self)
                try:
                    yield model
                finally:
                    swap(self)

    monkeypatch.setattr(program, "inference", wrong)
    assert abs(fitted(task, tmp_path / "wrong").epochs[-1]["validation_loss"] - right) > 1e-4


def test_switching_leaves_every_bit_as_it_was() -> None:
    model = nn.Sequential(Merged(6, 6), Replaced(6, 6), nn.BatchNorm1d(6))
    for layer in model[:2]:
        layer.up.data.normal_()
    model[2].eval()
    before = {name: (value, value.data_ptr(), value.detach().clone()) for name, value in model.named_parameters()}
    in_eval = modules_in_eval(model)
    for _ in range(3):
        set_training(model, in_eval)
        with evaluation_mode([model]):
            assert not any(module.training for module in model.modules()) and model[0].merged
    for name, value in model.named_parameters():
        object_, memory, bits = before[name]
        assert value is object_ and value.data_ptr() == memory and torch.equal(value, bits)
    assert [module.training for module in model] == [True, True, False]


def test_a_merged_module_from_the_factory_is_trained_unmerged(tmp_path: Path) -> None:
    run = fitted(a_task(model=lambda: Merged().eval(), validation=labelled(), epochs=2), tmp_path / "run")
    said = run.epochs[-1]["validation_loss"]
    model = hotloop.load_model(run, task=a_task(model=lambda: Merged().eval()), weights="last")
    x, y = labelled()
    with torch.no_grad():
        assert float(nn.CrossEntropyLoss()(model(x), y)) == pytest.approx(said, abs=1e-6)


def test_the_first_look_at_a_lazy_model_leaves_modes_and_weights_alone() -> None:
    task = a_task(model=lambda: nn.Sequential(nn.LazyLinear(8), nn.BatchNorm1d(8), Merged(8, 3)))
    program = hotloop.lower(task)
    advance(program, 5)
    assert_equal_weights(program.model, program.model)
    assert int(program.model[1].num_batches_tracked) == 5  # type: ignore[index]
