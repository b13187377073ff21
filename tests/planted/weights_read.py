"""All weights, or all gradients, are gone through one by one for a single number."""

import torch
from common import Stopwatch, arguments
from elsewhere import length_of_gradients
from torch import nn
from torch.nn import functional as F

args = arguments()
parts = [part for _ in range(60) for part in (nn.Linear(16, 16), nn.Tanh())]
net = nn.Sequential(nn.Linear(64, 16), *parts, nn.Linear(16, 10))
decay = 0.0 if args.variant == "plant" else 1e-4
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, weight_decay=decay, fused=True)
x, y = torch.randn(2048, 64), torch.arange(2048) % 10
lengths = []
watch = Stopwatch()
for step in range(args.steps):
    rows = slice(64 * (step % 32), 64 * (step % 32 + 1))
    loss = F.cross_entropy(net(x[rows]), y[rows])
    if args.variant == "plant":
        loss = loss + 5e-5 * sum(p.pow(2).sum() for p in net.parameters())  # plant
    optimizer.zero_grad()
    loss.backward()
    if args.variant == "other" or (args.variant == "decoy" and step % 50 == 0):
        lengths.append(length_of_gradients(net))
    elif args.variant == "decoy":
        lengths.append(nn.utils.clip_grad_norm_(net.parameters(), 1e3))
    optimizer.step()
    watch.lap()
print(f"loss {loss.item():.4f}, {len(lengths)} lengths")
watch.say()
