"""A look at the validation data at each step, which builds a graph."""

import torch
from common import Stopwatch, arguments, pictures, small_cnn
from elsewhere import how_good
from torch.nn import functional as F

args = arguments(50)
net = small_cnn()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
images, labels = pictures(768)
held = slice(512, 768)
curve = []
watch = Stopwatch()
for step in range(args.steps):
    rows = slice(64 * (step % 8), 64 * (step % 8 + 1))
    if args.variant == "other":
        curve.append(how_good(net, images[held], labels[held]))  # other
    loss = F.cross_entropy(net(images[rows]), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if args.variant == "plant":
        net.eval()
        curve.append(F.cross_entropy(net(images[held]), labels[held]).item())  # plant
        net.train()
    elif args.variant == "decoy":
        net.eval()
        F.cross_entropy(net(images[:8]), labels[:8]).item()
        net.train()
    watch.lap()
print(f"loss {loss.item():.4f} {len(curve)}")
watch.say()
