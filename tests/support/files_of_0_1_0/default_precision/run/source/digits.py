import torch
from torch import nn

import hotloop


def data():
    x = torch.randn(24, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    return x, x.flatten(1)[:, :3].argmax(1)


def model():
    hidden = [layer for _ in range(12) for layer in (nn.Linear(8, 8), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8), *hidden, nn.Dropout(0.2), nn.Linear(8, 3))


task = hotloop.Task(
    model=model,
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    augment=hotloop.data.random_flip(),
    average=0.9,
    clip_norm=1.0,
    data=data(),
    validation=data(),
    batch_size=8,
    epochs=2000,
)
