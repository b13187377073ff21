"""Formats of exported networks: graphs, which run without the model's source, and weights.

A format writes an `ExportSubject` as bytes, and reads bytes back like a program without hotloop.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from hotloop.core.task_parts.models import modules_in_eval, set_training
from hotloop.data.batch_tree import map_tensors, tree_tensors
from hotloop.errors import ExportError, HotloopError, describe_error
from hotloop.inference.predict import model_output
from hotloop.lowering.context import build_model
from hotloop.task import Task

_CAPTURE_SAMPLES = 4
"""Samples in the capture of a graph; torch.export treats a batch of 1 as a constant."""

LoadedModel = Callable[..., Any]
"""Takes the inputs of a file, and returns its output."""


class PredictionModule(nn.Module):
    """Applies `prepare`, the model, and the Task's `predict`."""

    __module__ = "exported"  # the name in graphs

    def __init__(self, task: Task, model: nn.Module, prepare: Callable[[Any], Any] | None) -> None:
        super().__init__()
        self.model = model
        self._task, self._prepare = task, prepare

    def forward(self, *inputs: Any) -> Tensor | dict[str, Tensor]:
        given = inputs[0] if len(inputs) == 1 else inputs
        return model_output(self._task, self.model, given if self._prepare is None else self._prepare(given))


@dataclass(frozen=True)
class ExportSubject:
    """A model to export.

    Attributes:
        model: on the CPU, in evaluation mode.
        prepare: preprocessing in the file; None if the file takes prepared inputs.
        inputs: real samples in the file's form: a tensor, a tuple or a dict of tensors.
        batch_size: fixed number of samples of a graph; None for any.
        weights: the `state_dict` of the model in training mode, before any merge of weights in `eval()`.
    """

    task: Task
    model: nn.Module
    prepare: Callable[[Any], Any] | None
    inputs: Any
    batch_size: int | None = None
    weights: Mapping[str, Any] = field(default_factory=dict)

    @property
    def prediction_module(self) -> PredictionModule:
        return PredictionModule(self.task, self.model, self.prepare)

    @property
    def example(self) -> tuple[Any, ...]:
        """Arguments for the capture of a graph."""
        return self.batch(self.batch_size or _CAPTURE_SAMPLES)

    def batch(self, size: int) -> tuple[Any, ...]:
        """Returns the arguments for a batch of `size` samples; samples repeat."""
        inputs = map_tensors(lambda tensor: tensor[torch.arange(size) % len(tensor)], self.inputs)
        return inputs if isinstance(inputs, tuple) else (inputs,)


class ExportFormat(Protocol):
    """A file format."""

    def write(self, subject: ExportSubject) -> bytes:
        """Returns the file's content."""

    def read(self, content: bytes, subject: ExportSubject) -> LoadedModel:
        """Returns the function that the content alone defines; a weights format also uses the model's source."""


class GraphFormat:
    """A file with the model's operations."""

    def captured(self, subject: ExportSubject) -> ExportedProgram:
        """Returns the captured operations.

        Raises:
            ExportError: torch.export can't capture the model.
        """
        try:
            return _capture(subject)
        except HotloopError:
            raise
        except Exception as error:
            try:
                return _capture(subject, strict=True)  # slower, but traces Python code: len(x) stays symbolic
            except Exception:
                raise _capture_error(subject, error) from error


class Pt2Format(GraphFormat):
    """torch.export: `torch.export.load(file).module()(inputs)`."""

    def write(self, subject: ExportSubject) -> bytes:
        stream = io.BytesIO()
        torch.export.save(self.captured(subject), stream)
        return stream.getvalue()

    def read(self, content: bytes, subject: ExportSubject) -> LoadedModel:
        return torch.export.load(io.BytesIO(content)).module()


class OnnxFormat(GraphFormat):
    """ONNX, for other runtimes and languages."""

    def write(self, subject: ExportSubject) -> bytes:
        missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
        if missing:
            raise ExportError(
                f"an ONNX file needs {' and '.join(missing)}, not installed here",
                expected="ONNX's packages",
                fix='install them with: pip install "hotloop[onnx]"',
            )
        from onnx_ir.passes.common import ClearMetadataAndDocStringPass

        graph = self.captured(subject)
        inputs = tensor_names(subject.inputs, "input")
        outputs = tensor_names(subject.prediction_module(*subject.example), "output")
        try:
            program = torch.onnx.export(graph, dynamo=True, verbose=False, input_names=inputs, output_names=outputs)
            assert program is not None
            ClearMetadataAndDocStringPass()(program.model)  # removes file paths and source lines
            proto = program.model_proto
            _name_batch_dimension(proto.graph)
            return bytes(proto.SerializeToString())
        except Exception as error:
            raise ExportError(
                f"the model can't be written as ONNX: {describe_error(error)}",
                fix="write .pt2, or the weights as .safetensors",
            ) from error

    def read(self, content: bytes, subject: ExportSubject) -> LoadedModel:
        import onnxruntime

        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        names = [port.name for port in session.get_inputs()]

        def run(*inputs: Any) -> list[Tensor]:
            values = [tensor.numpy() for tensor in pytree.tree_leaves(inputs)]
            return [torch.as_tensor(value) for value in session.run(None, dict(zip(names, values, strict=True)))]

        return run


class WeightsFormat:
    """The `state_dict`, for users of the model's source: `model.load_state_dict(torch.load(file))`."""

    def write(self, subject: ExportSubject) -> bytes:
        stream = io.BytesIO()
        torch.save(subject.weights, stream)
        return stream.getvalue()

    def read(self, content: bytes, subject: ExportSubject) -> LoadedModel:
        model = build_model(subject.task)
        set_training(model, modules_in_eval(model))
        model.load_state_dict(self.load(content))
        return replace(subject, model=model.eval()).prediction_module

    def load(self, content: bytes) -> dict[str, Any]:
        return torch.load(io.BytesIO(content), weights_only=True)


class SafetensorsFormat(WeightsFormat):
    """The `state_dict` as safetensors: `model.load_state_dict(safetensors.torch.load_file(file))`."""

    def write(self, subject: ExportSubject) -> bytes:
        state = subject.weights
        other = [name for name, value in state.items() if not isinstance(value, Tensor)]
        if other:
            raise ExportError(
                f"the model's state_dict holds {other[0]!r}, which is no tensor",
                expected="tensors",
                fix="write a .pt file",
            )
        # Shared tensors become copies, which load_state_dict loads without further code.
        own = {name: value.clone().contiguous() for name, value in state.items()}
        try:
            return safetensors.torch.save(own, {"format": "pt"})
        except (SafetensorError, KeyError, ValueError) as error:
            raise ExportError(
                f"the weights can't be written as safetensors: {describe_error(error)}", fix="write a .pt file"
            ) from error

    def load(self, content: bytes) -> dict[str, Any]:
        return safetensors.torch.load(content)


FORMATS: dict[str, ExportFormat] = {
    ".pt2": Pt2Format(),
    ".onnx": OnnxFormat(),
    ".pt": WeightsFormat(),
    ".safetensors": SafetensorsFormat(),
}
"""The formats by file suffix."""


def tensor_names(tree: Any, single: str) -> list[str]:
    """Returns a name for each tensor: a dict's keys, else `single`, or `single_0`, `single_1` and so on."""
    if isinstance(tree, Mapping):
        return [str(name) for name in tree]
    count = len(list(tree_tensors(tree)))
    return [single] if count == 1 else [f"{single}_{place}" for place in range(count)]


def _capture(subject: ExportSubject, *, strict: bool = False) -> ExportedProgram:
    arguments = subject.example
    batch = {0: Dim("batch")}
    shapes = None if subject.batch_size else (pytree.tree_map(lambda _: batch, arguments),)  # of the parameter *inputs
    program = torch.export.export(subject.prediction_module, arguments, dynamic_shapes=shapes, strict=strict)
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # file paths and source lines
    program.example_inputs = pytree.tree_map(torch.zeros_like, program.example_inputs)  # not the training data
    return program


def _capture_error(subject: ExportSubject, error: Exception) -> ExportError:
    """Returns the error with the reason, and the alternative that works."""
    weights = "write the weights as .safetensors"
    prepare = subject.prepare
    if prepare is not None and _can_capture(replace(subject, prepare=None, inputs=prepare(subject.inputs))):
        return ExportError(
            f"prepare can't be captured by torch.export: {describe_error(error)}",
            expected="a prepare of tensor operations, for any number of samples",
            fix="leave it out with --without-prepare (prepare=False), and give prepared inputs to the file",
        )
    if subject.batch_size is None and _can_capture(replace(subject, batch_size=_CAPTURE_SAMPLES)):
        return ExportError(
            "torch.export finds that the model doesn't take every number of samples",
            expected="operations for any number of samples",
            fix=f"give --batch-size N (batch_size=N) for a file that takes N samples at a time, or {weights}",
        )
    return ExportError(f"the model can't be captured by torch.export: {describe_error(error)}", fix=weights)


def _can_capture(subject: ExportSubject) -> bool:
    try:
        _capture(subject)
    except Exception:
        return False
    return True


def _name_batch_dimension(graph: Any) -> None:
    """Names the batch dimension of an ONNX graph `batch` in place of torch's symbol."""
    symbol = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in [*graph.input, *graph.output, *graph.value_info]:
        for dimension in value.type.tensor_type.shape.dim:
            if symbol and dimension.dim_param == symbol:
                dimension.dim_param = "batch"
