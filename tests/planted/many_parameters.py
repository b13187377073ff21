"""An update that goes from parameter to parameter."""

import torch
from common import Stopwatch, arguments, mlp
from torch import nn
from torch.nn import functional as F

args = arguments()
deep = nn.Sequential(
    nn.Linear(64, 16), *(part for _ in range(80) for part in (nn.Linear(16, 16), nn.Tanh())), nn.Linear(16, 10)
)
net = mlp(64, 512) if args.variant == "decoy" else deep
x, y = torch.randn(2048, 64), torch.arange(2048) % 10
watch = Stopwatch()
if args.variant == "plant":
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4, foreach=False)
elif args.variant == "decoy":
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4, foreach=False)
else:
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4, fused=True)
speeds = [torch.zeros_like(p) for p in net.parameters()]


def nudge(parameters):
    with torch.no_grad():
        for p, speed in zip(parameters, speeds, strict=True):
            speed.mul_(0.9).add_(p.grad + 1e-4 * p)  # other
            p -= 1e-3 * speed / (speed.norm() + 1.0)  # other
            p.grad = None


for step in range(args.steps):
    rows = slice(32 * (step % 64), 32 * (step % 64 + 1))
    loss = F.cross_entropy(net(x[rows]), y[rows])
    loss.backward()
    if args.variant == "other":
        nudge(list(net.parameters()))
    else:
        optimizer.step()  # plant
        optimizer.zero_grad()
    watch.lap()
print(f"loss {loss.item():.4f}")
watch.say()
