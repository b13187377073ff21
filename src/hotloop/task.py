"""Task: *what* to train. It knows nothing of hardware."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer

from hotloop.data.augment import Draws
from hotloop.data.roles import Roles, assign_roles
from hotloop.data.tree import inputs_of
from hotloop.errors import DataError, TaskError, calling, kind
from hotloop.foreign import call_arguments, default_device, restart_names
from hotloop.objective import Objective
from hotloop.rng import Streams
from hotloop.task_fields import check_fields, check_names, unregistered


class Computed(NamedTuple):
    """What one forward pass gives: the loss, what the model put out (None in the `step` form), further scalars."""

    loss: Tensor
    output: Any
    scalars: dict[str, Tensor]


class Parameters(list):
    """The trainable parameters, in the model's order: what an optimizer factory receives.

    As a list it goes straight into any optimizer. For parameter groups, `named` tells which is which:

        lambda p: AdamW([{"params": p.where(lambda name, value: value.ndim > 1), "weight_decay": 0.1},
                         {"params": p.where(lambda name, value: value.ndim <= 1), "weight_decay": 0.0}], lr=3e-4)

    Attributes:
        named: qualified name -> parameter, trainable ones only.
        model: the module they belong to.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.named = {name: value for name, value in model.named_parameters() if value.requires_grad}
        super().__init__(self.named.values())

    def where(self, condition: Callable[[str, nn.Parameter], bool]) -> list[nn.Parameter]:
        """The parameters for which `condition(name, parameter)` holds."""
        return [value for name, value in self.named.items() if condition(name, value)]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to train.

    Args:
        model: builds the `nn.Module`, a new one at each call, with the random generators seeded; or a module, which
            is copied and stays as it is.
        optimizer: gets a list of the trainable parameters (see `Parameters`), returns a `torch.optim.Optimizer`.
        data: `(x, y)` or `(x1, x2, ..., y)` arrays or tensors; a dict of arrays; a list of samples; a map-style or
            iterable data set; a DataLoader; or a built-in `Bundle`, which brings its own validation, test and
            `prepare`. NumPy's float64 becomes float32. A data set of Hugging Face gives tensors unless it has a format.
        loss: `loss(output, target) -> 0-dim tensor`, a mean over the batch, for data of the form `(inputs..., target)`.
        step: `step(model, batch) -> loss`, instead of `loss`, for any other form. It may return a mapping with `loss`
            and further scalars, which are averaged and reported. Evaluation calls it too, in evaluation mode and
            without gradients (`torch.enable_grad()` brings them back where the loss itself takes some).
        validation: data of the same kind, or a share (0.1) or number (5000) of samples split off `data` by seed.
            It steers: early stop, best checkpoint.
        test: read once, at the end.
        batch_size: samples in a step; default 32, or the DataLoader's.
        epochs: passes over the data.
        seed: everything random follows from it.
        schedule: `schedule(optimizer)` or `schedule(optimizer, total)` -> a torch learning-rate scheduler, where
            `total` counts its steps over the whole run.
        schedule_every: when the scheduler steps.
        clip_norm: gradients are scaled down to at most this total 2-norm.
        clip_value: each gradient element is cut to this magnitude.
        average: decay of an exponential average of the weights, such as 0.999; evaluation uses the average.
        metrics: name -> `metric(output, target)`: a mean, or a value per sample, or `(sum, count)`. By default the
            accuracy, where outputs and targets have the shapes of a classification.
        weight: `weight(batch)`: what a partial loss counts; default its samples, or for cross entropy the targets
            that are not `ignore_index`.
        prepare: deterministic preprocessing of a batch's inputs, sample by sample; also applied by `predict`.
        augment: `augment(inputs, draws)`: random augmentation of a training batch, see `hotloop.data.Draws`.
        collate: turns a list of samples into a batch.
        deterministic: whether a data set gives the same sample each time that it is asked, so that it may be read into
            memory once; by default that is found out. False for one that changes while training goes on.
        predict: `predict(model, inputs) -> output`, where `model(inputs)` is not it.
        shuffle: whether each epoch has an order of its own; default yes, or what the DataLoader does.
        monitor: the figure that decides which epoch is best; default `validation_loss`, else `train_loss`.
        goal: whether the monitored figure should fall or rise; default by its name.
        stop_below: stop when the monitored figure falls below (rises above, for a rising goal) this.
        patience: stop after so many epochs without progress.
        callbacks: called with a read-only `View` after each event; see `hotloop.view.Callback`.
        classes: names of the classes, for reports.
        name: for run folders; default the file's name.
    """

    model: Callable[[], nn.Module] | nn.Module
    optimizer: Callable[[Parameters], torch.optim.Optimizer]
    data: Any
    loss: Callable[[Any, Any], Tensor] | None = None
    step: Callable[[nn.Module, Any], Any] | None = None
    validation: Any = None
    test: Any = None
    batch_size: int | None = None
    epochs: int = 1
    seed: int = 0
    schedule: Callable[..., Any] | None = None
    schedule_every: Literal["step", "epoch"] = "step"
    clip_norm: float | None = None
    clip_value: float | None = None
    average: float | None = None
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None
    weight: Callable[[Any], Any] | None = None
    prepare: Callable[[Any], Any] | None = None
    augment: Callable[[Any, Draws], Any] | None = None
    collate: Callable[[list], Any] | None = None
    deterministic: bool | None = None
    predict: Callable[[nn.Module, Any], Any] | None = None
    shuffle: bool | None = None
    monitor: str | None = None
    goal: Literal["min", "max"] | None = None
    stop_below: float | None = None
    patience: int | None = None
    callbacks: tuple[Callable[[Any], None], ...] | list[Callable[[Any], None]] = ()
    classes: tuple[str, ...] | list[str] = field(default=())
    name: str = "task"

    def __new__(cls, *args: Any, **given: Any) -> Task:
        """Raises TaskError for a field that a Task doesn't have."""
        check_names(given, cls.__dataclass_fields__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self)

    _built: ClassVar[Mapping[int, weakref.ref[nn.Module]]] = {}
    """The modules with something to train that the factory returned last, while they live, by their ids."""

    @cached_property
    def objective(self) -> Objective:
        """What is known of the loss."""
        return Objective.of(self.loss)

    @cached_property
    def roles(self) -> Roles:
        """The data by role, brought in and checked on first use."""
        return assign_roles(
            self.data,
            self.validation,
            self.test,
            batch_size=self.batch_size,
            seed=self.seed,
            prepare=self.prepare,
            collate=self.collate,
            shuffle=self.shuffle,
        )

    def build_model(self) -> nn.Module:
        """A new model on the CPU, its initial weights drawn from the seed.

        Raises:
            TaskError: the factory raised (its error is shown), or returned no module, or one that it returned before.
        """
        Streams(self.seed).reseed("model")
        restart_names()
        if isinstance(self.model, nn.Module):
            return calling("copying the model", _copied, self.model)
        with default_device(None):
            model = calling("the model factory", self.model)
        if not isinstance(model, nn.Module):
            raise TaskError(
                f"the model factory returned {kind(model)}",
                expected="a torch.nn.Module",
                fix="return the model from it",
            )
        trained = {name: part for name, part in model.named_modules() if not name or _is_trained(part)}
        for name, part in trained.items():
            if (before := self._built.get(id(part))) is not None and before() is part:
                raise TaskError(
                    f"the model factory returned the same module{f' {name!r}' * bool(name)} twice, which may be trained by now",
                    expected="a new one at each call",
                    fix="build it inside the factory, or give the Task the module itself: it is copied",
                )
        vars(self)["_built"] = {id(part): weakref.ref(part) for part in trained.values()}
        return model

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer over the trainable parameters of `model`."""
        parameters = Parameters(model)
        if not parameters:
            raise TaskError(
                "the model has no trainable parameter",
                expected="one or more",
                fix=unregistered(model) or "check requires_grad",
            )
        optimizer = calling("the optimizer factory", self.optimizer, parameters)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TaskError(
                f"the optimizer factory returned {kind(optimizer)}",
                expected="a torch.optim.Optimizer",
                fix="return the optimizer from it",
            )
        return optimizer

    def build_schedule(self, optimizer: torch.optim.Optimizer, steps_per_epoch: int | None) -> Any:
        """The learning-rate scheduler, or None."""
        if self.schedule is None:
            return None
        if not _needs_two(self.schedule):
            return _scheduler(calling("the schedule factory", self.schedule, optimizer))
        if self.schedule_every == "step" and steps_per_epoch is None:
            raise TaskError(
                "the schedule asks for the number of steps, but the data is a stream of unknown length",
                expected="a schedule(optimizer) alone",
                fix="name the number of steps yourself",
            )
        total = self.epochs * (steps_per_epoch or 1) if self.schedule_every == "step" else self.epochs
        return _scheduler(calling("the schedule factory", self.schedule, optimizer, total))

    def compute(self, model: nn.Module, batch: Any) -> Computed:
        """One forward pass: the loss of `batch`, in whichever of the two forms the Task has."""
        if self.step is not None:
            with default_device(model):
                return Computed(*_loss_and_scalars(self.step(model, batch)))
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise DataError(
                f"a batch is {kind(batch)}, and the Task has a loss(output, target)",
                expected="(inputs, target)",
                fix="give the Task a step(model, batch) instead of a loss",
            )
        output = forward(model, inputs_of(batch))
        assert self.loss is not None
        return Computed(self.loss(output, batch[-1]), output, {})

    def output(self, model: nn.Module, inputs: Any) -> Any:
        """What the model says of a batch of inputs, as `hotloop predict` gives it."""
        return forward(model, inputs) if self.predict is None else self.predict(model, inputs)

    def weight_of(self, batch: Any, samples: int) -> Any:
        """What the loss of `batch` counts: a number, or a 0-dim tensor."""
        if self.weight is not None:
            return self.weight(batch)
        return self.objective.weight_of(batch[-1], samples) if isinstance(batch, tuple | list) else samples

    @property
    def stop_early(self) -> bool:
        return self.stop_below is not None or self.patience is not None


def hooked_parameter(model: nn.Module) -> str | None:
    """The name of the first parameter with a hook on its gradient; None if there is none."""
    named = model.named_parameters()
    return next((name for name, value in named if value._backward_hooks or value._post_accumulate_grad_hooks), None)


def _is_trained(part: nn.Module) -> bool:
    """Whether it holds a parameter that is trained. Keras makes its own only when it is asked for `parameters()`."""
    return any(value is not None and value.requires_grad for value in part._parameters.values())


def _copied(model: nn.Module) -> nn.Module:
    """A copy that shares nothing; torch itself can't copy buffers that are still to come into being.

    Raises:
        TaskError: a parameter has a hook, which no copy has.
    """
    if (name := hooked_parameter(model)) is not None:
        raise TaskError(
            f"the parameter {name!r} of the model has a hook on its gradient, which a copy of the model would not have",
            expected="a function that builds the model",
            fix="hang the hook up in that function",
        )
    unborn = [value for value in model.buffers() if isinstance(value, UninitializedBuffer)]
    return copy.deepcopy(model, {id(value): UninitializedBuffer(dtype=value.dtype) for value in unborn})  # type: ignore[call-arg]


def forward(model: nn.Module, inputs: Any) -> Any:
    """`model(inputs)`, or `model(x1, x2, ...)` for a tuple of several inputs."""
    arguments = call_arguments(model)
    with default_device(model):
        return model(*inputs, **arguments) if isinstance(inputs, tuple) else model(inputs, **arguments)


def _loss_and_scalars(result: Any) -> tuple[Any, None, dict[str, Tensor]]:
    """What a `step` returned, as `Computed` takes it."""
    if not isinstance(result, Mapping):
        return result, None, {}
    if "loss" not in result:
        raise TaskError(
            f"step returned a mapping with {', '.join(map(repr, result)) or 'nothing'}",
            expected="one with 'loss'",
            fix="return the loss under that name",
        )
    others = {name: value for name, value in result.items() if name != "loss"}
    if type(result) is not dict:  # a library's own output, which holds much more than figures
        others = {name: value for name, value in others.items() if isinstance(value, Tensor) and not value.ndim}
    scalars = {name: torch.as_tensor(value) for name, value in others.items()}
    for name, value in scalars.items():
        if value.ndim:
            raise TaskError(
                f"step returned {name!r} of shape {tuple(value.shape)}", expected="single numbers beside the loss"
            )
        if name in ("weight", "samples"):
            fix = f"call it otherwise, such as 'mean_{name}'"
            raise TaskError(f"step returned {name!r}, which hotloop counts itself", expected="another name", fix=fix)
    return result["loss"], None, scalars


def _scheduler(made: Any) -> Any:
    """What a schedule factory returned."""
    if callable(getattr(made, "step", None)):
        return made
    raise TaskError(
        f"the schedule factory returned {kind(made)}",
        expected="a torch.optim.lr_scheduler.LRScheduler",
        fix="return the scheduler from it",
    )


def _needs_two(function: Callable[..., Any]) -> bool:
    """Whether `function` wants a `total`, or can't be called with one positional argument."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return False
    if "total" in signature.parameters:
        return True
    try:
        signature.bind(None)
    except TypeError:
        return True
    return False


def overridden(task: Task, fields: Mapping[str, Any] | None) -> Task:
    """The Task with some fields set; itself, with all that it knows already, where they are as they were."""
    changed = {key: value for key, value in (fields or {}).items() if getattr(task, key) != value}
    return replace(task, **changed) if changed else task
