"""Much work in very small pieces."""

import torch
from common import Stopwatch, arguments
from torch import nn
from torch.nn import functional as F

FEATURES, HEADS = 64, 32


class Curves(nn.Module):
    """A bent line for each feature."""

    def __init__(self, whole):
        super().__init__()
        self.slope, self.bend = nn.Parameter(torch.ones(FEATURES)), nn.Parameter(torch.ones(FEATURES))
        self.whole = whole

    def forward(self, x):
        if self.whole:
            return self.slope * x + torch.tanh(self.bend * x)
        columns = []
        for i in range(FEATURES):
            column = self.slope[i] * x[:, i] + torch.tanh(self.bend[i] * x[:, i])  # plant
            columns.append(column)
        return torch.stack(columns, 1)


class Heads(nn.Module):
    """Many small matrices, each for a slice of its own."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList([torch.randn(2, 2) for _ in range(HEADS)])

    def forward(self, x):
        return torch.cat(
            [torch.relu(s @ m).mul(0.5).add(s) for s, m in zip(x.split(2, 1), self.parts, strict=True)], 1
        )  # other


class Blocks(nn.Module):
    """A loop of two, over large pieces."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(FEATURES, FEATURES) for _ in range(2)])

    def forward(self, x):
        for part in self.parts:
            x = torch.tanh(part(x))
        return x


args = arguments()
parts = {"plant": lambda: Curves(False), "other": Heads, "clean": lambda: Curves(True), "decoy": Blocks}
net = nn.Sequential(
    nn.Linear(128, FEATURES), parts[args.variant](), nn.Linear(FEATURES, 512), nn.ReLU(), nn.Linear(512, 10)
)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
x, y = torch.randn(4096, 128), torch.arange(4096) % 10
watch = Stopwatch()
for step in range(args.steps):
    rows = slice(256 * (step % 16), 256 * (step % 16 + 1))
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x[rows]), y[rows])
    loss.backward()
    optimizer.step()
    watch.lap()
print(f"loss {loss.item():.4f}")
watch.say()
