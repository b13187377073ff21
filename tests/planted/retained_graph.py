"""A graph that is kept for a backward that never comes."""

import torch
from common import Stopwatch, arguments, mlp
from torch.nn import functional as F

args = arguments()
net = mlp()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
x, y = torch.randn(2048, 256), torch.arange(2048) % 10
watch = Stopwatch()
for step in range(args.steps):
    rows = slice(64 * (step % 32), 64 * (step % 32 + 1))
    optimizer.zero_grad()
    answer = net(x[rows])
    loss = F.cross_entropy(answer, y[rows])
    if args.variant == "plant":
        loss.backward(retain_graph=True)  # plant
    elif args.variant == "other":
        torch.autograd.backward([loss], None, True)  # other
    elif args.variant == "decoy":
        loss.backward(retain_graph=True)
        answer.square().mean().mul(0.01).backward()
    else:
        loss.backward()
    optimizer.step()
    watch.lap()
print(f"loss {loss.item():.4f}")
watch.say()
