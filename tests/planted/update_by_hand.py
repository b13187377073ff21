"""An update that is written by hand, without any optimizer."""

import torch
from common import Stopwatch, arguments
from torch import nn
from torch.nn import functional as F

args = arguments()
net = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.ReLU())], nn.Linear(32, 10))
data, labels = torch.randn(256, 32), torch.arange(256) % 10
weights = list(net.parameters())
moved = [torch.zeros_like(value) for value in weights]
watch = Stopwatch()


def updated() -> None:
    for value, velocity in zip(weights, moved, strict=True):
        velocity.mul_(0.9).add_(value.grad)  # other
        value.add_(velocity, alpha=-0.01)  # other


for step in range(args.steps):
    rows = slice(64 * (step % 4), 64 * (step % 4 + 1))
    loss = F.cross_entropy(net(data[rows]), labels[rows])
    net.zero_grad()
    loss.backward()
    if args.variant == "plant":
        for value in net.parameters():
            value.data = value.data - 0.01 * value.grad.data.clamp(-1, 1)  # plant
    elif args.variant == "other":
        with torch.no_grad():
            updated()
    else:
        with torch.no_grad():
            torch._foreach_add_(weights, [value.grad for value in weights], alpha=-0.01)
    watch.lap()
print(f"loss {loss.item():.4f}")
watch.say()
