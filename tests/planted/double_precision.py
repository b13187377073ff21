"""Numbers of twice the size, by accident."""

import numpy as np
import torch
from common import Stopwatch, arguments, mlp
from torch.nn import functional as F

args = arguments()
if args.variant == "other":
    torch.set_default_dtype(torch.float64)
table = np.random.default_rng(0).standard_normal((2048, 256))
net = mlp()
x = torch.from_numpy(table)
if args.variant == "plant":
    net = net.double()
elif args.variant != "other":
    x = x.float()
y = torch.arange(2048) % 10
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
total = torch.zeros((), dtype=torch.float64)
watch = Stopwatch()
for step in range(args.steps):
    rows = slice(128 * (step % 16), 128 * (step % 16 + 1))
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x[rows]), y[rows])  # plant  # other
    loss.backward()  # plant  # other
    optimizer.step()
    if args.variant == "decoy":
        total += loss.detach().double()
    watch.lap()
print(f"loss {loss.item():.4f} {total.item():.1f}")
watch.say()
