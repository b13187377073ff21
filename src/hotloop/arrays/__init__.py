"""Neural networks written out in array operations: one copy of each layer, on NumPy, CuPy, PyTorch, or any library that
follows the array API standard. It shares no code with autograd, and imports no torch.

Read it in this order: `layer.py` (what a layer is, the chain rule), `layers.py` (dense and its kin), `activations.py`,
`losses.py`, `optimizers.py`, `images.py` (convolution, pooling), `parts.py`, `recurrent.py`, `graph.py` (what is no chain),
and `network.py`, which trains.
docs/arrays.md tells the same with the matrices.
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
from hotloop.arrays.graph import Graph
from hotloop.arrays.images import AveragePool, Conv, MaxPool
from hotloop.arrays.layer import Chain, Layer, Residual
from hotloop.arrays.layers import BatchNorm, Dense, Dropout, Embedding, Flatten, LayerNorm
from hotloop.arrays.losses import BinaryCrossEntropy, CrossEntropy, Loss, SquaredError
from hotloop.arrays.network import LayerTime, Network
from hotloop.arrays.optimizers import SGD, AdaDelta, AdaGrad, Adam, AdamW, Momentum, Nesterov, Optimizer, RMSProp
from hotloop.arrays.parts import At, Mean, Reshape
from hotloop.arrays.recurrent import LSTM, RNN
from hotloop.arrays.watching import Epoch

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
