"""Targets that are made number by number in Python."""

import torch
from common import Stopwatch, arguments, mlp
from torch.nn import functional as F

args = arguments()
net = mlp(64, 64, 10)
optimizer = torch.optim.Adam(net.parameters(), 1e-3, fused=True)
data, labels = torch.randn(1024, 64), torch.arange(1024) % 10
total = 0.0
watch = Stopwatch()
for step in range(args.steps):
    rows = slice(128 * (step % 8), 128 * (step % 8 + 1))
    if args.variant == "plant":
        target = torch.tensor([[1.0 if one == k else 0.0 for k in range(10)] for one in labels[rows].tolist()])  # plant
    elif args.variant == "other":
        target = torch.zeros(128, 10)
        for number, one in enumerate(labels[rows]):
            target[number, int(one)] = 1.0  # other
    else:
        target = F.one_hot(labels[rows], 10).float()
    loss = F.mse_loss(net(data[rows]).softmax(1), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    total += loss.item()
    if args.variant == "decoy":
        total += sum([k / 10 for k in range(10)])
    watch.lap()
print(f"loss {total:.4f}")
watch.say()
