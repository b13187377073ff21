"""Exports a trained network for use without hotloop: a graph (`.pt2`, `.onnx`) or weights (`.pt`, `.safetensors`).

A graph takes the raw inputs of `hotloop predict`, if the Task's `prepare` can be captured, and any number of samples.
The written bytes are read back and run on real samples before they become a file.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.random.rng import preserve_generators
from hotloop.core.records.training import ExportPort, ExportRecord
from hotloop.core.task_parts.models import may_rewrite_weights
from hotloop.data.batch_tree import tree_tensors
from hotloop.errors import ExportError, HotloopError, call_user_code, describe_error
from hotloop.inference.export_formats import (
    FORMATS,
    ExportFormat,
    ExportSubject,
    GraphFormat,
    LoadedModel,
    tensor_names,
)
from hotloop.inference.predict import ChosenWeights, first_inputs, first_samples, model_for_export, prepare_function
from hotloop.task import Task

_CHECKED_SIZES = (1, 4, 7)
"""Numbers of samples in the check of a graph without a fixed batch size."""


def export_weights(
    task: Task,
    model: nn.Module,
    chosen: ChosenWeights,
    path: Path,
    *,
    run: str,
    prepare: bool = True,
    batch_size: int | None = None,
    inputs: Any = None,
    versions: Mapping[str, str],
) -> ExportRecord:
    """Writes a model with the chosen weights to `path`, in the format of its suffix.

    Args:
        inputs: samples for the check, in the form of `predict`; None for the training data's.

    Raises:
        ExportError: unknown format, a model that can't be captured, or a written file with other outputs. Then there is
            no new file.
    """
    form = _format_of(path)
    graph = isinstance(form, GraphFormat)
    if batch_size is not None and batch_size < 1:
        raise ExportError(
            f"batch_size={batch_size}", expected="1 or more", fix="leave it out for any number of samples"
        )
    with preserve_generators(), torch.no_grad(), _silence_exporters():
        subject = _make_subject(task, model, prepare and graph, batch_size if graph else None, inputs)
        if not graph:
            source = model_for_export(task, chosen.state) if may_rewrite_weights(model) else model
            subject = replace(subject, weights=source.state_dict())
        content = form.write(subject)
        loaded = _load_written(form, content, subject, path.name)
        sizes = _CHECKED_SIZES if subject.batch_size is None else (subject.batch_size,)
        differences = [_difference(subject, loaded, size, path.name) for size in sizes]
        inputs, outputs = _ports(subject) if graph else ([], [])
    write_atomic(path, content)
    return ExportRecord(
        run=run,
        file=str(path),
        format=path.suffix.lower().removeprefix("."),
        size_bytes=len(content),
        weights=chosen.weights,
        epoch=chosen.epoch,
        prepare=subject.prepare is not None if graph and prepare_function(task) is not None else None,
        inputs=inputs,
        outputs=outputs,
        batch_sizes=list(sizes),
        difference=max(difference for difference, _ in differences),
        tolerance=max(tolerance for _, tolerance in differences),
        versions=dict(versions),
    )


def _format_of(path: Path) -> ExportFormat:
    form = FORMATS.get(path.suffix.lower())
    if form is None:
        raise ExportError(
            f"{path.name!r} is of no known format",
            expected="a name that ends in " + ", ".join(FORMATS),
            fix="choose .pt2 or .onnx for a file that runs by itself, .pt or .safetensors for weights",
        )
    return form


def _make_subject(
    task: Task, model: nn.Module, with_prepare: bool, batch_size: int | None, given: Any
) -> ExportSubject:
    prepare = prepare_function(task)
    count = max(_CHECKED_SIZES)
    inputs = first_inputs(task, count) if given is None else first_samples(task, given, count)
    if prepare is not None and not with_prepare:
        inputs, prepare = call_user_code("prepare", prepare, inputs), None
    subject = ExportSubject(task, model, prepare, inputs, batch_size)
    try:
        subject.prediction_module(*subject.example)
    except HotloopError:
        raise
    except Exception as error:
        whose = "the training data's inputs" if given is None else "these inputs"
        shapes = ", ".join(str(tuple(tensor.shape[1:])) for tensor in tree_tensors(inputs))
        raise ExportError(
            f"the model can't take {whose}, of shape {shapes}: {describe_error(error)}",
            expected="samples to try the file on, as predict takes them",
            fix="give some by --inputs samples.npy (inputs=samples)",
        ) from error
    return subject


def _load_written(form: ExportFormat, content: bytes, subject: ExportSubject, name: str) -> LoadedModel:
    try:
        return form.read(content, subject)
    except Exception as error:
        raise ExportError(f"{name} can't be loaded again: {describe_error(error)}", fix="try another format") from error


def _difference(subject: ExportSubject, loaded: LoadedModel, size: int, name: str) -> tuple[float, float]:
    """Returns the largest difference between the outputs of the loaded file and the model, and the tolerance."""
    own = pytree.tree_leaves(subject.prediction_module(*subject.batch(size)))
    try:
        given = pytree.tree_leaves(loaded(*subject.batch(size)))
    except Exception as error:
        raise ExportError(
            f"{name}, loaded again, can't run {size} samples: {describe_error(error)}", fix="try another format"
        ) from error
    shapes, wanted = ([tuple(tensor.shape) for tensor in output] for output in (given, own))
    if shapes != wanted:
        raise ExportError(
            f"{name}, loaded again, turns {size} samples into {shapes}", expected=f"{wanted}", fix="try another format"
        )
    differences = [
        (float((value.double() - other.double()).abs().max()), _tolerance(value))
        for value, other in zip(own, given, strict=True)
    ]
    for distance, tolerance in differences:
        if not distance <= tolerance:
            raise ExportError(
                f"{name}, loaded again, differs from the model by {distance:.3g} on {size} samples",
                expected=f"at most {tolerance:.3g}",
                fix="check whether the model draws random numbers, or stores what it learned outside of its state_dict",
            )
    return max(differences)


def _tolerance(output: Tensor) -> float:
    """Half of the digits, since other kernels sum in another order; integers must be equal."""
    if not output.is_floating_point():
        return 0.0
    return float(torch.finfo(output.dtype).eps ** 0.5 * output.double().abs().max().clamp(min=1e-6))


def _ports(subject: ExportSubject) -> tuple[list[ExportPort], list[ExportPort]]:
    batch = subject.batch_size or "batch"
    output = subject.prediction_module(*subject.example)
    return _describe_ports(subject.inputs, "input", batch), _describe_ports(output, "output", batch)


def _describe_ports(tree: Any, alone: str, batch: int | str) -> list[ExportPort]:
    return [
        ExportPort(name=name, dtype=str(value.dtype).removeprefix("torch."), shape=[batch, *value.shape[1:]])
        for name, value in zip(tensor_names(tree, alone), pytree.tree_leaves(tree), strict=True)
    ]


@contextmanager
def _silence_exporters() -> Iterator[None]:
    """Suppresses the advice and the partial graphs that torch's exporters print."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
