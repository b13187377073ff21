"""What each layer of a Task's model computes, forward and backward, with the shapes of a batch, held against autograd."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from itertools import takewhile
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from hotloop import arrays
from hotloop.core.random.rng import RandomStreams, preserve_generators
from hotloop.core.records.explanation import Explanation, LayerExplanation, MatrixRecord
from hotloop.core.task_parts.module_modes import modules_in_eval, set_training
from hotloop.data.batch_tree import tree_tensors
from hotloop.data.feeds.feed import first_batch
from hotloop.errors import TaskError, call_user_code
from hotloop.explainer.autograd_check import check_call, layer_without_equations
from hotloop.explainer.layers import (
    activations,
    attention,
    convolution,
    linear,
    losses,
    normalization,
    pooling,
    recurrent,
    reductions,
    shape_ops,
)
from hotloop.explainer.layers.equation import Formula
from hotloop.explainer.recorder import TorchCall, TorchCallRecorder, UnrecordedNode
from hotloop.lowering.context import build_model
from hotloop.task import Task, YieldedResult

_OPERATION_EQUATIONS: dict[str, type[Any]] = {
    "adaptive_avg_pool2d": arrays.AveragePool,
    "avg_pool2d": arrays.AveragePool,
    "batch_norm": arrays.BatchNorm,
    "binary_cross_entropy_with_logits": arrays.BinaryCrossEntropy,
    "conv2d": arrays.Conv,
    "cross_entropy_loss": arrays.CrossEntropy,
    "dropout": arrays.Dropout,
    "elu": arrays.ELU,
    "embedding": arrays.Embedding,
    "gelu": arrays.GELU,
    "layer_norm": arrays.LayerNorm,
    "leaky_relu": arrays.LeakyReLU,
    "linear": arrays.Dense,
    "lstm": arrays.LSTM,
    "max_pool2d": arrays.MaxPool,
    "mse_loss": arrays.SquaredError,
    "relu": arrays.ReLU,
    "rnn_tanh": arrays.RNN,
    "sigmoid": arrays.Sigmoid,
    "silu": arrays.SiLU,
    "softmax": arrays.Softmax,
    "softplus": arrays.Softplus,
    "tanh": arrays.Tanh,
}
"""By the name of the torch function."""


def arrays_equations(layers: Iterable[LayerExplanation]) -> dict[str, str]:
    """The matrices of each class of `hotloop.arrays` that does what one of the layers does, by its name."""
    used = [_OPERATION_EQUATIONS[one.operation] for one in layers if one.operation in _OPERATION_EQUATIONS]
    return {one.__name__: docstring_equations(one) for one in used}


def docstring_equations(layer: type[Any]) -> str:
    """The equations in a class's docstring: the block that begins with `forward`, or else the first paragraph."""
    text = inspect.cleandoc(layer.__doc__ or "").splitlines()
    begin = next((at for at, line in enumerate(text) if line.lstrip().startswith("forward ")), 0)
    return inspect.cleandoc("\n".join(takewhile(str.strip, text[begin:])))


FORMULAS: Mapping[str, Formula] = MappingProxyType(
    {
        **shape_ops.FORMULAS,
        **activations.FORMULAS,
        **reductions.FORMULAS,
        **linear.FORMULAS,
        **convolution.FORMULAS,
        **pooling.FORMULAS,
        **normalization.FORMULAS,
        **attention.FORMULAS,
        **recurrent.FORMULAS,
        **losses.FORMULAS,
    }
)
"""By the name of the torch function."""

_SINGLE_ROUNDING, _CANCELLED = 1e-3, 1e-5
"""What the float32 of a whole backward pass may come to: of a parameter's largest gradient, and of the largest of all,
since a sum of gradients may be nothing but rounding, as that of a bias before a batch norm."""


def explain(task: Task, *, batch_size: int | None = None) -> Explanation:
    """The matrices that take part in each layer, forward and backward, for a batch of the Task's training data.

    Each equation is computed in plain matrix operations, in float64, on what the layer got in a real forward pass and on
    the gradient that came back to it, and compared with what torch and autograd compute from the same. Everything
    happens on the CPU.

    Args:
        batch_size: samples in the batch; default the Task's.

    Raises:
        TaskError, DataError: the Task can't compute a loss.
    """
    batch = first_batch(task.roles, batch_size or task.roles.batch_size)
    with preserve_generators():
        model = build_model(task)
        set_training(model, modules_in_eval(model))
        RandomStreams(task.seed).reseed("explain")
        recorder = TorchCallRecorder(model, FORMULAS.__contains__)
        with recorder.record():
            computed = call_user_code("the forward pass", task.compute, model, batch)
        if isinstance(computed, YieldedResult):
            raise TaskError(
                "step yields losses for several optimizers, and explain follows one loss",
                fix="explain a Task of one of the networks",
            )
        loss = computed.loss
        if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
            raise TaskError("the loss is no single number with a gradient", expected="a 0-dim tensor made by the model")
        call_user_code("the backward pass", loss.backward)
        return _explain_call(task, batch, model, recorder)


def _explain_call(task: Task, batch: Any, model: nn.Module, recorder: TorchCallRecorder) -> Explanation:
    layers: list[LayerExplanation] = []
    summed: dict[str, Tensor] = {}
    for one in recorder.calls:
        layer, gradients = _explain_layer(one)
        layers.append(layer)
        for name, gradient in gradients.items():
            summed[name] = summed[name] + gradient if name in summed else gradient
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    largest = max((_largest(value.grad) for value in trained.values() if value.grad is not None), default=0.0)
    unlike = [name for name, value in trained.items() if not _is_consistent(value.grad, summed.get(name), largest)]
    equations = [(layer, one) for layer in layers for one in layer.equations]
    return Explanation(
        task=task.name,
        batch=["x".join(map(str, tensor.shape)) for tensor in tree_tensors(batch)],
        parameters=sum(value.numel() for value in trained.values()),
        layers=layers,
        flops=sum(one.flops for _, one in equations),
        bytes=sum(one.bytes for _, one in equations),
        gradients=(len(trained) - len(unlike), len(trained)),
        unexplained=unlike,
        written=arrays_equations(layers),
        **_worst_equation(layers),
    )


def _explain_layer(one: TorchCall | UnrecordedNode) -> tuple[LayerExplanation, dict[str, Tensor]]:
    if isinstance(one, UnrecordedNode):
        place = one.place
        matrices = [MatrixRecord(name="output", shape=one.shape)]
        notes = ["made by something that can't be looked into"]
        unseen = LayerExplanation(
            module=place.module,
            kind=place.kind,
            operation=one.node,
            call=place.call,
            known=False,
            matrices=matrices,
            notes=notes,
        )
        return unseen, {}
    formula = FORMULAS.get(one.name)
    if formula is None:
        return layer_without_equations(one), {}
    checked = check_call(one, formula, lambda numbers: 4 * numbers)
    return checked.layer, checked.gradients


def _largest(gradient: Tensor) -> float:
    return float(gradient.to_dense().abs().max()) if gradient.numel() else 0.0


def _is_consistent(real: Tensor | None, ours: Tensor | None, largest: float) -> bool:
    """Whether the network's own gradient of a parameter is the sum of what the equations say."""
    if real is None or ours is None:
        return real is None and ours is None
    real = real.to_dense() if real.is_sparse else real
    allowed = _SINGLE_ROUNDING * float(real.abs().max()) + _CANCELLED * largest
    return bool((real.double() - ours).abs().max() <= allowed)


def _worst_equation(layers: list[LayerExplanation]) -> dict[str, Any]:
    """The equation with the largest difference for its size."""
    ratios = [
        (one.difference / one.largest if one.largest else one.difference, f"{layer.module}: {one.result}")
        for layer in layers
        for one in layer.equations
        if one.difference is not None and (one.largest or one.agrees is False)
    ]
    if not ratios:
        return {}
    ratio, name = max(ratios)
    return {"difference": ratio, "worst": name}
