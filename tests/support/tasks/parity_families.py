"""Ten architectures with other optimizers and schedules: what parity is fixed on (five), and tried on (five more)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import hotloop
from tests.support.tasks.model_families import (
    BATCH,
    CLASSES,
    LENGTH,
    SAMPLES,
    WORDS,
    Autoencoder,
    Recurrent,
    Residual,
    Transformer,
    elbo,
)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 6 * 6, 24), nn.Tanh(), nn.Linear(24, 12), nn.Linear(12, CLASSES))


def plain_cnn() -> nn.Module:
    """Convolutions with nothing that looks at the batch as a whole."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(8 * 4, CLASSES)
    )


def normed_cnn() -> nn.Module:
    """Two batch normalisations, one of them with a momentum of its own, and dropout."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8, momentum=0.3),
        nn.SiLU(),
        nn.AvgPool2d(2),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(8 * 9, CLASSES),
    )


class Gated(nn.Module):
    """A GRU in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.gru = nn.GRU(8, 6, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(self.words(x))[0].mean(1))  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """Attention with dropout in six places, whose draws have an order."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words, self.drop = nn.Embedding(WORDS, width), nn.Dropout(0.1)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.drop(self.words(x))).mean(1))  # type: ignore[no-any-return]


class Bag(nn.Module):
    """The mean of the words' vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, 12, mode="mean")
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.bag(x)))  # type: ignore[no-any-return]


Optimizer = Callable[..., torch.optim.Optimizer]


def made(kind: type[torch.optim.Optimizer], **settings: Any) -> Optimizer:
    """A factory of optimizers."""
    return lambda parameters: kind(parameters, **settings)  # type: ignore[call-arg]


def one_cycle(optimizer: torch.optim.Optimizer, total: int) -> Any:
    return lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=total)


def cosine(optimizer: torch.optim.Optimizer, total: int) -> Any:
    return lr_scheduler.CosineAnnealingLR(optimizer, total)


def warm_up(optimizer: torch.optim.Optimizer, total: int) -> Any:
    return lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))


def halving(optimizer: torch.optim.Optimizer, total: int) -> Any:
    """Each second epoch."""
    return lr_scheduler.StepLR(optimizer, 2, 0.5)


@dataclass(frozen=True)
class Family:
    """A kind of network, and how it is trained.

    Attributes:
        data: `images` or `text`, with labels; or `next` words.
        fields: of the Task, beside those.
    """

    model: Callable[[], nn.Module]
    data: str
    optimizer: Optimizer
    fields: dict[str, Any] = field(default_factory=dict)


SGD, Adam, AdamW, RMSprop = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop
BY_EPOCH = {"schedule_every": "epoch"}

MORE_FAMILIES: dict[str, Family] = {
    "mlp": Family(mlp, "images", made(SGD, lr=0.1), {"schedule": cosine}),
    "cnn": Family(plain_cnn, "images", made(AdamW, lr=3e-3, weight_decay=0.1), {"schedule": warm_up}),
    "gru": Family(Gated, "text", made(RMSprop, lr=2e-3, momentum=0.5), {"clip_norm": 0.3}),
    "vae": Family(Autoencoder, "images", made(Adam, lr=5e-3), {"step": elbo, "average": 0.95}),
    "tied": Family(
        Transformer,
        "next",
        made(SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
        {"schedule": halving, **BY_EPOCH},
    ),
    "batchnorm": Family(
        normed_cnn, "images", made(SGD, lr=0.05, momentum=0.9, weight_decay=0.01), {"schedule": one_cycle}
    ),
    "residual": Family(Residual, "images", made(Adam, lr=2e-3, amsgrad=True), {"average": 0.9, "clip_value": 0.05}),
    "lstm": Family(Recurrent, "text", made(AdamW, lr=5e-3), {"schedule": halving, **BY_EPOCH}),
    "encoder": Family(Encoder, "text", made(AdamW, lr=2e-3), {"schedule": warm_up, "clip_norm": 0.5}),
    "bag": Family(Bag, "text", made(RMSprop, lr=5e-3, centered=True), {"schedule": cosine}),
}

FIXED_ON = ("mlp", "cnn", "gru", "vae", "tied")
"""Those that the thresholds of parity are fixed on; on the others they are tried."""

TRIED_ON = tuple(name for name in MORE_FAMILIES if name not in FIXED_ON)


def another_family(name: str, **fields: Any) -> hotloop.Task:
    """The Task of one of them, with some fields changed."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(SAMPLES, 3, 6, 6, generator=generator)
    text = torch.randint(0, WORDS, (SAMPLES, LENGTH + 1), generator=generator)
    label = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    family = MORE_FAMILIES[name]
    data = {"images": (images, label), "text": (text[:, :-1], label), "next": (text[:, :-1], text[:, 1:])}[family.data]
    objective = {} if "step" in family.fields else {"loss": nn.CrossEntropyLoss()}
    given: dict[str, Any] = dict(
        model=family.model, optimizer=family.optimizer, data=data, batch_size=BATCH, epochs=20, **objective
    )
    return hotloop.Task(**given | family.fields | fields)
