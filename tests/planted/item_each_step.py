"""The loss is read on the host at each step."""

import numpy as np
import torch
from common import Stopwatch, arguments, mlp
from torch.nn import functional as F

args = arguments()
net = mlp()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
x, y = torch.randn(2048, 256), torch.arange(2048) % 10
settings = {"item": 1.0, "float": 2.0}
total, seen = 0.0, torch.zeros(())
watch = Stopwatch()
for step in range(args.steps):
    rows = slice(64 * (step % 32), 64 * (step % 32 + 1))
    optimizer.zero_grad()
    loss = F.cross_entropy(net(x[rows]), y[rows])
    loss.backward()
    optimizer.step()
    if args.variant == "plant":
        total += loss.item()  # plant
    elif args.variant == "other":
        total += float(loss) / 2  # other
    elif args.variant == "clean":
        seen += loss.detach()
    else:
        total += np.float32(step).item() + sum(value for _, value in settings.items())
        seen += loss.detach()
    watch.lap()
print(f"mean {(total + seen.item()) / args.steps:.4f}")
watch.say()
