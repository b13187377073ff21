import torch

import hotloop


def data():
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    return x, x[:, :3].argmax(1)


task = hotloop.Task(
    model=lambda: torch.nn.Linear(6, 3),
    loss=torch.nn.CrossEntropyLoss(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    data=data(),
    batch_size=8,
    epochs=2,
)
