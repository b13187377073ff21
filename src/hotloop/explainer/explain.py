"""Explains what each layer of a Task's model computes, forward and backward, and compares it with autograd."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from itertools import takewhile
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from hotloop import arrays
from hotloop.core.random.rng import RandomStreams, preserve_generators
from hotloop.core.records.explanation import Explanation, LayerExplanation, LinearExample, MatrixRecord
from hotloop.core.task_parts.models import modules_in_eval, set_training
from hotloop.data.batch_tree import tree_tensors
from hotloop.data.feeds.feed import first_batch
from hotloop.errors import TaskError, call_user_code
from hotloop.explainer.autograd_check import check_call, layer_without_equations
from hotloop.explainer.layers import (
    activations,
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
"""Classes with the same equations, by the name of the torch function."""


def docstring_equations(layer: type[Any]) -> str:
    """Returns the equations in a class's docstring: the block from `forward` on, else the first paragraph."""
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
        **recurrent.FORMULAS,
        **losses.FORMULAS,
    }
)
"""Formulas by the name of the torch function."""

_SINGLE_ROUNDING, _CANCELLED = 1e-3, 1e-5
"""Tolerances of a float32 backward pass, relative to a parameter's largest gradient and to the largest of all.

The second one is for sums that cancel to rounding errors, as the gradient of a bias before a batch norm.
"""


def explain(task: Task, *, batch_size: int | None = None) -> Explanation:
    """Returns the matrices of each layer, forward and backward, for a batch of the Task's training data.

    Each equation is computed with plain matrix operations, in float64 on the CPU, from the inputs of a real forward
    pass and the gradient of the layer's output. The results are compared with those of torch and autograd on the same
    inputs.

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
    for item in recorder.calls:
        layer, gradients = _explain_layer(item)
        layers.append(layer)
        for name, gradient in gradients.items():
            summed[name] = summed[name] + gradient if name in summed else gradient
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    largest = max((_largest(value.grad) for value in trained.values() if value.grad is not None), default=0.0)
    unlike = [name for name, value in trained.items() if not _is_consistent(value.grad, summed.get(name), largest)]
    equations = [(layer, item) for layer in layers for item in layer.equations]
    used = [_OPERATION_EQUATIONS[one.operation] for one in layers if one.operation in _OPERATION_EQUATIONS]
    return Explanation(
        task=task.name,
        batch=["x".join(map(str, tensor.shape)) for tensor in tree_tensors(batch)],
        parameters=sum(value.numel() for value in trained.values()),
        layers=layers,
        flops=sum(item.flops for _, item in equations),
        bytes=sum(item.bytes for _, item in equations),
        gradients=(len(trained) - len(unlike), len(trained)),
        unexplained=unlike,
        example=linear_example(),
        written={one.__name__: docstring_equations(one) for one in used},
        **_worst_equation(layers),
    )


def _explain_layer(recorded: TorchCall | UnrecordedNode) -> tuple[LayerExplanation, dict[str, Tensor]]:
    if isinstance(recorded, UnrecordedNode):
        place = recorded.place
        matrices = [MatrixRecord(name="output", shape=recorded.shape)]
        notes = ["made by an operation that can't be recorded"]
        unknown = LayerExplanation(
            module=place.module,
            kind=place.kind,
            operation=recorded.node,
            call=place.call,
            known=False,
            matrices=matrices,
            notes=notes,
        )
        return unknown, {}
    formula = FORMULAS.get(recorded.name)
    if formula is None:
        return layer_without_equations(recorded), {}
    return check_call(recorded, formula)


def _largest(gradient: Tensor) -> float:
    return float(gradient.to_dense().abs().max()) if gradient.numel() else 0.0


def _is_consistent(actual: Tensor | None, computed: Tensor | None, largest: float) -> bool:
    """Returns whether a parameter's gradient equals the sum over the equations."""
    if actual is None or computed is None:
        return actual is None and computed is None
    actual = actual.to_dense() if actual.is_sparse else actual
    allowed = _SINGLE_ROUNDING * float(actual.abs().max()) + _CANCELLED * largest
    return bool((actual.double() - computed).abs().max() <= allowed)


def _worst_equation(layers: list[LayerExplanation]) -> dict[str, Any]:
    """Returns the equation with the largest relative difference."""
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


def linear_example() -> LinearExample:
    """Returns the example: whole numbers in X, W, b and T give gradients of few digits."""
    x = torch.tensor([[1.0, 2, 0], [0, 1, 3]], dtype=torch.float64, requires_grad=True)
    w = torch.tensor([[1.0, 0, -1], [2, 1, 0]], dtype=torch.float64, requires_grad=True)
    b = torch.tensor([0.0, 1], dtype=torch.float64, requires_grad=True)
    t = torch.tensor([[0.0, 3], [-1, 4]], dtype=torch.float64)
    z = torch.nn.functional.linear(x, w, b)
    loss = (z - t).square().sum(1).mean() / 2
    by_autograd = torch.autograd.grad(loss, (x, w, b))
    with torch.no_grad():
        dz = (z - t) / len(x)
        outer = dz[:, :, None] * x[:, None, :] + 0.0  # 0.0 in place of -0.0
        by_equations = (dz @ w, dz.T @ x, dz.sum(0))
        pairs = zip(by_equations, by_autograd, strict=True)
        difference = max(float((one - other).abs().max()) for one, other in pairs)
        named = dict(x=x, w=w, b=b, t=t, z=z, dz=dz, outer=outer)
        named |= dict(zip(("dx", "dw", "db"), by_equations, strict=True))
    return LinearExample(**{name: value.tolist() for name, value in named.items()}, difference=difference)
