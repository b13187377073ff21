"""A look at the validation data at each step."""

import torch
from common import Stopwatch, arguments, pictures, small_cnn
from elsewhere import quality
from torch.nn import functional as F

args = arguments(50)
net = small_cnn()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
images, labels = pictures(1024)
held = slice(768, 1024)
best = 1e9
watch = Stopwatch()
for step in range(args.steps):
    rows = slice(64 * (step % 12), 64 * (step % 12 + 1))
    net.train()
    optimizer.zero_grad()
    loss = F.cross_entropy(net(images[rows]), labels[rows])
    loss.backward()
    optimizer.step()
    if args.variant == "plant":
        net.eval()
        with torch.no_grad():
            found = F.cross_entropy(net(images[held]), labels[held])  # plant
        best = min(best, found.item())
    elif args.variant == "other":
        best = min(best, quality(net, images[held], labels[held]))  # other
    elif args.variant == "decoy" and step % 25 == 24:
        best = min(best, quality(net, images[held], labels[held]))
    watch.lap()
print(f"loss {loss.item():.4f} {best:.4f}")
watch.say()
