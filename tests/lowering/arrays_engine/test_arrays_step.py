"""The plan `engine=arrays`: a Task's model of known layers, trained without autograd, in step with torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.arrays import dense
from hotloop.core.state import State, differing_paths
from hotloop.errors import DataError, HotloopError, PlanError, TaskError
from hotloop.lowering.arrays_engine.arrays_step import ArraysStep
from hotloop.parity.proof import prove_plans
from hotloop.plan import BASELINE, Plan
from tests.lowering.test_cpu_plans import STEPS, after, assert_equal_within_rounding
from tests.support.killed_training import train
from tests.support.processes.resumed_training import disagreements
from tests.support.programs import a_task, advance, labelled, through_file
from tests.support.tasks.model_families import CLASSES, family

ARRAYS = Plan(engine="arrays")


def everything() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, groups=1, bias=False),
        nn.BatchNorm2d(8),
        nn.LeakyReLU(0.1),
        nn.Sequential(nn.Conv2d(8, 8, (3, 2), stride=(1, 2), padding=1, dilation=(1, 2), groups=4), nn.GELU()),
        nn.MaxPool2d(2, padding=1),
        nn.SiLU(),
        nn.Dropout(0.2),
        nn.AvgPool2d(2),
        nn.ELU(),
        nn.Identity(),
        nn.Flatten(),
        nn.LazyLinear(12),
        nn.LayerNorm(12),
        nn.Softplus(),
        nn.Linear(12, 9),
        nn.BatchNorm1d(9),
        nn.Tanh(),
        nn.Linear(9, 8, bias=False),
        nn.Sigmoid(),
        nn.Linear(8, CLASSES),
    )


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


def word_data() -> tuple[Tensor, Tensor]:
    x = torch.randint(0, 9, (24, 3), generator=torch.Generator().manual_seed(1))
    return x, x[:, 0] % 3


def pairs(kind: str) -> tuple[Tensor, Tensor]:
    x, _ = labelled()
    return (x, x[:, :2] * 2) if kind == "numbers" else (x, (x[:, :2] > 0).float())


def with_optimizer(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[], hotloop.Task]:
    return lambda: a_task(optimizer=lambda p: make(p, **options))


def grouped(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [
            {"params": parameters.where(lambda name, value: value.ndim > 1), "weight_decay": 0.1, "lr": 0.02},
            {"params": parameters.where(lambda name, value: value.ndim == 1)},
        ]
    )


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
    model[0].weight.requires_grad_(False)
    return model


def tied() -> nn.Module:
    one, other = nn.Linear(6, 6), nn.Linear(6, 6)
    other.weight = one.weight
    return nn.Sequential(one, other, nn.Linear(6, 3))


def twice() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(6, 3))


TASKS: dict[str, Callable[[], hotloop.Task]] = {
    "mlp": lambda: family("mlp"),
    "cnn": lambda: family("cnn"),
    "everything": lambda: family("cnn", model=everything),
    "global average": lambda: family(
        "cnn", model=lambda: nn.Sequential(nn.Conv2d(3, CLASSES, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    ),
    "one layer": a_task,
    "words": lambda: a_task(model=words, data=word_data()),
    "squares": lambda: a_task(model=lambda: nn.Linear(6, 2), loss=nn.MSELoss(), data=pairs("numbers")),
    "yes or no": lambda: a_task(model=lambda: nn.Linear(6, 2), loss=nn.BCEWithLogitsLoss(), data=pairs("bits")),
    "a function": lambda: a_task(loss=nn.functional.cross_entropy),
    "clipped": lambda: a_task(clip_norm=0.1, clip_value=0.04),
    "averaged": lambda: a_task(average=0.9, schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 2)),
    "groups": lambda: a_task(optimizer=grouped),
    "frozen": lambda: a_task(model=frozen),
    "tied": lambda: a_task(model=tied),
    "twice": lambda: a_task(model=twice),
    "momentum": with_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": with_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": with_optimizer(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.2),
    "rmsprop": with_optimizer(torch.optim.RMSprop, lr=0.01),
    "adadelta": with_optimizer(torch.optim.Adadelta),
    "adam": with_optimizer(torch.optim.Adam, lr=0.01, weight_decay=0.01),
    "decoupled": with_optimizer(torch.optim.Adam, lr=0.01, weight_decay=0.01, decoupled_weight_decay=True),
}


@pytest.mark.parametrize("name", TASKS)
def test_it_trains_as_the_baseline_does_and_its_state_round_trips(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = after(hotloop.lower(TASKS[name]()), STEPS)
    program = hotloop.lower(TASKS[name](), ARRAYS)
    with monkeypatch.context() as patch:  # autograd has no part in it
        patch.setattr(Tensor, "backward", lambda *_: pytest.fail("backward was called"))
        patch.setattr(torch.optim.Optimizer, "step", lambda *_: pytest.fail("torch's update was called"))
        patch.setattr(type(program.optimizer), "step", lambda *_: pytest.fail("torch's update was called"))
        patch.setattr(type(program.model), "forward", lambda *_: pytest.fail("torch's forward was called"))
        state = after(program, STEPS)
    same(state, expected)

    program.restore(through_file(state))
    assert differing_paths(program.state(), state) == []
    further = after(program, 3)
    under_the_baseline = hotloop.lower(TASKS[name]())
    under_the_baseline.restore(state)
    assert differing_paths(under_the_baseline.state(), state) == []
    same(further, after(under_the_baseline, 3))


def same(state: State, expected: State) -> None:
    """Within rounding; and made of the same things, such as what the optimizer remembers."""
    if not expected.schedule:
        state, expected = (with_a_schedule(one) for one in (state, expected))
    assert_equal_within_rounding(state, expected)
    assert state.optimizer["groups"] == expected.optimizer["groups"]
    assert shapes(state) == shapes(expected)


def with_a_schedule(state: State) -> State:
    return State(**{**vars(state), "schedule": {"last_epoch": 0}})


def shapes(state: State) -> dict[str, Any]:
    found = state.optimizer["state"]
    return {
        name: {key: (value.shape, value.dtype) for key, value in kept.items() if isinstance(value, Tensor)}
        for name, kept in found.items()
        if kept
    }


def test_plans_can_be_switched_within_a_run() -> None:
    state = None
    for plan, steps in ((BASELINE, 6), (ARRAYS, 7), (Plan(compile="none", optimizer="foreach"), STEPS - 13)):
        program = hotloop.lower(family("cnn"), plan)
        if state is not None:
            program.restore(state)
        state = after(program, steps)
    assert state is not None
    assert_equal_within_rounding(state, after(hotloop.lower(family("cnn")), STEPS))


def test_killed_and_gone_on_with_it_ends_bitwise_the_same(tmp_path: Path) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(whole, family("cnn", epochs=3), plan=ARRAYS)
    for until in (3, 9):
        assert train(run, family("cnn", epochs=3), plan=ARRAYS, until=until) is None
    train(run, family("cnn", epochs=3), plan=ARRAYS)
    assert disagreements(whole, run) == []


@pytest.mark.more
def test_the_trained_weights_are_in_the_torch_model(tmp_path: Path) -> None:
    run = hotloop.fit(family("cnn"), run=tmp_path / "run", device="cpu", plan="arrays", progress=False)
    assert "arrays" in (run.path / "plan.toml").read_text()
    expected = hotloop.fit(family("cnn"), run=tmp_path / "other", device="cpu", plan="baseline", progress=False)
    model, other = hotloop.load_model(run), hotloop.load_model(expected)
    x = torch.randn(3, 3, 6, 6)
    torch.testing.assert_close(model(x), other(x), rtol=1e-4, atol=1e-4)


@pytest.mark.more
def test_check_finds_it_equal_and_sees_a_sign_turned_round(monkeypatch: pytest.MonkeyPatch) -> None:
    task = family("cnn")
    assert [one.parity for one in prove_plans(task, [ARRAYS])] == ["fp32-equivalent"]
    right = dense.BatchNorm.backward
    monkeypatch.setattr(dense.BatchNorm, "backward", lambda self, dy: -right(self, dy))
    assert [one.parity for one in prove_plans(task, [ARRAYS])] == ["broken"]


def test_an_evaluation_with_averaged_weights_in_between_changes_nothing() -> None:
    program = hotloop.lower(family("cnn"), ARRAYS)
    for _ in range(3):
        advance(program, 2)
        with program.inference() as model:
            model(torch.zeros(2, 3, 6, 6))
    assert_equal_within_rounding(program.state(), after(hotloop.lower(family("cnn")), 6))


@pytest.mark.filterwarnings("error")
def test_infinity_comes_without_a_warning() -> None:
    program = hotloop.lower(a_task(optimizer=lambda p: torch.optim.SGD(p, lr=1e38)), ARRAYS)
    advance(program, 3)
    assert not torch.tensor(program.read_sums()["loss"]).isfinite()


def test_it_runs_in_torch_where_a_replay_wants_to_see_modules() -> None:
    program = hotloop.lower(family("cnn"), ARRAYS)
    advance(program, 3)
    seen: list[int] = []
    program.model.register_forward_hook(lambda *_: seen.append(1))
    program.run_eagerly()
    advance(program, 4)
    assert len(seen) == 4
    assert_equal_within_rounding(program.state(), after(hotloop.lower(family("cnn")), 7))


# --- what can't be written out


class MyLinear(nn.Linear):
    pass


def hooked() -> nn.Module:
    model = nn.Linear(6, 3)
    model.register_forward_hook(lambda module, x, y: 2 * y)
    return model


def hooked_optimizer(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def a_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


IMAGES = (torch.randn(8, 1, 6, 6), torch.arange(8) % 3)


def images(*modules: nn.Module) -> dict[str, Any]:
    return {"model": lambda: nn.Sequential(*modules, nn.Flatten(), nn.LazyLinear(3)), "data": IMAGES}


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a subclass": ({"model": lambda: nn.Sequential(nn.ReLU(), MyLinear(6, 3))}, ("'1' (MyLinear)",)),
    "not known": ({"model": lambda: nn.Sequential(nn.Linear(6, 3), nn.PReLU())}, ("'1' (PReLU)",)),
    "a weight that is normalised": (
        {"model": lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)))},
        ("'0' (ParametrizedLinear)",),
    ),
    "padding by name": (images(nn.Conv2d(1, 2, 3, padding="same")), ("'0' (Conv2d) with padding='same'",)),
    "padding with edges": (images(nn.Conv2d(1, 2, 3, padding_mode="reflect")), ("padding_mode='reflect'",)),
    "rounding up": (images(nn.MaxPool2d(4, ceil_mode=True)), ("'0' (MaxPool2d) with ceil_mode=True",)),
    "another global pool": (images(nn.AdaptiveAvgPool2d(2)), ("output_size=2",)),
    "edges that don't count": (images(nn.AvgPool2d(2, padding=1, count_include_pad=False)), ("count_include_pad",)),
    "flattened in part": (images(nn.Flatten(2)), ("start_dim=2",)),
    "another GELU": (images(nn.GELU("tanh")), ("approximate='tanh'",)),
    "no running means": (images(nn.BatchNorm2d(1, track_running_stats=False)), ("track_running_stats=False",)),
    "a hook": ({"model": hooked}, ("the hooks of the model, a Linear",)),
    "an embedding in the middle": (
        {"model": lambda: nn.Sequential(nn.Identity(), nn.Embedding(9, 3), nn.Flatten(), nn.Linear(9, 3)),
         "data": word_data()}, ("'1' (Embedding) behind another module",),
    ),
    "hooks of the optimizer": ({"optimizer": hooked_optimizer}, ("a hook around SGD.step",)),
    "a loss of one's own": ({"loss": a_loss}, ("the loss a_loss", "nn.CrossEntropyLoss")),
    "another loss": ({"loss": nn.MultiMarginLoss()}, ("the loss MultiMarginLoss",)),
    "smoothed labels": ({"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}, ("label_smoothing=0.1 of the loss",)),
    "class weights": ({"loss": nn.CrossEntropyLoss(weight=torch.ones(3))}, ("weight=", "of the loss")),
    "another optimizer": ({"optimizer": torch.optim.NAdam}, ("the optimizer NAdam", "Adagrad")),
    "amsgrad": ({"optimizer": lambda p: torch.optim.Adam(p, amsgrad=True)}, ("amsgrad=True of Adam",)),
    "dampening": (
        {"optimizer": lambda p: torch.optim.SGD(p, momentum=0.9, dampening=0.5)}, ("dampening=0.5 of SGD",),
    ),
    "RMSprop's momentum": ({"optimizer": lambda p: torch.optim.RMSprop(p, momentum=0.9)}, ("momentum=0.9 of RMSprop",)),
    "a step": (
        {"step": lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])},
        ("a step of its own", "engine=eager"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_out_is_named(name: str) -> None:
    fields, says = REFUSED[name]
    with pytest.raises(PlanError) as error:
        hotloop.lower(a_task(**fields), ARRAYS)
    line = str(error.value)
    assert "\n" not in line
    assert [words for words in says if words not in line] == [], line


class Pairs(torch.utils.data.Dataset):
    """Samples that nobody has looked at before they come."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


WRONG: dict[str, tuple[dict[str, Any], type[HotloopError], tuple[str, ...]]] = {
    "labels out of range": (
        {"data": Pairs(labelled()[0], labelled()[1] + 1)}, DataError, ("the target has the label 3", "from 0 to 2"),
    ),
    "words out of the list": (
        {"model": words, "data": Pairs(word_data()[0] - 1, word_data()[1])}, DataError, ("holds -1", "from 0 to 8"),
    ),
    "doubles": (
        {"data": Pairs(labelled()[0].double(), labelled()[1])}, DataError, ("dtype float64", "float32, as the model"),
    ),
    "whole numbers": ({"data": Pairs(labelled()[0].long(), labelled()[1])}, DataError, ("dtype int64", "float32")),
    "shapes that don't chain": (
        {"data": Pairs(labelled()[0][:, :4], labelled()[1])}, TaskError,
        ("layer model, Dense(3), gets samples of shape (4,)", "6 numbers"),
    ),
    "another shape than is normalised": (
        {"model": lambda: nn.Sequential(nn.LayerNorm(5, elementwise_affine=False), nn.Linear(6, 3)),
         "data": Pairs(*labelled())},
        TaskError, ("layer 0, LayerNorm", "samples that end in (5,)"),
    ),
    "a target that would be stretched": (
        {"data": Pairs(labelled()[0], labelled()[0][:, :1]), "loss": nn.MSELoss()}, DataError,
        ("a sample of the target has shape (1,)", "(3,)"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_batch_that_does_not_fit_is_an_error_and_no_wrong_number(name: str) -> None:
    fields, error, says = WRONG[name]
    program = hotloop.lower(a_task(**fields), ARRAYS)
    assert isinstance(program._step, ArraysStep)
    with pytest.raises(error) as caught:
        advance(program, 5)
    assert [words for words in says if words not in str(caught.value)] == [], str(caught.value)


def test_one_number_for_a_variance_is_refused_before_training() -> None:
    fields = {
        "model": lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)),
        "data": tuple(v[:6] for v in labelled()),
    }
    with pytest.raises(TaskError, match=r"the last batch of each epoch has 1 sample .* drop_last=True"):
        hotloop.lower(a_task(**fields), ARRAYS)


def test_ignored_labels_count_nothing() -> None:
    x, y = labelled()
    data = (x, torch.where(torch.arange(24) % 4 == 0, -100, y))
    one, other = (after(hotloop.lower(a_task(data=data), plan), 10) for plan in (ARRAYS, BASELINE))
    same(one, other)


def test_several_inputs_are_refused() -> None:
    x, y = labelled()
    program = hotloop.lower(a_task(), ARRAYS)
    with pytest.raises(DataError, match="a batch is 3 parts"):
        program.step((x[:4], x[:4], y[:4]))
