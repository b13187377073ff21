"""Helpers of the planted scripts that stand in another file than the training loop."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Scribbles(Dataset):
    """Pictures that are stored as text and read when asked for."""

    def __init__(self, count: int, side: int) -> None:
        self.rows = [" ".join(str((7 * n + k) % 256) for k in range(side * side)) for n in range(count)]
        self.side = side

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:  # other: slow_samples
        values = [int(word) / 255 for word in self.rows[number].split()]  # other: slow_samples
        return torch.tensor(values).view(1, self.side, self.side), number % 10  # other: slow_samples


class Winners(Function):
    """Max pooling by twos that remembers where the winners were."""

    @staticmethod
    def forward(ctx, images: Tensor) -> Tensor:
        taken, places = F.max_pool2d(images, 2, return_indices=True)
        ctx.save_for_backward(places)
        ctx.shape = images.shape
        return taken

    @staticmethod
    def backward(ctx, grads: Tensor) -> Tensor:
        (places,) = ctx.saved_tensors
        n, c, h, w = ctx.shape
        rows = torch.arange(n * c, device=grads.device)[:, None].expand(n * c, places[0, 0].numel())
        total = torch.zeros(n * c, h * w, dtype=grads.dtype)
        won = (rows, places.reshape(rows.shape))
        total.index_put_(won, grads.reshape(rows.shape), accumulate=True)  # other: pool_scatter
        return total.view(ctx.shape)


class Recurrent(nn.Module):
    """A plain recurrent layer, written out."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.inward, self.onward = nn.Linear(inputs, width), nn.Linear(width, width)

    def forward(self, sequence: Tensor) -> Tensor:
        memory = sequence.new_zeros(len(sequence), self.onward.out_features)
        for moment in sequence.unbind(1):  # other: time_steps
            memory = torch.tanh(self.inward(moment) + self.onward(memory))  # other: time_steps
        return memory


def keep_picture(path: Path, grey: Tensor) -> None:
    """Writes an 8-bit grey PNG."""
    height, width = grey.shape
    rows = b"".join(b"\0" + bytes(row) for row in grey.mul(255).byte().tolist())  # other: pictures_each_step

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    body = (
        chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    )  # other: pictures_each_step
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)  # other: pictures_each_step


def hits(net: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """How many of them are told right."""
    with torch.no_grad():
        return (net(images).argmax(1) == labels).sum()  # other: loss_twice


def quality(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    """The loss on pictures that aren't trained on."""
    net.eval()
    with torch.inference_mode():
        losses = [
            F.cross_entropy(net(a), b) for a, b in zip(images.split(64), labels.split(64), strict=True)
        ]  # other: validating
    net.train()
    return float(torch.stack(losses).mean())


def use_cores(many: int) -> None:
    torch.set_num_threads(many)


def smooth(batch: Tensor) -> Tensor:
    """Each picture blurred along its rows."""
    rows = batch.flatten(2).tolist()  # other: through_numpy
    blurred = [
        [[0.5 * (a + b) for a, b in zip(r, r[1:] + r[:1], strict=True)] for r in one] for one in rows
    ]  # other: through_numpy
    return torch.tensor(blurred).view_as(batch)  # other: through_numpy


def padded(samples: list[list[float]]) -> Tensor:
    """Samples of different lengths as one batch, each number looked at."""
    most = 200
    table = torch.zeros(len(samples), most)
    for row, sample in enumerate(samples):
        for at, value in enumerate(sample):
            table[row, at] = min(1.0, value / 97)  # other: collating
    return table


def confused(counts: Tensor, answers: Tensor, targets: Tensor) -> None:
    """Adds which answer was given for which target."""
    best = answers.argmax(1)  # other: metrics_each_step
    classes = answers.shape[1]
    counts += torch.bincount(targets * classes + best, minlength=classes * classes)  # other: metrics_each_step


class Attending(nn.Module):
    """One head that looks back, and sees less of what is further away."""

    def __init__(self, width: int, length: int, *, anew: bool) -> None:
        super().__init__()
        self.asking, self.length, self.anew = nn.Linear(width, 3 * width), length, anew
        self.register_buffer("reach", reach(length))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.asking(x).chunk(3, -1)
        far = reach(self.length) if self.anew else self.reach
        return x + (a @ b.mT + far).softmax(-1) @ c


def reach(length: int) -> Tensor:
    """How much each place sees of each: of what comes later nothing."""
    at = torch.arange(length, dtype=torch.float32)  # other: layers_watched
    back = at[:, None] - at  # other: layers_watched
    angles = back[:, :, None] / 100 ** torch.linspace(0, 1, 8)  # other: layers_watched
    near = torch.cos(angles).sum(-1)  # other: layers_watched
    return near.masked_fill(back < 0, -torch.inf)  # other: layers_watched


def length_of_gradients(net: nn.Module) -> Tensor:
    total = torch.zeros(())
    for parameter in net.parameters():
        assert parameter.grad is not None
        total += parameter.grad.norm() ** 2  # other: weights_read
    return total.sqrt()


def some_batch(data: Dataset) -> list[Tensor]:
    loader = DataLoader(data, 16, shuffle=True)
    return next(iter(loader))  # other: opened_each_step


def described(body: nn.Module, inputs: Tensor) -> Tensor:
    return body(inputs)  # other: unused_gradients


def doubt(net: nn.Module, batch: Tensor) -> Tensor:
    """How unsure the network is."""
    chances = net(batch).softmax(1)  # other: repeated_forward
    return -(chances * chances.log()).sum(1).mean()


def descend(losses: list[Tensor]) -> None:
    for loss in losses:
        loss.backward(retain_graph=loss is not losses[-1])  # other: shared_trunk


def how_good(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    net.eval()
    found = F.cross_entropy(net(images), labels).item()  # other: graded_validation
    net.train()
    return found
