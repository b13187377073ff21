"""Samples that are there, and a batch that is put together in Python."""

import math

import torch
from common import Stopwatch, arguments, mlp
from elsewhere import padded
from torch.utils.data import DataLoader

args = arguments()
lengths = [40 + (7 * n) % 160 for n in range(512)]
rows = [[float((n + k * k) % 97) for k in range(lengths[n])] for n in range(512)]
ready = torch.zeros(512, 200)
for row, values in zip(ready, rows, strict=True):
    row[: len(values)] = torch.tensor(values)
ready = (ready - ready.mean(1, keepdim=True)) / ready.std(1, keepdim=True)


def scaled(samples):
    batch = []
    for sample in samples:
        mean = sum(sample) / len(sample)  # plant
        spread = math.sqrt(sum((value - mean) ** 2 for value in sample) / len(sample))  # plant
        batch.append([(value - mean) / spread for value in sample] + [0.0] * (200 - len(sample)))  # plant
    return torch.tensor(batch)  # plant


def picked(numbers):
    return ready[torch.tensor(numbers)]


loaders = {
    "plant": lambda: DataLoader(rows, batch_size=64, collate_fn=scaled),
    "other": lambda: DataLoader(rows, batch_size=64, collate_fn=padded),
    "clean": lambda: DataLoader(ready, batch_size=None, sampler=[list(range(64))] * 8),
    "decoy": lambda: DataLoader(range(512), batch_size=64, collate_fn=picked),
}
loader = loaders[args.variant]()
net = mlp(200, 768)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
watch, done = Stopwatch(), 0
while done < args.steps:
    for batch in loader:
        optimizer.zero_grad()
        loss = net(batch).square().mean()
        loss.backward()
        optimizer.step()
        watch.lap()
        done += 1
        if done == args.steps:
            break
print(f"loss {loss.item():.4f}")
watch.say()
