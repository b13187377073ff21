"""Tasks that are not easy to share: everything that looks at a batch as a whole, or at chance, or counts unevenly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hotloop


def _drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Images(nn.Module):
    """Batch norms, dropout of whole channels and of single numbers, a layer that no step uses, noise on a weight."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, dtype=dtype, bias=False)  # one before a norm would have no gradient but noise
        self.norm = nn.BatchNorm2d(6, dtype=dtype)
        self.channels = nn.Dropout2d(0.2)
        self.hidden = nn.Linear(6 * 36, 16, dtype=dtype, bias=False)
        self.flat = nn.BatchNorm1d(16, dtype=dtype, momentum=None)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(16, 4, dtype=dtype)
        self.unused = nn.Linear(3, 3, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.native_dropout(x, 0.1, self.training)[0]  # as GPUs have it
        x = self.channels(torch.relu(self.norm(self.first(x)))).flatten(1)
        noise = 0.01 * torch.randn_like(self.last.weight)
        hidden = self.drop(torch.relu(self.flat(self.hidden(x))))
        return nn.functional.linear(hidden, self.last.weight + noise, self.last.bias)


def images(dtype: torch.dtype, samples: int = 3 * 128 + 37, **fields: Any) -> hotloop.Task:
    """Three whole batches of 128 and an incomplete one; Adam, clipping, a schedule and an average of the weights."""
    x = torch.randn(samples, 1, 8, 8, generator=_drawn(1), dtype=torch.float64)
    y = x[:, 0, :2, :2].flatten(1).argmax(1)
    given: dict[str, Any] = dict(
        model=lambda: Images(dtype),
        loss=nn.CrossEntropyLoss(label_smoothing=0.1),
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
        schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40),
        data=(x.to(dtype), y),
        validation=50,
        batch_size=128,
        clip_norm=0.5,
        average=0.9,
        epochs=6,
    )
    return hotloop.Task(**given | fields)


def tokens(dtype: torch.dtype) -> hotloop.Task:
    """Sequences of which some count nothing at all, with weights for classes; the last batch is of a single one."""
    x = torch.randint(0, 11, (25, 7), generator=_drawn(2))
    y = (x + x.roll(1, 1)) % 5
    y[torch.rand(25, 7, generator=_drawn(3)) < 0.4] = -100
    y[::3] = -100
    y[:, 0][1::3] = 1

    def model() -> nn.Module:
        return nn.ModuleDict({"words": nn.Embedding(11, 8, dtype=dtype), "scores": nn.Linear(8, 5, dtype=dtype)})

    weights = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0], dtype=dtype)

    def step(model: Any, batch: Any) -> dict[str, torch.Tensor]:
        scores = model["scores"](torch.dropout(model["words"](batch[0]), 0.2, model.training))
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), batch[1].flatten(), weights.to(scores.device))
        hits = weight(batch, scores.argmax(2) == batch[1]) / weight(batch).clamp(min=1e-9)
        return {"loss": loss, "accuracy": hits}

    def weight(batch: Any, which: Any = True) -> torch.Tensor:
        counted = (batch[1] != -100) & which
        return torch.where(counted, weights.to(counted.device)[torch.where(counted, batch[1], 0)], 0.0).sum()

    return hotloop.Task(
        model=model,
        step=step,
        weight=weight,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9),
        data=list(zip(x, y, strict=True)),  # loaded sample by sample
        batch_size=8,
        epochs=6,
    )


CASES: dict[str, Callable[[torch.dtype], hotloop.Task]] = {"images": images, "tokens": tokens}
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
