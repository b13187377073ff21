"""A Keras 3 model, on Keras's torch backend.

Run it:

    pip install keras
    hotloop train examples/with_keras.py
"""

import os

os.environ.setdefault("KERAS_BACKEND", "torch")  # before the import: elsewhere its layers are no torch modules

import keras
import torch
from torch import nn

import hotloop


def network() -> keras.Model:
    """For images of shape (batch, 1, 28, 28), as torch orders them.

    Layers whose sizes follow from their input are built with the first batch, before training begins.
    """
    return keras.Sequential(
        [
            keras.layers.Permute((2, 3, 1)),
            keras.layers.Conv2D(16, 5, strides=2, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(10),
        ]
    )


task = hotloop.Task(
    model=network,
    # With `loss`, hotloop tells the model whether this is training, so that dropout and batch norm know what to do.
    # In a `step`, or where a Keras layer is a part of a torch module, that is up to you:
    # model(inputs, training=model.training).
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
    data=hotloop.data.digits(),
    batch_size=64,
    epochs=6,
)
