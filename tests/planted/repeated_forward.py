"""The network is asked for each term of the loss anew."""

import torch
from common import Stopwatch, arguments, mlp
from elsewhere import doubt
from torch import nn
from torch.nn import functional as F

args = arguments()
net = mlp()
if args.variant == "decoy":  # each answer is another one, and their difference is what is trained
    net = nn.Sequential(nn.Dropout(0.3), net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=True)
inputs, labels = torch.rand(1024, 256), torch.arange(1024) % 10
watch = Stopwatch()
for step in range(args.steps):
    rows = slice(64 * (step % 16), 64 * (step % 16 + 1))
    batch, wanted = inputs[rows], labels[rows]
    optimizer.zero_grad()
    answer = net(batch)
    loss = F.cross_entropy(answer, wanted)
    if args.variant == "plant":
        loss = loss + 0.01 * net(batch).pow(2).mean()  # plant
    elif args.variant == "other":
        loss = loss - 0.1 * doubt(net, batch)
    elif args.variant == "decoy":
        loss = loss + F.mse_loss(net(batch), answer)
    else:
        loss = loss + 0.01 * answer.pow(2).mean()
    loss.backward()
    optimizer.step()
    watch.lap()
print(f"loss {loss.item():.4f}")
watch.say()
