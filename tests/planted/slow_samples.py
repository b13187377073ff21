"""Samples that are made one by one, in Python."""

import torch
from common import Stopwatch, arguments, pictures, small_cnn
from elsewhere import Scribbles
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIDE = 28


class Files(Dataset):
    def __init__(self, count):
        self.bytes = [bytes((7 * n + k) % 256 for k in range(SIDE * SIDE)) for n in range(count)]

    def __len__(self):
        return len(self.bytes)

    def __getitem__(self, i):  # plant
        pixels = [self.scaled(value) for value in self.bytes[i]]  # plant
        return torch.tensor(pixels).view(1, SIDE, SIDE), i % 10  # plant

    def scaled(self, value):
        return (value / 255 - 0.5) / 0.25  # plant


class Ready(Files):
    """Decodes everything once, pixel by pixel, and hands out what is there."""

    def __init__(self, count):
        super().__init__(count)
        self.samples = [Files.__getitem__(self, i) for i in range(count)]

    def __getitem__(self, i):
        return self.samples[i]


class Batches(Dataset):
    """Hands out whole batches."""

    def __init__(self, count, size):
        images, labels = pictures(count, SIDE)
        self.batches = list(zip(images.split(size), labels.split(size), strict=True))

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, i):
        return self.batches[i]


args = arguments()
loaders = {
    "plant": lambda: DataLoader(Files(256), batch_size=32, shuffle=True),
    "other": lambda: DataLoader(Scribbles(256, SIDE), batch_size=32, shuffle=True),
    "clean": lambda: DataLoader(Batches(256, 32), batch_size=None, shuffle=True),
    "decoy": lambda: DataLoader(Ready(256), batch_size=32, shuffle=True),
}
loader = loaders[args.variant]()
net = small_cnn()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
criterion = nn.CrossEntropyLoss()
watch, done = Stopwatch(), 0
while done < args.steps:
    for images, labels in loader:
        optimizer.zero_grad()
        loss = criterion(net(images), labels)
        loss.backward()
        optimizer.step()
        watch.lap()
        done += 1
        if done == args.steps:
            break
print(f"loss {loss.item():.4f}")
watch.say()
