"""Twenty networks of many kinds, with example batches: their steps take from 5 to 400 MB."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.speed.data import ALPHABET
from bench.speed.models import Gpt, Lstm, TextLoss, mlp, resnet18, tutorial_cnn, vgg16

Batch = Callable[[], tuple[Any, ...]]


@dataclass(frozen=True)
class Network:
    """One step to predict: `batch` returns (inputs..., target)."""

    name: str
    model: Callable[[], nn.Module]
    batch: Batch
    loss: Callable[[Any, Any], Tensor] = F.cross_entropy
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.Adam


class Checkpointed(nn.Module):
    """A network whose blocks are computed again in the backward pass."""

    def __init__(self, depth: int = 8, width: int = 256) -> None:
        super().__init__()
        blocks = (
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)
        )
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, words: int = 4000, width: int = 128) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.words(tokens)))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], inputs: int = 40, width: int = 128, layers: int = 2) -> None:
        super().__init__()
        self.layers = kind(inputs, width, layers, batch_first=True, dropout=0.2)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0][:, -1])


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 40))
        self.decoder = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 784), nn.Sigmoid())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(code), mean, log_variance


def vae_loss(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    image, mean, log_variance = output
    divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
    return F.binary_cross_entropy(image, target.flatten(1), reduction="sum") / len(target) + divergence


class Unet(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down1, self.down2 = self._block(3, width), self._block(width, 2 * width)
        self.middle = self._block(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.after2 = self._block(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.after1, self.head = self._block(2 * width, width), nn.Conv2d(width, 4, 1)

    @staticmethod
    def _block(before: int, after: int) -> nn.Module:
        parts = [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        return nn.Sequential(*parts, nn.Conv2d(after, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool2d(first, 2))
        middle = self.middle(F.max_pool2d(second, 2))
        second = self.after2(torch.cat([self.up2(middle), second], 1))
        return self.head(self.after1(torch.cat([self.up1(second), first], 1)))


def _autoencoder() -> nn.Module:
    down = [nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()]
    up = [nn.ConvTranspose2d(32, 16, 3, 2, 1, 1), nn.ReLU(), nn.ConvTranspose2d(16, 1, 3, 2, 1, 1), nn.Sigmoid()]
    return nn.Sequential(*down, *up)


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 3, "intermediate_size": 768}
    return Logits(ViTForImageClassification(ViTConfig(image_size=96, patch_size=16, num_labels=10, **sizes)))


def _mobile() -> nn.Module:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    return Logits(MobileNetV2ForImageClassification(MobileNetV2Config(image_size=96, num_labels=10)))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
    model = BertForSequenceClassification(BertConfig(vocab_size=5000, num_labels=3, **sizes))
    return Logits(model)


class Logits(nn.Module):
    """A transformers model's logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs).logits


def _depthwise() -> nn.Module:
    parts: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1)]
    for _ in range(3):
        parts += [nn.Conv2d(32, 32, 7, padding=3, groups=32), nn.GroupNorm(4, 32), nn.Conv2d(32, 32, 1), nn.SiLU()]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def image_batch(rows: int, *shape: int, classes: int = 10) -> Batch:
    return lambda: (torch.randn(rows, *shape), torch.randint(classes, (rows,)))


def text_batch(rows: int, length: int, words: int, classes: int = 0) -> Batch:
    return lambda: (
        torch.randint(words, (rows, length)),
        torch.randint(classes or words, (rows,) if classes else (rows, length)),
    )


def _same(rows: int, *shape: int) -> Batch:
    def batch() -> tuple[Tensor, Tensor]:
        images = torch.rand(rows, *shape)
        return images, images.clone()

    return batch


_SGD = partial(torch.optim.SGD, lr=0.1)
_MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)

NETWORKS = (
    Network("MLP, SGD", partial(mlp, 784, 512, 512, 10), image_batch(512, 784), optimizer=_SGD),
    Network("MLP, batch 16, Adam", partial(mlp, 784, 1024, 1024, 10), image_batch(16, 784)),
    Network("small CNN, dropout", tutorial_cnn, image_batch(64, 1, 28, 28)),
    Network("ResNet-18, momentum", resnet18, image_batch(16, 3, 32, 32), optimizer=_MOMENTUM),
    Network("VGG of a quarter of the width", partial(vgg16, 16, 256, 64), image_batch(16, 3, 64, 64)),
    Network("MobileNet V2, RMSprop", _mobile, image_batch(16, 3, 96, 96), optimizer=torch.optim.RMSprop),
    Network("depthwise CNN, group norm", _depthwise, image_batch(16, 3, 64, 64), optimizer=torch.optim.AdamW),
    Network("ViT-Tiny, AdamW", _vit, image_batch(8, 3, 96, 96), optimizer=torch.optim.AdamW),
    Network("GPT, context 128", partial(Gpt, 192, 4, 4, 128), text_batch(8, 128, len(ALPHABET)), TextLoss()),
    Network("GPT, context 256, SGD", partial(Gpt, 128, 3, 4, 256), text_batch(8, 256, len(ALPHABET)), TextLoss(), _SGD),
    Network("BERT of 4 layers", _bert, text_batch(16, 64, 5000, 3), optimizer=torch.optim.AdamW),
    Network("LSTM on text", partial(Lstm, 128), text_batch(32, 64, len(ALPHABET)), TextLoss()),
    Network("LSTM of two layers", partial(Recurrent, nn.LSTM), image_batch(64, 50, 40)),
    Network("GRU of two layers", partial(Recurrent, nn.GRU), image_batch(64, 50, 40)),
    Network("VAE", Vae, _same(256, 1, 28, 28), vae_loss),
    Network("U-Net", Unet, lambda: (torch.randn(4, 3, 64, 64), torch.randint(4, (4, 64, 64)))),
    Network("convolutional autoencoder", _autoencoder, _same(64, 1, 28, 28), nn.MSELoss()),
    Network("checkpointed blocks", Checkpointed, image_batch(1024, 256)),
    Network("tied weights, dropout", Tied, text_batch(16, 32, 4000), TextLoss()),
    Network("MLP, Adagrad, wide", partial(mlp, 100, 2000, 10), image_batch(64, 100), optimizer=torch.optim.Adagrad),
)
