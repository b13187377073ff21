"""Loads a run's weights, and computes predictions for new inputs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from hotloop.core.random.generators import OwnedGenerators
from hotloop.core.random.rng import RandomStreams, preserve_generators
from hotloop.core.records.training import TaskFacts
from hotloop.core.state import State, copy_into, restore_model
from hotloop.core.task_parts.models import set_training, switchable_optimizers
from hotloop.core.task_parts.optimizers import inner_optimizers, restore_optimizer
from hotloop.data.batch_tree import batch_inputs, to_device, tree_tensors
from hotloop.data.bundle import Bundle, InputReader
from hotloop.data.feeds.feed import first_batch
from hotloop.data.sources import as_source, as_tensor
from hotloop.data.splits import DataSplits
from hotloop.errors import (
    DataError,
    HotloopError,
    MemoryExhausted,
    RunError,
    TaskError,
    describe_error,
    is_out_of_memory,
    type_name,
)
from hotloop.inference.npy import is_array_file, read_arrays
from hotloop.lowering.context import build_model
from hotloop.lowering.evaluation import inference_batch_size
from hotloop.lowering.object_state.attributes import restore_model_attributes
from hotloop.task import Task
from hotloop.training.run import Run

WeightsChoice = Literal["best", "last"]
Say = Callable[[str], None]
Progress = Callable[[int, int | None], None]
"""Receives the number of processed samples, and the total (None: unknown)."""


@dataclass(frozen=True)
class ChosenWeights:
    """A run's weights of `epoch`; 0 is before the end of the first epoch."""

    state: State
    weights: WeightsChoice
    epoch: int


def choose_weights(run: Run, weights: WeightsChoice = "best", say: Say = warnings.warn) -> ChosenWeights:
    """Returns the weights of a run's best or last epoch.

    Without validation data, `best` is the last epoch, as in the run's own final figures. Damaged checkpoints are
    skipped and reported by `say`.

    Raises:
        RunError: no undamaged checkpoint, the best epoch's weights are lost, or an invalid `weights`.
    """
    if weights not in get_args(WeightsChoice):
        raise RunError(f"weights={weights!r}", expected="'best' or 'last'", fix="choose one of them")
    found = run.checkpoints.newest(say, best_needed=weights == "best")
    if found is None:
        raise _no_weights_error(run, weights)
    checkpoint, _ = found
    if weights == "best" and checkpoint.best is not None and checkpoint.history[-1].validation:
        best = checkpoint.best
        return ChosenWeights(run.checkpoints.load_best(best).state, "best", best.epoch)
    return ChosenWeights(checkpoint.state, "last", checkpoint.state.position.epoch)


def _no_weights_error(run: Run, weights: WeightsChoice) -> RunError:
    """Returns the error with a remedy that works for this run."""
    files = run.checkpoints.files()
    if not files and run.last_saved() is None:
        return RunError(
            f"{run.path} has no checkpoint",
            expected="a run that was trained",
            fix=f"go on with it by: hotloop train --resume {run.path}",
        )
    last = run.checkpoints.newest(best_needed=False) if weights == "best" else None
    if last is not None:
        return RunError(
            f"{run.path} has no good checkpoint for its best weights",
            expected="the best epoch's file as training wrote it",
            fix=f"use --weights last, which are of step {last[0].state.position.step:,}, or restore the file from a copy",
        )
    what = f"no good checkpoint for its {weights} weights" if files else "lost all its checkpoints"
    return RunError(
        f"{run.path} has {what}",
        expected="a checkpoint that is unchanged since training",
        fix="restore one from a copy, or train anew: nothing in this folder gives its weights back",
    )


def trained_model(task: Task, state: State, device: torch.device) -> nn.Module:
    """Returns the Task's model with the weights of `state` (averaged, if present), in evaluation mode.

    Raises:
        CheckpointError: the weights belong to another model.
    """
    return model_for_export(task, state).to(device).eval()


def model_for_export(task: Task, state: State) -> nn.Module:
    """Returns the model like `trained_model`, but in training mode on the CPU, before any merge of weights in `eval()`.

    Raises:
        CheckpointError: the weights belong to another model.
    """
    with preserve_generators():
        model = build_model(task)
        set_training(model, state.in_eval)
        optimizer = task.build_optimizer(model) if state.optimizer.get("switched") else None
    restore_model(model, state)
    restore_model_attributes(model, state.attributes)
    if state.average:
        parameters = dict(model.named_parameters())
        copy_into({name: parameters[name] for name in state.average}, state.average, "average")
    if optimizer is not None:  # a schedule-free optimizer evaluates other weights than those of the last step
        restore_optimizer(optimizer, model, state.optimizer)
        with torch.no_grad():
            for member in switchable_optimizers(optimizer, list(inner_optimizers(optimizer).values())):
                member.eval()
    return model


def prepare_function(task: Task) -> Callable[[Any], Any] | None:
    """Returns the preprocessing of raw inputs, without reading data."""
    return task.prepare or (task.data.prepare if isinstance(task.data, Bundle) else None)


def first_inputs(task: Task, samples: int) -> Any:
    """Returns the raw inputs of the first samples of the training data."""
    data = task.data.train if isinstance(task.data, Bundle) else task.data
    given = as_source(data, "data", collate=task.collate, batch_size=task.batch_size)
    raw = DataSplits(given.source, None, None, task.batch_size or 1, task.seed, prepare=None, classes=(), note="")
    return batch_inputs(first_batch(raw, samples))


def first_samples(task: Task, x: Any, most: int) -> Any:
    """Returns the first samples of arrays or of a file, in the form of `predict`."""
    if isinstance(x, str | Path):
        reader = task.data.reader if isinstance(task.data, Bundle) else None
        columns = _read_inputs(task, Path(x), reader, warnings.warn)
    else:
        columns = input_columns(x)
    return cut_rows(columns, 0, min(most, count_samples(columns)))


def model_output(task: Task, model: nn.Module, inputs: Any) -> Tensor | dict[str, Tensor]:
    """Returns the model's output for prepared inputs: a tensor, or tensors by name.

    Of a mapping or object with `logits`, only the logits are returned; a tuple's items are named `output_0`, `output_1`
    and so on.

    Raises:
        TaskError: the output contains other values.
    """
    output = task.output(model, inputs)
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    items: dict[str, Any] = {}
    if isinstance(output, Mapping):
        items = dict(output)
    elif hasattr(output, "_asdict"):
        items = output._asdict()
    elif isinstance(output, tuple | list):
        items = {f"output_{place}": item for place, item in enumerate(output)}
    other = next(
        (f"{name!r} is {type_name(item)}" for name, item in items.items() if not isinstance(item, Tensor)), None
    )
    if other is not None or not items:
        raise TaskError(
            f"the model's output is {type_name(output)}" + (f" whose {other}" if other else ""),
            expected="a tensor, or tensors by name",
            fix="give the Task a predict(model, inputs) that picks one",
        )
    return items


def predict(
    task: Task,
    model: nn.Module,
    x: Any,
    facts: TaskFacts,
    device: torch.device,
    progress: Progress | None = None,
    *,
    reader: InputReader | None = None,
    say: Say = warnings.warn,
) -> np.ndarray | dict[str, np.ndarray]:
    """Returns the model's output for each sample of `x`, on the CPU; see `hotloop.predict`.

    Args:
        reader: the run's reader of input files, whose statistics also apply to arrays.
    """
    columns = _read_inputs(task, Path(x), reader, say) if isinstance(x, str | Path) else input_columns(x)
    total = count_samples(columns)
    size = inference_batch_size(facts.batch_size, 4 * sum(math.prod(shape) for shape in facts.inputs))
    gathered: dict[str, np.ndarray] = {}
    alone = True
    with preserve_generators(device), torch.no_grad():
        for start, output in _outputs(task, model, columns, size, facts, device, reader):
            alone = isinstance(output, Tensor)
            for name, rows in ({"": output} if isinstance(output, Tensor) else output).items():
                values = to_numpy(rows)
                if name not in gathered:
                    gathered[name] = np.empty((total, *values.shape[1:]), values.dtype)
                gathered[name][start : start + len(values)] = values
            if progress is not None:
                progress(min(start + size, total), total)
    return gathered[""] if alone else gathered


def _outputs(
    task: Task,
    model: nn.Module,
    columns: Any,
    size: int,
    facts: TaskFacts,
    device: torch.device,
    reader: InputReader | None,
) -> Iterator[tuple[int, Tensor | dict[str, Tensor]]]:
    """Yields `(index of the first sample, output)` of each batch; random draws follow from the Task's seed."""
    prepare = task.prepare or (reader.prepare if reader is not None else prepare_function(task))
    streams, owned = RandomStreams(task.seed, device), OwnedGenerators({**task.owners(model), "prepare": prepare})
    owned.refresh()
    for number, start in enumerate(range(0, count_samples(columns), size)):
        batch = cut_rows(columns, start, start + size)
        _check_finite(batch, start)
        owned.seed(streams.reseed("predict", number))
        prepared = batch if prepare is None else _call_on_new_inputs(batch, facts, prepare, batch)
        if start == 0 and task.loss is not None:
            _check_dimensions(prepared, facts)
        output = _call_on_new_inputs(batch, facts, model_output, task, model, to_device(prepared, device))
        _check_rows(output, count_samples(batch))
        yield start, output


def to_numpy(output: Tensor) -> np.ndarray:
    """Returns an output as a NumPy array; floating-point numbers become float32."""
    wanted = torch.float32 if output.is_floating_point() else output.dtype
    return output.detach().to("cpu", wanted).numpy()


def _read_inputs(task: Task, path: Path, reader: InputReader | None, say: Say) -> Any:
    """Returns the inputs in a file: by name if the Task's data has names, else in the file's order."""
    path = path.expanduser()
    if reader is not None and not is_array_file(path):
        return reader.read(path, say)
    found = read_arrays(path)
    if not isinstance(found, dict) or isinstance(first_inputs(task, 1), Mapping):
        return found
    return tuple(found.values()) if len(found) != 1 else next(iter(found.values()))


def input_columns(x: Any) -> Any:
    """Returns the inputs as an array, a tuple or a dict of arrays; conversion to tensors happens per batch."""
    if isinstance(x, Mapping):
        return {name: _array(value) for name, value in x.items()}
    return tuple(_array(value) for value in x) if isinstance(x, tuple) else _array(x)


def _array(value: Any) -> Any:
    return value if isinstance(value, Tensor | np.ndarray) else as_tensor(value, "x")


def cut_rows(columns: Any, start: int, stop: int) -> Any:
    """Returns samples as new CPU tensors: a `prepare` may change them in place."""
    if isinstance(columns, dict):
        return {name: _rows(value, start, stop, f"x[{name!r}]") for name, value in columns.items()}
    if isinstance(columns, tuple):
        return tuple(_rows(value, start, stop, f"x[{place}]") for place, value in enumerate(columns))
    return _rows(columns, start, stop, "x")


def _rows(array: Any, start: int, stop: int, name: str) -> Tensor:
    return as_tensor(array[start:stop], name).clone()


def count_samples(columns: Any) -> int:
    """Returns the number of samples.

    Raises:
        DataError: no samples, a scalar, or unequal numbers.
    """
    arrays = list(columns.values()) if isinstance(columns, dict) else columns
    arrays = arrays if isinstance(arrays, tuple | list) else [arrays]
    if any(array.ndim == 0 for array in arrays):
        raise DataError("x is a single number", expected="an array whose first dimension counts the samples")
    lengths = [len(array) for array in arrays]
    if len(set(lengths)) > 1:
        raise DataError(
            f"x has arrays of {', '.join(map(str, lengths))} samples",
            expected="the same number",
            fix="check that they belong together",
        )
    if not lengths or not lengths[0]:
        raise DataError("x is empty", expected="one sample or more", fix="check how it was made")
    return lengths[0]


def _check_finite(batch: Any, start: int) -> None:
    for tensor in tree_tensors(batch):
        finite = torch.isfinite(tensor).flatten(1).all(dim=1) if tensor.ndim > 1 else torch.isfinite(tensor)
        if not finite.all():
            first = start + int((~finite).nonzero()[0])
            raise DataError(
                f"sample {first} of x has NaN or infinity",
                expected="finite numbers",
                fix="remove or replace such samples",
            )


def _check_dimensions(prepared: Any, facts: TaskFacts) -> None:
    """Rejects inputs with another number of dimensions, which some models accept with wrong results."""
    if isinstance(prepared, Mapping):
        return
    given = [list(tensor.shape[1:]) for tensor in tree_tensors(prepared)]
    trained = facts.inputs[: len(given)] if len(given) < len(facts.inputs) else facts.inputs[:-1] or facts.inputs
    count = max(1, len(facts.inputs) - 1)
    if len(given) != count:
        raise DataError(f"x holds {len(given)} inputs", expected=f"{count}", fix="give what the model takes")
    if [len(shape) for shape in given] != [len(shape) for shape in trained]:
        raise DataError(
            f"samples of x have shape {_format_shapes(given)}",
            expected=f"shape {_format_shapes(trained)}, as in training",
            fix="reshape them",
        )


def _check_rows(output: Tensor | dict[str, Tensor], samples: int) -> None:
    for name, rows in ({"": output} if isinstance(output, Tensor) else output).items():
        if rows.ndim == 0 or len(rows) != samples:
            raise TaskError(
                f"for {samples} samples the model's output {name + ' ' if name else ''}has shape {tuple(rows.shape)}",
                expected=f"one row for each, ({samples}, ...)",
                fix="check the model, or give the Task a predict(model, inputs) that picks one output",
            )


def _call_on_new_inputs(batch: Any, facts: TaskFacts, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls user code on new inputs; an error becomes a line with the shapes of the training."""
    try:
        return function(*arguments)
    except HotloopError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise MemoryExhausted(
                f"the memory ran out on {count_samples(batch)} samples: {describe_error(error)}",
                expected="memory for them",
                fix="free memory, or use a device with more memory, such as --device cpu",
            ) from error
        given = ", ".join(f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape[1:])}" for t in tree_tensors(batch))
        shapes = facts.inputs[:-1] or facts.inputs
        raise DataError(
            f"the model can't take samples {given}: {describe_error(error)}",
            expected=f"samples that are {_format_shapes(shapes)} once prepared, as in training",
            fix="give inputs of the shape and dtype of the training data",
        ) from error


def _format_shapes(shapes: list[list[int]]) -> str:
    return ", ".join(str(tuple(shape)) for shape in shapes)
