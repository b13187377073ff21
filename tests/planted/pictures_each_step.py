"""A picture of the batch is written at each step."""

import tempfile
from pathlib import Path

import torch
from common import Stopwatch, arguments, pictures, small_cnn
from elsewhere import keep_picture
from PIL import Image
from torch.nn import functional as F

args = arguments()
net = small_cnn()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
images, labels = pictures(512)
folder = Path(tempfile.mkdtemp())


def grid(batch):
    return batch.view(4, 8, 28, 28).permute(0, 2, 1, 3).reshape(112, 224)


def log(batch):
    large = grid(batch).repeat_interleave(3, 0).repeat_interleave(3, 1)  # plant
    Image.fromarray(large.mul(255).byte().numpy()).save(folder / "batch.png", optimize=True)  # plant


watch = Stopwatch()
for step in range(args.steps):
    rows = slice(32 * (step % 16), 32 * (step % 16 + 1))
    optimizer.zero_grad()
    loss = F.cross_entropy(net(images[rows]), labels[rows])
    loss.backward()
    optimizer.step()
    if args.variant == "plant" or (args.variant == "decoy" and step == 0):
        log(images[rows])  # plant
    elif args.variant == "other":
        keep_picture(folder / f"{step % 10}.png", grid(images[rows]))  # other
    watch.lap()
for file in folder.iterdir():
    file.unlink()
folder.rmdir()
print(f"loss {loss.item():.4f}")
watch.say()
