"""Neural networks written out in array operations: one copy of each layer, on NumPy, CuPy, PyTorch, or any library that
follows the array API standard. It shares no code with autograd, and imports no torch.

Read it in this order: `layer.py` (what a layer is, the chain rule), `layers.py` (dense and its kin), `activations.py`,
`losses.py`, `optimizers.py`, `images.py` (convolution, pooling), `recurrent.py`, and `network.py`, which trains.
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
from hotloop.arrays.images import AveragePool, Conv, MaxPool
from hotloop.arrays.layer import Chain, Layer, Residual
from hotloop.arrays.layers import BatchNorm, Dense, Dropout, Embedding, Flatten, LayerNorm
from hotloop.arrays.losses import BinaryCrossEntropy, CrossEntropy, Loss, SquaredError
from hotloop.arrays.network import LayerTime, Network
from hotloop.arrays.optimizers import SGD, AdaDelta, AdaGrad, Adam, AdamW, Momentum, Nesterov, Optimizer, RMSProp
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
    "Identity",
    "Layer",
    "LayerNorm",
    "LayerTime",
    "LeakyReLU",
    "Loss",
    "MaxPool",
    "Momentum",
    "Nesterov",
    "Network",
    "Optimizer",
    "RMSProp",
    "ReLU",
    "Residual",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "SquaredError",
    "Step",
    "Tanh",
]
