"""How many answers are right, told at each step before the backward."""

import torch
from common import Stopwatch, arguments, mlp
from elsewhere import confused
from torch.nn import functional as F

args = arguments()
net = mlp(64, 64, 300)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=True)
x, y = torch.randn(2048, 64), torch.arange(2048) % 300
right, confusion = torch.zeros(()), torch.zeros(300 * 300, dtype=torch.long)
watch = Stopwatch()
for step in range(args.steps):
    rows = slice(256 * (step % 8), 256 * (step % 8 + 1))
    answers, targets = net(x[rows]), y[rows]
    losses = F.cross_entropy(answers, targets, reduction="none")
    if args.variant == "plant" or (args.variant == "clean" and step % 50 == 0):
        best = answers.topk(20).indices  # plant
        right += (best == targets[:, None]).any(1).float().mean()
    elif args.variant == "other":
        confused(confusion, answers, targets)
    elif args.variant == "decoy":
        wrong = answers.detach().topk(20).indices[:, 0] != targets
        losses = losses * wrong
    optimizer.zero_grad()
    losses.mean().backward()
    optimizer.step()
    watch.lap()
print(f"right {right.item():.4f}, {confusion.sum().item()} counted")
watch.say()
