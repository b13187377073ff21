"""Gradients of a network that isn't trained."""

import torch
from common import Stopwatch, arguments, mlp
from elsewhere import described
from torch import nn
from torch.nn import functional as F

args = arguments()
body, head = mlp(256, 512, 128), nn.Linear(128, 10)
optimizer = torch.optim.SGD(head.parameters(), lr=0.01, fused=True)
if args.variant == "clean":
    body.requires_grad_(False)
inputs, labels = torch.rand(1024, 256), torch.arange(1024) % 10
watch = Stopwatch()
for step in range(args.steps):
    rows = slice(64 * (step % 16), 64 * (step % 16 + 1))
    optimizer.zero_grad()
    if args.variant == "other":
        loss = F.cross_entropy(head(described(body, inputs[rows])), labels[rows])
    else:
        features = body(inputs[rows])  # plant
        loss = F.cross_entropy(head(features), labels[rows])
    loss.backward()
    if args.variant == "decoy":  # another update is as good as an optimizer's
        with torch.no_grad():
            for value in body.parameters():
                value -= 0.01 * value.grad
                value.grad = None
    optimizer.step()
    watch.lap()
print(f"loss {loss.item():.4f}")
watch.say()
