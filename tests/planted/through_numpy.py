"""A batch that leaves torch and comes back at each step."""

import numpy as np
import torch
from common import Stopwatch, arguments, pictures, small_cnn
from elsewhere import smooth
from torch.nn import functional as F

args = arguments()
net = small_cnn()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
images, labels = pictures(512)
mean = images.cpu().numpy().mean()


def blurred(batch):
    pixels = batch.detach().cpu().numpy()  # plant
    rows = [np.apply_along_axis(np.convolve, -1, one, [0.25, 0.5, 0.25], "same") for one in pixels]  # plant
    return torch.from_numpy(np.stack(rows).astype(np.float32))  # plant


watch = Stopwatch()
for step in range(args.steps):
    rows = slice(32 * (step % 16), 32 * (step % 16 + 1))
    batch = images[rows]
    if args.variant == "plant":
        batch = blurred(batch)  # plant
    elif args.variant == "other":
        batch = smooth(batch)  # other
    elif args.variant == "decoy":
        batch = torch.from_numpy(batch.numpy()) - float(mean)
    optimizer.zero_grad()
    loss = F.cross_entropy(net(batch), labels[rows])
    loss.backward()
    optimizer.step()
    watch.lap()
print(f"loss {loss.item():.4f}")
watch.say()
