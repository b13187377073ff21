"""A sequence that is read moment by moment."""

import torch
from common import Stopwatch, arguments
from elsewhere import Recurrent
from torch import nn
from torch.nn import functional as F

LENGTH, WIDTH = 48, 64


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(8, WIDTH)

    def forward(self, x):
        h = c = x.new_zeros(len(x), WIDTH)
        for t in range(x.shape[1]):  # plant
            h, c = self.cell(x[:, t], (h, c))  # plant
        return h


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, WIDTH, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0][:, -1]


class Steps(nn.Module):
    """Goes through the time steps in Python, but only to count them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8 * LENGTH, 1024), nn.Linear(1024, WIDTH)])

    def forward(self, x):
        lengths = [t + 1 for t in range(x.shape[1])]
        x = x.flatten(1) / len(lengths)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


args = arguments(40)
layers = {"plant": Cells, "other": lambda: Recurrent(8, WIDTH), "clean": Layer, "decoy": Steps}
net = nn.Sequential(layers[args.variant](), nn.Linear(WIDTH, 5))
optimizer = torch.optim.Adam(net.parameters(), fused=True)
x = torch.randn(1024, LENGTH, 8)
y = torch.arange(1024) % 5
watch = Stopwatch()
for step in range(args.steps):
    rows = slice(64 * (step % 16), 64 * (step % 16 + 1))
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x[rows]), y[rows])
    loss.backward()
    optimizer.step()
    watch.lap()
print(f"loss {loss.item():.4f}")
watch.say()
