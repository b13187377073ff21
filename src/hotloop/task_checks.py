"""Checks of a Task's fields."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from hotloop.errors import TaskError, did_you_mean, type_name

_FUNCTIONS = ("model", "optimizer", "loss", "step", "schedule", "weight", "prepare", "augment", "collate", "predict")


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    """Raises TaskError for an unknown field, with the most similar known field."""
    fields = [name for name in known if not name.startswith("_")]
    if unknown := [name for name in given if name not in fields]:
        near = did_you_mean(unknown[0], fields)
        raise TaskError(
            f"a Task has no field {unknown[0]!r}",
            expected="" if near else f"some of {', '.join(fields)}",
            fix=near or "check the spelling",
        )


def check_fields(task: Any) -> None:
    """Checks each field of a Task, and combinations of fields.

    Raises:
        TaskError: a wrong value, or two fields that exclude each other.
    """
    if (task.loss is None) == (task.step is None):
        given = "neither loss nor step" if task.loss is None else "both loss and step"
        raise TaskError(
            f"the Task has {given}", expected="one of them", fix="give loss(output, target) or step(model, batch)"
        )
    for name in _FUNCTIONS:
        value = getattr(task, name)
        if name == "optimizer" and hasattr(value, "param_groups"):
            raise _stale_optimizer_error(value)
        if not callable(value) and (value is not None or name in ("model", "optimizer")):
            raise TaskError(
                f"{name} is {type_name(value)}", expected="a function", fix=f"see {name} in hotloop.Task's help"
            )
    _check_loss(task)
    _check_scalars(task)
    _check_number(task, "epochs", whole=True, least=1)
    _check_number(task, "batch_size", whole=True, least=1)
    _check_number(task, "patience", whole=True, least=1)
    _check_number(task, "seed", whole=True, least=None)
    _check_number(task, "clip_norm", above=0)
    _check_number(task, "clip_value", above=0)
    _check_number(task, "stop_below")
    if task.average is not None and not 0 < task.average < 1:
        raise TaskError(f"average={task.average!r}", expected="a decay between 0 and 1, such as 0.999")
    _check_words(task)
    _check_state(task)


def _check_state(task: Any) -> None:
    if not isinstance(task.state, Mapping):
        raise TaskError(
            f"state is {type_name(task.state)}",
            expected="a dict of names to objects or pairs of functions",
            fix='write state={"name": (get, set)}',
        )
    for name, one in task.state.items():
        is_pair = isinstance(one, tuple) and len(one) == 2 and all(map(callable, one))
        has_methods = all(callable(getattr(one, method, None)) for method in ("state_dict", "load_state_dict"))
        if not isinstance(name, str) or inspect.isclass(one) or not (is_pair or has_methods):
            raise TaskError(
                f"state has {type_name(one)} for {name!r}",
                expected="an object with state_dict and load_state_dict, or a pair of functions",
                fix=f"write {name!r}: (get, set), where get() returns the value and set(value) restores it",
            )


def _stale_optimizer_error(value: Any) -> TaskError:
    """Returns the error for an optimizer instance, whose parameters belong to another model than the trained one."""
    name = type(value).__name__
    place = f"torch.optim.{name}" if type(value).__module__.startswith("torch.optim") else name
    rate = value.param_groups[0].get("lr")
    lr = f", lr={float(rate):g}" if isinstance(rate, int | float) else ""
    return TaskError(
        f"optimizer is a {name} that is made already",
        expected="a function that makes one for the parameters of the Task's own model",
        fix=f"write optimizer=lambda parameters: {place}(parameters{lr})",
    )


def _check_loss(task: Any) -> None:
    if inspect.isclass(task.loss) and issubclass(task.loss, nn.Module):
        name = task.loss.__name__
        raise TaskError(
            f"the loss is the class {name} itself", expected="a function of output and target", fix=f"write {name}()"
        )
    if task.objective.reduction == "sum":
        raise TaskError(
            "the loss has reduction='sum'",
            expected="a mean over the batch, so that batches of any size count alike",
            fix="leave reduction out, and scale the learning rate instead",
        )


def _check_scalars(task: Any) -> None:
    if task.metrics and task.step is not None:
        raise TaskError(
            "the Task has metrics(output, target) and a step, which shows no output",
            expected="one of them",
            fix="return further figures from step: {'loss': loss, 'error': error}",
        )
    if task.metrics is not None and not _are_all_callable(task.metrics, Mapping):
        raise TaskError(f"metrics is {type_name(task.metrics)}", expected="a dict of name -> metric(output, target)")
    if "loss" in (task.metrics or {}):
        raise TaskError("a metric is named 'loss', as the loss itself is", fix="give it another name")
    if not _are_all_callable(task.callbacks, list | tuple):
        raise TaskError(f"callbacks is {type_name(task.callbacks)}", expected="a list of functions")


def _check_words(task: Any) -> None:
    if task.goal not in (None, "min", "max"):
        raise TaskError(f"goal={task.goal!r}", expected="'min' or 'max'")
    if task.deterministic not in (None, True, False):
        raise TaskError(f"deterministic={task.deterministic!r}", expected="True, False, or None to find out")
    for name in ("shuffle", "drop_last"):
        if getattr(task, name) not in (None, True, False):
            raise TaskError(f"{name}={getattr(task, name)!r}", expected="True or False")
    if task.schedule_every not in ("step", "epoch"):
        raise TaskError(f"schedule_every={task.schedule_every!r}", expected="'step' or 'epoch'")
    if not isinstance(task.monitor, str | None):
        raise TaskError(f"monitor={task.monitor!r}", expected="a figure's name, such as 'validation_loss'")
    if not isinstance(task.name, str):
        raise TaskError(f"name={task.name!r}", expected="a text")
    classes = task.classes  # any iterable, such as an array
    if isinstance(classes, str | Mapping) or not hasattr(classes, "__iter__"):
        raise TaskError(f"classes={classes!r}", expected="a list of the classes' names")
    if odd := [name for name in classes if not isinstance(name, str)]:
        raise TaskError(f"classes has {odd[0]!r}", expected="the classes' names, each a text")


def _check_number(
    task: Any, name: str, *, whole: bool = False, least: int | None = None, above: float | None = None
) -> None:
    value = getattr(task, name)
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or math.isnan(value):
        raise TaskError(f"{name}={value!r}", expected="a whole number" if whole else "a number")
    if (least is not None and value < least) or (above is not None and value <= above):
        expected = f"{least} or more" if least is not None else f"more than {above}"
        raise TaskError(f"{name}={value!r}", expected=expected)


def _are_all_callable(functions: Any, container: Any) -> bool:
    if not isinstance(functions, container):
        return False
    return all(map(callable, functions.values() if isinstance(functions, Mapping) else functions))


def registration_line(model: nn.Module) -> str:
    """Returns an instruction to register layers in a module's plain list or dict; empty without such layers."""
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute.startswith("_") or not isinstance(value, list | tuple | dict) or not value:
                continue
            items = value.values() if isinstance(value, dict) else value
            if all(isinstance(item, nn.Module) for item in items):
                holder = "nn.ModuleDict" if isinstance(value, dict) else "nn.ModuleList"
                where = f" in {name or type(module).__name__}"
                return f"write self.{attribute} = {holder}(...){where}: layers in a plain {type(value).__name__} are not registered"
    return ""
