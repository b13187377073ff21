"""The network is asked twice about the same batch."""

import torch
from common import Stopwatch, arguments, pictures, small_cnn
from elsewhere import hits
from torch.nn import functional as F

args = arguments()
net = small_cnn()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
images, labels = pictures(1024)
history, right = [], 0
watch = Stopwatch()
for step in range(args.steps):
    rows = slice(64 * (step % 16), 64 * (step % 16 + 1))
    batch, wanted = images[rows], labels[rows]
    optimizer.zero_grad()
    if args.variant == "decoy":
        loss = (F.cross_entropy(net(batch[:32]), wanted[:32]) + F.cross_entropy(net(batch[32:]), wanted[32:])) / 2
    else:
        loss = F.cross_entropy(net(batch), wanted)
    loss.backward()
    optimizer.step()
    if args.variant == "plant":
        history.append(F.cross_entropy(net(batch), wanted).detach())  # plant
    elif args.variant == "other":
        right += hits(net, batch, wanted)
    else:
        history.append(loss.detach())
    watch.lap()
print(f"loss {loss.item():.4f}")
watch.say()
