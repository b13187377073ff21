"""A Task's file for studies: small, with parameters of each kind, and with trials that fail."""

STUDIED = """
import resource
import torch
from torch import nn
import hotloop


def task(lr: float = 0.1, width: int = 4, mode: str = "plain") -> hotloop.Task:
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
    y = (x[:, 0] * x[:, 1] > 0).long()
    if mode == "raising":
        raise ValueError("no such mode")
    if mode == "exit":
        raise SystemExit(3)
    if mode == "memory":
        pages = int(open("/proc/self/statm").read().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**28,) * 2)
        x = torch.zeros(2**30)

    def model():
        if mode == "exit in the model":
            raise SystemExit("no model")
        network = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 2))
        if mode == "nan":
            nn.init.constant_(network[0].weight, float("inf"))
        return network

    return hotloop.Task(
        model=model,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        data=(x, y),
        validation=0.25,
        batch_size=15,
        epochs=5,
    )
"""
