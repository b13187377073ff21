"""The Task: what to train, independent of hardware."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from hotloop.core.random.generators import OwnedGenerators
from hotloop.core.random.rng import RandomStreams
from hotloop.core.state import host_copy
from hotloop.core.task_parts.losses import LossInfo, named_scalars, sum_for_evaluation
from hotloop.core.task_parts.models import call_arguments, copy_model, default_device, restart_names
from hotloop.core.task_parts.optimizers import NamedOptimizers, check_optimizer
from hotloop.core.task_parts.schedules import check_schedule
from hotloop.data.augment import Draws
from hotloop.data.batch_tree import batch_inputs
from hotloop.data.row_count import count_rows
from hotloop.data.splits import DataSplits, split_data
from hotloop.errors import DataError, TaskError, call_user_code, type_name
from hotloop.task_checks import check_fields, check_names, registration_line


class StepResult(NamedTuple):
    """The result of a forward pass.

    Attributes:
        loss: 0-dim.
        output: the model's output; None in the `step` form.
        scalars: further 0-dim tensors by name.
        classified: whether output and target certainly are class scores and labels; set by evaluations alone.
    """

    loss: Tensor
    output: Any
    scalars: dict[str, Tensor]
    classified: bool = False


class YieldedResult(StepResult):
    """A step's result for several optimizers, with the sum of the yielded losses, without a gradient."""


class Parameters(list):
    """The trainable parameters in the model's order, as optimizer factories receive them.

    The list can be passed to any optimizer. `where` selects parameter groups:

        lambda p: AdamW([{"params": p.where(lambda name, value: value.ndim > 1), "weight_decay": 0.1}, {"params":
                         p.where(lambda name, value: value.ndim <= 1), "weight_decay": 0.0}], lr=3e-4)

    Attributes:
        named: qualified name -> trainable parameter.
        model: the module.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.named = {name: value for name, value in model.named_parameters() if value.requires_grad}
        super().__init__(self.named.values())

    def where(self, condition: Callable[[str, nn.Parameter], bool]) -> list[nn.Parameter]:
        """Returns the parameters for which `condition(name, parameter)` is true."""
        return [value for name, value in self.named.items() if condition(name, value)]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What to train.

    Args:
        model: a function that returns a new `nn.Module` at each call, with seeded random generators; or a module, which
            is copied and stays unchanged.
        optimizer: takes a list of the trainable parameters (see `Parameters`), returns a `torch.optim.Optimizer`; or a
            dict of name -> optimizer with disjoint parameters, which `step` updates in turn.
        data: `(x, y)` or `(x1, x2, ..., y)` arrays or tensors; a dict of arrays; a list of samples; a map-style or
            iterable data set; a DataLoader; or a `Bundle` of `hotloop.data`, with validation, test and `prepare`. NumPy's
            float64 becomes float32. A Hugging Face data set without a format returns tensors.
        loss: `loss(output, target) -> 0-dim tensor`, a mean over the batch, for data of the form `(inputs..., target)`.
        step: `step(model, batch) -> loss`, instead of `loss`, for other forms. A mapping with `loss` may have further
            scalars, which are averaged and reported. Evaluation calls `step` in evaluation mode without gradients
            (`torch.enable_grad()` enables them for losses that contain gradients). With several optimizers `step` is a
            generator: `yield name, loss` updates the parameters of that optimizer.
        validation: data of the same kind, or a share (0.1) or number (5000) of samples, split off `data` by seed; used
            for early stopping and the best checkpoint.
        test: data that is read once, at the end.
        batch_size: samples in a step; default 32, or the DataLoader's.
        epochs: passes over the data.
        seed: determines all random numbers.
        schedule: `schedule(optimizer)` or `schedule(optimizer, total)` -> a torch learning-rate scheduler; `total` is
            its number of steps in the run. With several optimizers `optimizer` is the dict, and the result may be a
            dict.
        schedule_every: when the scheduler steps.
        clip_norm: largest total 2-norm of the gradients, which are scaled down to it.
        clip_value: largest magnitude of a gradient element.
        average: decay of an exponential average of the weights, such as 0.999; evaluation uses the average.
        metrics: name -> `metric(output, target)`: a mean, a value per sample, or `(sum, count)`. Default: the accuracy,
            if the loss reads outputs and targets as a classification.
        weight: `weight(batch)`: the weight of a batch's loss in averages; default its rows, or for cross entropy the
            targets other than `ignore_index`.
        prepare: deterministic preprocessing of a batch's inputs, sample by sample; `predict` applies it too.
        augment: `augment(inputs, draws)`: random augmentation of a training batch, see `hotloop.data.Draws`.
        collate: turns a list of samples into a batch.
        deterministic: whether a data set returns the same sample at each access, so that one read into memory suffices;
            None finds out. False for a data set that changes during training.
        predict: `predict(model, inputs) -> output`; default `model(inputs)`.
        shuffle: whether each epoch has another order; default true, or the DataLoader's choice.
        drop_last: whether training epochs drop an incomplete last batch; default false, or the DataLoader's choice.
        monitor: the figure that determines the best epoch; default `validation_loss`, else `train_loss`.
        goal: whether the monitored figure should fall (`min`) or rise (`max`); default by its name.
        stop_below: stop when the monitored figure falls below this (for a rising goal: rises above).
        patience: stop after so many epochs without progress.
        callbacks: called with a read-only `View` after each event; see `hotloop.core.callback.Callback`.
        state: what else training changes and a checkpoint should store, by name: an object with `state_dict` and
            `load_state_dict`, or a pair `(get, set)` of functions. The values are numbers, texts, tensors, and lists,
            tuples or dicts of them.
        loggers: some of `tensorboard`, `mlflow`, `wandb`, `trackio` and `csv`, which record the figures of each epoch.
        classes: names of the classes, for reports.
        name: for run folders; default the file's name.
    """

    model: Callable[[], nn.Module] | nn.Module
    optimizer: Callable[[Parameters], torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer]]
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
    drop_last: bool | None = None
    monitor: str | None = None
    goal: Literal["min", "max"] | None = None
    stop_below: float | None = None
    patience: int | None = None
    callbacks: tuple[Callable[[Any], None], ...] | list[Callable[[Any], None]] = ()
    state: Mapping[str, Any] = field(default_factory=dict)
    loggers: tuple[str, ...] | list[str] = ()
    classes: tuple[str, ...] | list[str] = field(default=())
    name: str = "task"

    def __new__(cls, *args: Any, **given: Any) -> Task:
        """Raises TaskError for an unknown field."""
        check_names(given, cls.__dataclass_fields__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_fields(self)

    _built: ClassVar[Mapping[int, weakref.ref[nn.Module]]] = {}
    """The living modules with trainable parameters of the factory's last result, by id."""

    @cached_property
    def objective(self) -> LossInfo:
        """The loss's properties."""
        return LossInfo.from_loss(self.loss)

    @cached_property
    def roles(self) -> DataSplits:
        """The data by role, converted and checked at first use."""
        return split_data(
            self.data,
            self.validation,
            self.test,
            batch_size=self.batch_size,
            seed=self.seed,
            prepare=self.prepare,
            collate=self.collate,
            shuffle=self.shuffle,
            drop_last=self.drop_last,
        )

    def build_model(self) -> nn.Module:
        """Returns a new model on the CPU, with initial weights from the seed.

        Raises:
            TaskError: the factory raised an error, or returned no module or an earlier module.
        """
        seed = RandomStreams(self.seed).reseed("model")
        restart_names()
        if isinstance(self.model, nn.Module):
            _check_memory(self.model)
            return call_user_code("copying the model", _deep_copy, self.model)
        factory = OwnedGenerators({"model": self.model})
        factory.refresh()
        factory.seed(seed)
        with default_device(None):
            model = call_user_code("the model factory", self.model)
        if not isinstance(model, nn.Module):
            raise TaskError(
                f"the model factory returned {type_name(model)}",
                expected="a torch.nn.Module",
                fix="return the model from it",
            )
        _check_memory(model)
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

    def built_last(self, model: nn.Module) -> bool:
        """Returns whether the factory has returned no other model since this one, which the user may refer to."""
        return isinstance(self.model, nn.Module) or any(id(part) in self._built for part in model.modules())

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Returns the optimizer over the model's trainable parameters."""
        parameters = Parameters(model)
        if not parameters:
            raise TaskError(
                "the model has no trainable parameter",
                expected="one or more",
                fix=registration_line(model) or "check requires_grad",
            )
        optimizer = check_optimizer(call_user_code("the optimizer factory", self.optimizer, parameters))
        has_several = isinstance(optimizer, NamedOptimizers)
        if has_several and self.step is None:
            raise TaskError(
                "the Task has several optimizers and a loss(output, target), which gives one loss",
                expected="a step(model, batch) that yields (name, loss) for each update",
                fix="give such a step, or one optimizer with parameter groups",
            )
        if inspect.isgeneratorfunction(self.step) and not has_several:
            raise single_optimizer_error()
        return optimizer

    def build_schedule(self, optimizer: torch.optim.Optimizer, steps_per_epoch: int | None) -> Any:
        """Returns the learning-rate scheduler, or None."""
        if self.schedule is None:
            return None
        scheduled = optimizer.members if isinstance(optimizer, NamedOptimizers) else optimizer
        if not _takes_total(self.schedule):
            return check_schedule(call_user_code("the schedule factory", self.schedule, scheduled))
        if self.schedule_every == "step" and steps_per_epoch is None:
            raise TaskError(
                "the schedule asks for the number of steps, but the data is a stream of unknown length",
                expected="a schedule(optimizer) alone",
                fix="name the number of steps yourself",
            )
        total = self.epochs * (steps_per_epoch or 1) if self.schedule_every == "step" else self.epochs
        return check_schedule(call_user_code("the schedule factory", self.schedule, scheduled, total))

    def compute(self, model: nn.Module, batch: Any) -> StepResult:
        """Returns the result of a forward pass with loss, in either form of the Task."""
        if self.step is not None:
            with default_device(model):
                result = self.step(model, batch)
                if isinstance(result, Generator):
                    loss, scalars = sum_for_evaluation(result)
                    return YieldedResult(loss, None, scalars)
                return StepResult(*_loss_and_scalars(result))
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise DataError(
                f"a batch is {type_name(batch)}, and the Task has a loss(output, target)",
                expected="(inputs, target)",
                fix="give the Task a step(model, batch) instead of a loss",
            )
        output = forward(model, batch_inputs(batch))
        assert self.loss is not None
        return StepResult(self.loss(output, batch[-1]), output, {})

    def output(self, model: nn.Module, inputs: Any) -> Any:
        """Returns the model's output for a batch of inputs, as `hotloop predict` does."""
        return forward(model, inputs) if self.predict is None else self.predict(model, inputs)

    def weight_of(self, batch: Any, samples: int) -> Any:
        """Returns the weight of a batch's loss: a number, or a 0-dim tensor."""
        if self.weight is not None:
            return self.weight(batch)
        rows = count_rows(batch, samples).number
        return self.objective.weight_of(batch[-1], rows) if isinstance(batch, tuple | list) and batch else rows

    def read_state(self) -> dict[str, Any]:
        """Returns copies of the values that `state` names."""
        return {
            name: host_copy(call_user_code(f"state {name!r}", one[0] if isinstance(one, tuple) else one.state_dict))
            for name, one in self.state.items()
        }

    def restore_state(self, values: Mapping[str, Any]) -> None:
        """Sets the values that `state` names; those that a checkpoint lacks stay as they are."""
        for name, one in self.state.items():
            if name in values:
                put = one[1] if isinstance(one, tuple) else one.load_state_dict
                call_user_code(f"state {name!r}", put, host_copy(values[name]))

    def owners(self, model: nn.Module) -> dict[str, Any]:
        """Returns the parts of a batch's computation that may have random generators, by their names in messages."""
        parts = {name: getattr(self, name) for name in ("loss", "step", "weight", "metrics", "predict")}
        return {"model": model, **parts}


def first_hooked_parameter(model: nn.Module) -> str | None:
    """Returns the name of the first parameter with a hook on its gradient; None without one."""
    named = model.named_parameters()
    return next((name for name, value in named if value._backward_hooks or value._post_accumulate_grad_hooks), None)


def _is_trained(part: nn.Module) -> bool:
    """Returns whether the module itself has a trainable parameter; Keras creates parameters in `parameters()`."""
    return any(value is not None and value.requires_grad for value in part._parameters.values())


def _check_memory(model: nn.Module) -> None:
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if value.is_meta:
            raise TaskError(
                f"the model's {name!r} is on the meta device, where tensors have a shape and no numbers",
                expected="parameters and buffers with memory",
                fix="build it outside of torch.device('meta'), or call to_empty(device='cpu') and initialise it",
            )


def _deep_copy(model: nn.Module) -> nn.Module:
    """Returns a copy of the model.

    Raises:
        TaskError: a parameter has a hook, which copies lack, or the model can't be copied.
    """
    if (name := first_hooked_parameter(model)) is not None:
        raise TaskError(
            f"the parameter {name!r} of the model has a hook on its gradient, which a copy of the model would not have",
            expected="a function that builds the model",
            fix="register the hook in that function",
        )
    return copy_model(model)


def forward(model: nn.Module, inputs: Any) -> Any:
    """Returns `model(inputs)`, or `model(x1, x2, ...)` for a tuple of inputs."""
    arguments = call_arguments(model)
    with default_device(model):
        is_tuple = isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence)
        return model(*inputs, **arguments) if is_tuple else model(inputs, **arguments)


def _loss_and_scalars(result: Any) -> tuple[Any, None, dict[str, Tensor]]:
    """Returns the fields of a `StepResult` from a step's return value."""
    if not isinstance(result, Mapping):
        return result, None, {}
    if "loss" not in result:
        raise TaskError(
            f"step returned a mapping with {', '.join(map(repr, result)) or 'nothing'}",
            expected="one with 'loss'",
            fix="return the loss under that name",
        )
    others = {name: value for name, value in result.items() if name != "loss"}
    if type(result) is not dict:  # a library's output object has further entries
        others = {name: value for name, value in others.items() if isinstance(value, Tensor) and not value.ndim}
    return result["loss"], None, named_scalars(others)


def single_optimizer_error() -> TaskError:
    """Returns the error for a step that yields losses for a single optimizer."""
    return TaskError(
        "step is a generator, and the Task has one optimizer",
        expected="a step that returns the loss",
        fix="return it, or let optimizer= return a dict of name -> optimizer and yield (name, loss)",
    )


def _takes_total(function: Callable[..., Any]) -> bool:
    """Returns whether the function has a parameter `total`, or can't be called with one positional argument."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return False
    try:
        signature.bind(None)
    except TypeError:
        return True
    return "total" in signature.parameters


def override_fields(task: Task, fields: Mapping[str, Any] | None) -> Task:
    """Returns the Task with changed fields; the same object, with its caches, if no value changes.

    `loggers` are added to those of the Task.
    """
    fields = dict(fields or {})
    if fields.get("loggers") and isinstance(task.loggers, list | tuple):
        fields["loggers"] = list(dict.fromkeys([*task.loggers, *fields["loggers"]]))
    changed = {key: value for key, value in fields.items() if getattr(task, key) != value}
    return replace(task, **changed) if changed else task
