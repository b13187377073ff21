"""Keeps its variables, pickles what holds functions, and says what has become of it."""

import pickle

import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.last, self.loss, self.tell = nn.Linear(4, 1), F.mse_loss, print

    def forward(self, inputs):
        return self.last(inputs)


def train(rate=0.01, steps=120):
    config, others = locals(), vars()
    made, sizes = [], set()
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        made.append((F.mse_loss, F.cross_entropy, print))
        model.loss(model(torch.ones(8, 4)), torch.zeros(8, 1)).backward()
        optimizer.step()
        sizes.add(len(pickle.dumps([*model.modules()])))
    print(config, others is config, len(sizes), len(pickle.dumps(made)))


def only_vars(rate=0.01):
    config = vars()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(120):
        optimizer.zero_grad()
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()
    print(config["rate"])


train()
only_vars()
