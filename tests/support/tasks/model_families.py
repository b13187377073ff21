"""Small Tasks of six families of networks, each with what makes lowering hard: what tests of plans share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotloop

SAMPLES, BATCH, CLASSES, WORDS, LENGTH = 56, 16, 5, 20, 3  # three batches and an incomplete one


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 6 * 6, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def cnn() -> nn.Module:
    """Batch normalisation, whose buffers change, and dropout, which draws anew at each step."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.3),
        nn.Flatten(),
        nn.Linear(8 * 9, CLASSES),
    )


class Residual(nn.Module):
    """A skip connection and group normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.block = nn.Sequential(nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.block(x)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.lstm = nn.LSTM(8, 12, batch_first=True)
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.words(x))[0][:, -1])  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """One block of a GPT; the embedding and the last layer share their weights."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        samples, length = x.shape
        x = self.words(x) + self.places(torch.arange(length, device=x.device))
        parts = self.mix(self.norms[0](x)).chunk(3, -1)
        query, key, value = (part.view(samples, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(samples, length, -1))
        return self.head(x + self.mlp(self.norms[1](x))).transpose(1, 2)  # type: ignore[no-any-return]


class Autoencoder(nn.Module):
    """Draws its hidden values, so that its step has a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3 * 6 * 6, 8), nn.Linear(4, 3 * 6 * 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x.flatten(1)).chunk(2, -1)
        hidden = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(hidden), mean, log_variance


def elbo(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    output, mean, log_variance = model(batch[0])
    error = F.mse_loss(output, batch[0].flatten(1))
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).mean()
    return {"loss": error + 0.01 * divergence, "error": error}


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "residual": Residual,
    "lstm": Recurrent,
    "gpt": Transformer,
    "vae": Autoencoder,
}


def family(name: str, **fields: Any) -> hotloop.Task:
    """The Task of one family, with momentum, clipping, an average of weights and a schedule that moves the momentum."""
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(SAMPLES, 3, 6, 6, generator=generator)
    text = torch.randint(0, WORDS, (SAMPLES, LENGTH + 1), generator=generator)
    label = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    data = {"lstm": (text[:, :-1], label), "gpt": (text[:, :-1], text[:, 1:])}.get(name, (images, label))
    objective: dict[str, Any] = {"step": elbo} if name == "vae" else {"loss": nn.CrossEntropyLoss()}
    given: dict[str, Any] = dict(
        model=FAMILIES[name],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        schedule=lambda optimizer, total: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total),
        data=data,
        batch_size=BATCH,
        epochs=8,
        clip_norm=0.5,
        average=0.9,
        **objective,
    )
    return hotloop.Task(**given | fields)
