"""Networks that `bench.ddp_by_hand` trains twice, with hotloop and by hand. This file imports torch alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES, CLASSES = 16_384, 10
WORDS, LENGTH, WIDTH = 64, 32, 64
BATCH_SIZES = {"mlp": 256, "convnet": 128, "transformer": 64}


class Transformer(nn.Module):
    """Two layers over sequences of 32 words: 110 thousand parameters, no dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.words(x) + self.places)).transpose(1, 2)


def _mlp() -> nn.Module:
    """784-512-512-10: 0.67 million parameters."""
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, CLASSES))


def _convnet() -> nn.Module:
    """Two convolutions of 32 and 64 channels on 28x28: 29 thousand parameters, no batch norm."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(1024, CLASSES),
    )


_NETWORKS: dict[str, Callable[[], nn.Module]] = {"mlp": _mlp, "convnet": _convnet, "transformer": Transformer}


def network(name: str) -> nn.Module:
    """Returns the network with the same initial parameters on each call."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return _NETWORKS[name]()


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def arrays(name: str) -> tuple[Tensor, Tensor]:
    """Returns inputs and targets: float32 (samples, 784) or (samples, 1, 28, 28), or int64 (samples, 32)."""
    draws = torch.Generator().manual_seed(1)
    if name == "transformer":
        x = torch.randint(WORDS, (SAMPLES, LENGTH), generator=draws)
        return x, (x + x.roll(1, 1)) % WORDS
    x = torch.randn(SAMPLES, 784, generator=draws)
    y = x.unflatten(1, (-1, 56)).sum(2)[:, :CLASSES].argmax(1)
    return (x if name == "mlp" else x.view(-1, 1, 28, 28)), y


loss_of = F.cross_entropy
