"""Trains on JPEG files that each read decodes anew; prints losses and the random numbers that follow them."""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--samples", type=int, default=1200)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--draw-at", type=int, default=-1)
parser.add_argument("--fail-at", type=int, default=-1)
arguments = parser.parse_args()


class Images(Dataset):
    def __init__(self) -> None:
        files = sorted(arguments.folder.glob("*.jpg"))
        self.samples = [(str(files[row % len(files)]), row % 4) for row in range(arguments.samples)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        if row == arguments.fail_at:
            raise ValueError("planted")
        path, label = self.samples[row]
        with Image.open(path) as file:
            pixels = np.asarray(file.convert("RGB").resize((32, 32)), dtype=np.float32)
        noise = torch.rand(()) if row == arguments.draw_at else 0.0
        return torch.from_numpy(pixels).permute(2, 0, 1) / 255 + noise, label


torch.manual_seed(0)
np.random.seed(0)
loader = DataLoader(Images(), batch_size=8, shuffle=arguments.fail_at < 0)
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 30 * 30, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for epoch in range(arguments.epochs):
    total = 0.0
    for number, (images, labels) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(nn.functional.dropout(images, 0.1)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        if epoch == 1 and number == 20:
            break
    print(f"epoch {epoch}: {total!r}", torch.rand(()).item(), np.random.rand(), flush=True)
