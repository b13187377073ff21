"""The matrices of a layer as `hotloop.arrays` writes them out, from the docstring of its class."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from itertools import takewhile
from typing import Any

from hotloop import arrays
from hotloop.explanations import Layer

_OF_OPERATIONS: dict[str, type[Any]] = {
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


def written_out(layers: Iterable[Layer]) -> dict[str, str]:
    """The matrices of each class of `hotloop.arrays` that does what one of the layers does, by its name."""
    used = [_OF_OPERATIONS[one.operation] for one in layers if one.operation in _OF_OPERATIONS]
    return {one.__name__: matrices(one) for one in used}


def matrices(layer: type[Any]) -> str:
    """The equations in a class's docstring: the block that begins with `forward`, or else the first paragraph."""
    text = inspect.cleandoc(layer.__doc__ or "").splitlines()
    begin = next((at for at, line in enumerate(text) if line.lstrip().startswith("forward ")), 0)
    return inspect.cleandoc("\n".join(takewhile(str.strip, text[begin:])))
