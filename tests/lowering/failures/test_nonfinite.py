"""A loss or parameter that turns NaN or infinite: training stops, names the place, and keeps the last good checkpoint.

Each test is a real training. What goes wrong hangs on a marked sample, so that a replay meets it again: `marked` data
has one sample of a million, and `ok(x)` is 1 for a batch without it and 0 with it.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adam
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from hotloop.errors import NonFiniteError
from hotloop.plan import Plan
from hotloop.training.checkpoint import has_only_finite_parameters
from hotloop.training.run import Run
from tests.support.programs import a_task, labelled, trained

MARKED = 17  # in the fourth batch of five, in order


def marked() -> tuple[Tensor, Tensor]:
    x, y = labelled()
    x[MARKED, 0] = 1e6
    return x, y


def ok(x: Tensor) -> Tensor:
    return (x.detach().abs().amax() < 1e4).to(x.dtype)


class Apply(nn.Module):
    """A function as a module, with a class name of its own in messages."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


def layers(*modules: nn.Module) -> Callable[[], nn.Module]:
    """A factory of models with these in the middle: what can be trained anew for each."""
    own = lambda one: copy.deepcopy(one) if any(True for _ in one.parameters()) else one  # noqa: E731
    return lambda: nn.Sequential(nn.Linear(6, 8), *map(own, modules), nn.Linear(8, 3))


def stopped(path: Path, **fields: Any) -> NonFiniteError:
    """The error that ends a training with a checkpoint after each step, or as `every` says."""
    given: dict[str, Any] = dict(data=marked(), shuffle=False, epochs=3)
    options = {"checkpoint_every": fields.pop("every", "1"), "callbacks": fields.pop("watchers", ())}
    with pytest.raises(NonFiniteError) as caught:
        trained(a_task(**given | fields), path / "run", **options)
    assert "\n" not in str(caught.value)
    return caught.value


def assert_kept(path: Path, step: int) -> None:
    checkpoints = Run.open(path / "run").checkpoints
    newest = checkpoints.newest()
    assert (newest[0].state.position.step if newest else 0) == step
    for file in checkpoints.files():
        assert file.name.startswith("step-")
    assert newest is None or has_only_finite_parameters(newest[0].state)


class Pair(nn.Module):
    """Gives a tuple, or a dict with it inside; the second part is spoilt by the marked sample."""

    def __init__(self, *, as_dict: bool) -> None:
        super().__init__()
        self.as_dict = as_dict

    def forward(self, x: Tensor) -> Any:
        parts = (x, x / ok(x))
        return {"parts": list(parts)} if self.as_dict else parts


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = Apply(lambda x: x / (x.detach().abs().amax() < 1e7))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x) * (1 if ok(x) else 1e6))


class Masked(nn.Module):
    """Attention-like: the infinities of its mask stay inside."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = Apply(lambda x: x.masked_fill(torch.arange(8) > 4, -math.inf))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mask(x.clamp(-1, 1)).softmax(1)


class Offset(nn.Module):
    """Adds a parameter whose gradient alone is spoilt by the marked sample."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.offset.square() * ok(x)).sqrt()


class Divided(nn.Module):
    """Spoils what its only layer puts out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * ok(x) / ok(x)


SPOIL = Apply(lambda x: x / ok(x))
ROOT = Apply(lambda x: ((x.square() + 1) * ok(x)).sqrt())  # finite itself; its derivative is not

PLACES = {
    "in place": (layers(nn.ReLU(inplace=True), SPOIL, nn.ReLU(inplace=True)), "the output of '2' (Apply) became NaN"),
    "tuple": (layers(Pair(as_dict=False), Apply(sum)), "the output of '1' (Pair) became"),
    "dict": (layers(Pair(as_dict=True), Apply(lambda d: sum(d["parts"]))), "the output of '1' (Pair) became"),
    "shared": (layers(Twice()), "the output of '1.first' (Apply) in its call 2 became"),
    "outermost": (Divided, "the output of the model (Divided) became NaN"),
    "gradient": (
        layers(nn.ReLU(inplace=True), ROOT),
        "the gradient of the output of '1' (ReLU) became NaN, right after the gradient of the output of '2' (Apply)",
    ),
    "gradient of a parameter": (
        layers(nn.ReLU(inplace=True), Offset()),
        "the gradient of parameter '2.offset' became NaN",
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_the_first_module_is_named(place: str, tmp_path: Path) -> None:
    model, said = PLACES[place]
    message = str(stopped(tmp_path, model=model, optimizer=lambda p: SGD(p, lr=1e-9)))
    assert message.startswith(f"step 4 (epoch 1, batch 4): {said}")
    assert message.endswith("the last good checkpoint is of step 3")
    assert_kept(tmp_path, 3)


@pytest.mark.more
def test_under_a_compiled_plan_the_replay_is_eager_and_names_the_module(tmp_path: Path) -> None:
    spoil = Apply(lambda x: x / ok(x))
    task = a_task(data=marked(), shuffle=False, epochs=3, model=layers(nn.ReLU(), spoil))
    with pytest.raises(NonFiniteError, match=r"Apply") as caught:
        trained(task, tmp_path / "run", plan=Plan(compile="step"), checkpoint_every="1")
    assert "'2'" in str(caught.value)


def test_without_a_checkpoint_it_replays_from_the_beginning_across_epochs(tmp_path: Path) -> None:
    schedules: list[Any] = []

    class Plateau(ReduceLROnPlateau):
        """Blows the rate up after the second epoch; refuses a figure that is no number."""

        def step(self, metrics: float) -> None:  # type: ignore[override]
            assert math.isfinite(metrics)
            self.seen = [*getattr(self, "seen", []), metrics]
            self.optimizer.param_groups[0]["lr"] = 0.1 if len(self.seen) < 2 else 1e38

    def schedule(optimizer: Any) -> Any:
        schedules.append(Plateau(optimizer))
        return schedules[-1]

    data = (labelled()[0] * 100, labelled()[1])
    error = stopped(tmp_path, data=data, validation=0.25, schedule=schedule, every="10h", batch_size=6)
    assert str(error).startswith("step 7 (epoch 3, batch 1): ")
    run, replay = schedules
    assert len(run.seen) >= 2 and replay.seen == run.seen[: len(replay.seen)]
    assert "no checkpoint was written yet" in str(error)


def test_an_update_that_spoils_the_weights_is_found_before_the_checkpoint(tmp_path: Path) -> None:
    error = stopped(
        tmp_path,
        data=(labelled()[0] * 100, labelled()[1]),
        optimizer=lambda p: SGD(p, lr=0.1),
        schedule=lambda optimizer: LambdaLR(optimizer, lambda step: 1 if step < 2 else 1e39),
    )
    assert "step 3 (epoch 1, batch 3): the update by SGD made parameter 'weight' NaN or infinite" in str(error)
    assert "learning rate (now 1e+38)" in str(error)
    assert_kept(tmp_path, 2)


def test_weights_spoilt_in_the_last_step_are_not_saved_at_the_end(tmp_path: Path) -> None:
    error = stopped(
        tmp_path,
        data=(labelled()[0] * 100, labelled()[1]),
        epochs=1,
        every="10h",
        optimizer=lambda p: SGD(p, lr=1e-9),
        schedule=lambda optimizer: LambdaLR(optimizer, lambda step: 1 if step < 4 else 1e47),
    )
    assert str(error).startswith("step 5 (epoch 1, batch 5): the update by SGD")
    assert_kept(tmp_path, 0)


@pytest.mark.parametrize(
    ("every", "clues"),
    [("10h", ("after the loss had risen from",)), ("1", ("after the loss had", "with a weight as large as"))],
)
def test_a_training_that_runs_away_is_told_to_slow_down(every: str, clues: tuple[str, ...], tmp_path: Path) -> None:
    model = layers(nn.ReLU(inplace=True))
    error = stopped(tmp_path, data=labelled(), optimizer=lambda p: SGD(p, lr=1e5), model=model, epochs=50, every=every)
    assert any(clue in str(error) for clue in clues)
    assert "Lower the learning rate (now 100000) or set clip_norm" in str(error)


def test_the_mask_inside_a_module_is_not_blamed(tmp_path: Path) -> None:
    error = stopped(tmp_path, batch_size=24, model=layers(Masked(), SPOIL))  # one batch: no good one to compare with
    assert str(error).startswith("step 1 (epoch 1, batch 1): the output of '2' (Apply) became")


def test_an_infinity_that_good_steps_had_too_is_not_blamed(tmp_path: Path) -> None:
    """Class 2 is masked out; the loss is finite as long as it is no target."""
    x, y = labelled()
    y[y == 2] = 0
    y[MARKED] = 2
    model = lambda: nn.Sequential(nn.Linear(6, 3), Apply(lambda x: x.masked_fill(torch.arange(3) == 2, -math.inf)))  # noqa: E731
    error = stopped(tmp_path, data=(x, y), model=model)
    assert str(error).startswith("step 4 (epoch 1, batch 4): the loss itself (CrossEntropyLoss) became infinite")
    assert_kept(tmp_path, 3)


def test_the_loss_itself(tmp_path: Path) -> None:
    def divided(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target) + (output.detach().abs().amax() < 1e4).float().log()

    message = str(stopped(tmp_path, loss=divided))
    assert message.startswith("step 4 (epoch 1, batch 4): the loss itself (divided) became")
    assert "add an eps" in message


def test_the_step_form_and_its_own_loss(tmp_path: Path) -> None:
    def step(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": nn.functional.cross_entropy(model(x), y) / ok(x), "other": torch.tensor(1.0)}

    assert str(stopped(tmp_path, step=step)).startswith("step 4 (epoch 1, batch 4): the loss itself became infinite")


def test_parameters_that_start_as_nan(tmp_path: Path) -> None:
    def model() -> nn.Module:
        made = nn.Linear(6, 3)
        nn.init.constant_(made.bias, math.nan)
        return made

    assert "parameter 'bias' holds NaN or infinity before step 1" in str(stopped(tmp_path, model=model))


def test_a_weight_that_is_no_number(tmp_path: Path) -> None:
    assert "weight(batch)" in str(stopped(tmp_path, weight=lambda batch: math.nan))


def test_an_optimizer_that_asks_for_the_loss_several_times(tmp_path: Path) -> None:
    error = stopped(tmp_path, data=labelled(), optimizer=lambda p: LBFGS(p, lr=1e30), every="10h")
    assert "(Linear)" in str(error) and "became" in str(error)


def test_sparse_gradients_of_an_embedding(tmp_path: Path) -> None:
    numbers = torch.arange(24 * 6).reshape(24, 6) % 11

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(11, 4, sparse=True), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            hot = (x == numbers[MARKED]).all(1).any()
            return self.head((self.embedding(x).mean(1).square() * ~hot).sqrt())

    plain = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731 - decay takes no sparse gradient
    error = stopped(tmp_path, data=(numbers, labelled()[1]), model=Bag, optimizer=plain)
    assert "the gradient of the output of 'embedding' (Embedding) became NaN" in str(error)


class Counting(nn.Module):
    """Fails by a count that is no part of the State, as faulty hardware would fail by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = itertools.count(1)

    def forward(self, x: Tensor) -> Tensor:
        return x * math.nan if self.training and next(self.calls) == 4 else x


def test_what_does_not_come_back_is_said_to_stay_finite(tmp_path: Path) -> None:
    error = stopped(tmp_path, data=labelled(), model=layers(Counting()))
    assert "by step 4 " in str(error) and "stayed finite when the steps from 4 on were replayed" in str(error)
    assert_kept(tmp_path, 3)


def test_a_replay_that_fails_says_so(tmp_path: Path) -> None:
    models: list[int] = []

    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            models.append(1)
            self.replayed = len(models) > 1

        def forward(self, x: Tensor) -> Tensor:
            if self.replayed and self.training:
                raise ValueError("not twice")
            return x / ok(x)

    message = str(stopped(tmp_path, model=lambda: nn.Sequential(nn.Linear(6, 8), Fails(), nn.Linear(8, 3))))
    assert "replaying it for the place failed in step 4" in message and "ValueError: not twice" in message


class Loaded:
    """A data set that shows NaN only when the sample is loaded."""

    def __init__(self, spoil: Callable[[Tensor], Tensor] = lambda x: x * math.nan) -> None:
        self.x, self.y = labelled()
        self.spoil = spoil

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index]
        return (self.spoil(x) if index == MARKED else x), self.y[index]


@pytest.mark.parametrize("validation", [None, 0.25])
@pytest.mark.parametrize("augment", [None, lambda x, draws: x + draws.uniform(6)])
def test_a_sample_is_named_by_its_number_in_the_users_data(validation: Any, augment: Any, tmp_path: Path) -> None:
    error = stopped(tmp_path, data=Loaded(), validation=validation, augment=augment, shuffle=True, seed=3)
    assert f"sample {MARKED} of the data has NaN in its input" in str(error)


def test_prepare_and_augment_are_told_from_the_data(tmp_path: Path) -> None:
    large = Loaded(lambda x: x + 1e6)
    prepared = stopped(tmp_path / "1", data=large, prepare=lambda x: x / (x < 1e4))
    assert f"prepare makes of sample {MARKED} infinity in its input" in str(prepared)
    augmented = stopped(tmp_path / "2", data=large, augment=lambda x, draws: x / (x < 1e4))
    assert f"augment makes of sample {MARKED} infinity in its input" in str(augmented)


def test_targets_and_dicts_are_named_too(tmp_path: Path) -> None:
    class Dicts(Loaded):
        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return {"x": self.x[index], "mask": x[:1], "y": y}

    def step(model: nn.Module, batch: Any) -> Tensor:
        return (
            nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none") * batch["mask"][:, 0]
        ).mean()

    error = stopped(tmp_path, data=Dicts(), step=step)
    assert f"sample {MARKED} of the data has NaN in its batch['mask']" in str(error)


def test_a_validation_loss_that_is_nan_names_the_module(tmp_path: Path) -> None:
    model = layers(Apply(lambda x: x if torch.is_grad_enabled() else x * math.nan))
    error = stopped(tmp_path, data=labelled(), validation=0.25, model=model, every="4")
    assert "after epoch 1 the validation loss is NaN though the training loss is" in str(error)
    assert "the output of '1' (Apply) became NaN" in str(error)
    assert Run.open(tmp_path / "run").epochs == []


def test_a_validation_loss_that_is_nan_names_the_sample(tmp_path: Path) -> None:
    error = stopped(tmp_path, data=labelled(), validation=Loaded())
    assert f"sample {MARKED} of the validation data has NaN in its input" in str(error)


def test_poisoned_weights_are_blamed_on_training_not_on_validation(tmp_path: Path) -> None:
    error = stopped(
        tmp_path,
        data=(labelled()[0] * 100, labelled()[1]),
        validation=0.2,
        batch_size=19,  # one step in an epoch, whose own loss is finite
        optimizer=lambda p: SGD(p, lr=1e38),
        every="10h",
    )
    assert "step 1 (epoch 1, batch 1): the update by SGD" in str(error)


def test_what_does_not_steer_is_said_and_not_stopped_for(tmp_path: Path) -> None:
    model = layers(Apply(lambda x: x if torch.is_grad_enabled() else x * math.nan))
    run = trained(a_task(validation=0.25, model=model, monitor="train_loss", epochs=2), tmp_path / "run")
    assert len(run.epochs) == 2 and run.epochs[-1]["validation_loss"] is None


def test_a_monitored_metric_that_is_nan(tmp_path: Path) -> None:
    error = stopped(
        tmp_path,
        validation=0.25,
        data=labelled(),
        metrics={"f": lambda o, t: math.nan},
        monitor="validation_f",
        goal="max",
    )
    assert "after epoch 1 the validation f is NaN" in str(error)


def test_batches_in_which_nothing_counts_are_no_trouble(tmp_path: Path) -> None:
    x, y = labelled(samples=30)
    y[:10] = -100
    task = a_task(data=(x, y), validation=(x[:10], y[:10]), monitor="train_loss", shuffle=False, batch_size=5)
    run = trained(task, tmp_path / "run")
    assert math.isfinite(run.epochs[0]["train_loss"])
    assert run.epochs[0]["validation_loss"] is None  # a mean over nothing


def test_a_frozen_mask_of_infinities_may_be_a_parameter(tmp_path: Path) -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = nn.Parameter(torch.tensor([0.0] * 7 + [-math.inf]), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return (x + self.mask).softmax(1)

    trained(a_task(model=layers(Frozen()), optimizer=lambda p: Adam(p)), tmp_path / "run", checkpoint_every="1")
    assert_kept(tmp_path, 5)
