"""A loader that is begun anew for each batch."""

import torch
from common import Stopwatch, arguments, mlp
from elsewhere import some_batch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


def forever(loader):
    while True:
        yield from loader


args = arguments()
net = mlp(8, 256)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=True)
data = TensorDataset(torch.rand(200_000, 8), torch.arange(200_000) % 10)
loader = DataLoader(data, 16, shuffle=True)
batches = forever(loader) if args.variant == "clean" else iter(loader)
watch = Stopwatch()
for _ in range(args.steps):
    if args.variant == "plant":
        rows, labels = next(iter(loader))  # plant
    elif args.variant == "other":
        rows, labels = some_batch(data)
    else:
        rows, labels = next(batches)
    optimizer.zero_grad()
    loss = F.cross_entropy(net(rows), labels)
    loss.backward()
    optimizer.step()
    watch.lap()
print(f"loss {loss.item():.4f}")
watch.say()
