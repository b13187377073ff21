"""Two losses of one trunk, each with a backward of its own."""

import torch
from common import Stopwatch, arguments, mlp
from elsewhere import descend
from torch import nn
from torch.nn import functional as F

args = arguments()
trunk, heads = mlp(256, 512, 64), nn.ModuleList(nn.Linear(64, 10) for _ in range(2))
parameters = [*trunk.parameters(), *heads.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.01, fused=True)
inputs, labels = torch.rand(1024, 256), torch.arange(1024) % 10
watch = Stopwatch()
for step in range(args.steps):
    rows = slice(64 * (step % 16), 64 * (step % 16 + 1))
    optimizer.zero_grad()
    features = trunk(inputs[rows])
    first, second = (F.cross_entropy(head(features), labels[rows]) for head in heads)
    if args.variant == "plant":
        first.backward(retain_graph=True)
        second.backward()  # plant
    elif args.variant == "other":
        descend([first, second])
    elif args.variant == "decoy":  # the gradients of each are wanted by themselves, the smaller of both
        first.backward(retain_graph=True)
        one = [None if value.grad is None else value.grad.clone() for value in parameters]
        optimizer.zero_grad()
        second.backward()
        for value, other in zip(parameters, one, strict=True):
            if other is not None:
                value.grad = other if value.grad is None else torch.minimum(value.grad, other)
    else:
        (first + second).backward()
    optimizer.step()
    watch.lap()
print(f"loss {first.item():.4f}")
watch.say()
