"""More threads than there are cores."""

import os

import torch
from common import Stopwatch, arguments, mlp
from elsewhere import use_cores
from torch.nn import functional as F

args = arguments(30)
if args.variant == "plant":
    torch.set_num_threads(8 * (os.cpu_count() or 1))
elif args.variant == "other":
    use_cores(12 * (os.cpu_count() or 1))
elif args.variant == "decoy":
    torch.set_num_interop_threads(8)
    torch.set_num_threads(1)
net = mlp()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
x, y = torch.randn(2048, 256), torch.arange(2048) % 10
watch = Stopwatch()
for step in range(args.steps):
    rows = slice(128 * (step % 16), 128 * (step % 16 + 1))
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x[rows]), y[rows])
    loss.backward()
    optimizer.step()
    watch.lap()
print(f"loss {loss.item():.4f}")
watch.say()
