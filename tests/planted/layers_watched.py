"""What is worked out in each forward, and no gradient comes back to: statistics of all layers, or how far each place sees."""

import torch
from common import Stopwatch, arguments
from elsewhere import Attending
from torch import nn
from torch.nn import functional as F

LENGTH, WIDTH = 128, 32

args = arguments()
blocks = [Attending(WIDTH, LENGTH, anew=args.variant == "other") for _ in range(2)]
net = nn.Sequential(nn.Linear(8, WIDTH), *blocks, nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 5))
seen = {}


def spread(module, inputs, output):
    flat = output.detach().flatten()
    seen[module] = flat.mean(), flat.std(), flat.abs().median()  # plant


def shape(module, inputs, output):
    seen[module] = tuple(output.shape)


if args.variant in ("plant", "decoy"):
    for part in net:
        part.register_forward_hook(spread if args.variant == "plant" else shape)
optimizer = torch.optim.Adam(net.parameters(), fused=True)
x, y = torch.randn(256, LENGTH, 8), torch.arange(256) % 5
watch = Stopwatch()
for step in range(args.steps):
    rows = slice(32 * (step % 8), 32 * (step % 8 + 1))
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x[rows]).mean(1), y[rows])
    loss.backward()
    optimizer.step()
    watch.lap()
print(f"loss {loss.item():.4f}, {len(seen)} layers seen")
watch.say()
