"""The usual recipe around a network: parameter groups, a schedule, clipping, an average of the weights, augmentation.

Run it:

    hotloop train examples/recipe.py
    hotloop train examples/recipe.py -p peak=0.01 --epochs 5
"""

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import hotloop
from hotloop.data import compose, random_crop, random_erase


def network() -> nn.Module:
    """For images of shape (1, 28, 28) in ten classes."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32 * 3 * 3, 10),
    )


def optimizer(parameters: hotloop.Parameters) -> torch.optim.Optimizer:
    """AdamW which lets only matrices and kernels decay: biases and norms have one dimension."""
    groups = [
        {"params": parameters.where(lambda name, value: value.ndim > 1), "weight_decay": 0.05},
        {"params": parameters.where(lambda name, value: value.ndim <= 1), "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-3)


def task(peak: float = 5e-3) -> hotloop.Task:
    """`peak` is the highest learning rate."""
    return hotloop.Task(
        model=network,
        loss=nn.CrossEntropyLoss(label_smoothing=0.05),
        optimizer=optimizer,
        # Handwritten digits, 28 x 28, with validation and test samples of their own.
        data=hotloop.data.digits(),
        batch_size=64,
        epochs=12,
        # Up to the peak and down again; `total` is the number of steps in the whole run.
        schedule=lambda optimizer, total: OneCycleLR(optimizer, max_lr=peak, total_steps=total),
        clip_norm=1.0,
        # Evaluation, predictions and exports use this average instead of the last weights.
        average=0.98,
        # Written in tensors, for a whole batch; what befalls a sample depends on the seed, the epoch and the sample.
        augment=compose(random_crop(padding=2), random_erase(4, 10, p=0.3)),
        monitor="validation_accuracy",
    )
