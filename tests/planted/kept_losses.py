"""Losses that are kept with all that led to them."""

import torch
from common import Stopwatch, arguments, pictures, small_cnn
from torch.nn import functional as F

args = arguments()
net = small_cnn()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
images, labels = pictures(512)
losses, total = [], 0.0
watch = Stopwatch()
for step in range(args.steps):
    rows = slice(32 * (step % 16), 32 * (step % 16 + 1))
    optimizer.zero_grad()
    loss = F.cross_entropy(net(images[rows]), labels[rows])  # plant  # other
    loss.backward()  # plant  # other
    optimizer.step()
    if args.variant == "plant":
        losses.append(loss)  # plant
    elif args.variant == "other":
        total = total + loss  # other
    elif args.variant == "clean":
        losses.append(loss.item())
    else:
        losses.append(loss.detach())
    watch.lap()
print(f"mean {float(total + sum(losses)) / args.steps:.4f}")
watch.say()
