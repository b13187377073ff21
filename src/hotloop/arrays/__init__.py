"""Neural networks in array operations, without autograd and without torch.

Each layer runs on NumPy, CuPy, PyTorch, or any other library of the array API standard.

To be read in this order: `layer.py` (the chain rule), `dense.py`, `activations.py`, `losses.py`,
`optimizers.py`, `conv.py` (convolution, pooling), `reshape.py`, `recurrent.py`, `graph.py`, and `network.py`, which trains.
docs/how-to/arrays.md explains the matrices.
"""

from hotloop.arrays.activations import (
    ELU,
    GELU,
    Identity,
    LeakyReLU,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Step,
    Tanh,
)
from hotloop.arrays.conv import AveragePool, Conv, MaxPool
from hotloop.arrays.dense import BatchNorm, Dense, Dropout, Embedding, Flatten, LayerNorm
from hotloop.arrays.graph import Graph
from hotloop.arrays.layer import Chain, Layer, Residual
from hotloop.arrays.losses import BinaryCrossEntropy, CrossEntropy, Loss, SquaredError
from hotloop.arrays.network import Epoch, LayerTime, Network
from hotloop.arrays.optimizers import SGD, AdaDelta, AdaGrad, Adam, AdamW, Momentum, Nesterov, Optimizer, RMSProp
from hotloop.arrays.recurrent import LSTM, RNN
from hotloop.arrays.reshape import At, Mean, Reshape

__all__ = [
    "ELU",
    "GELU",
    "LSTM",
    "RNN",
    "SGD",
    "AdaDelta",
    "AdaGrad",
    "Adam",
    "AdamW",
    "At",
    "AveragePool",
    "BatchNorm",
    "BinaryCrossEntropy",
    "Chain",
    "Conv",
    "CrossEntropy",
    "Dense",
    "Dropout",
    "Embedding",
    "Epoch",
    "Flatten",
    "Graph",
    "Identity",
    "Layer",
    "LayerNorm",
    "LayerTime",
    "LeakyReLU",
    "Loss",
    "MaxPool",
    "Mean",
    "Momentum",
    "Nesterov",
    "Network",
    "Optimizer",
    "RMSProp",
    "ReLU",
    "Reshape",
    "Residual",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "SquaredError",
    "Step",
    "Tanh",
]
