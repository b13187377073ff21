"""The workloads' networks in PyTorch, which all peers on PyTorch share."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.speed.data import ALPHABET


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 10, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1960, 100),
        nn.ReLU(),
        nn.Linear(100, 10),
    )


def tutorial_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


def mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for width, following in itertools.pairwise(widths):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Block(nn.Module):
    """Two convolutions and a way past them (He et al., "Deep residual learning", 2016, figure 2)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.past = nn.Identity()
        if stride != 1 or before != after:
            self.past = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.past(x))


def resnet18() -> nn.Module:
    """With a first convolution of 3x3 and no pooling, as for images of 32x32."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    width = 64
    for after, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(width, after, stride), Block(after, after, 1)]
        width = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class Attending(nn.Module):
    """A pre-norm block of a causal transformer (Radford et al., "Language models are unsupervised multitask learners")."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Tokens int64 (B, T) -> logits float32 (B, T, letters); 10.8 M parameters."""

    def __init__(self, width: int = 384, depth: int = 6, heads: int = 6, context: int = 256) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(len(ALPHABET), width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Attending(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, len(ALPHABET))

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(self.tokens(tokens) + places)))


class Lstm(nn.Module):
    """Tokens int64 (B, T) -> logits float32 (B, T, letters)."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.tokens = nn.Embedding(len(ALPHABET), 64)
        self.lstm = nn.LSTM(64, width, batch_first=True)
        self.head = nn.Linear(width, len(ALPHABET))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.tokens(tokens))[0])


def vgg16(width: int = 64, dense: int = 4096, side: int = 224) -> nn.Module:
    """Configuration D of Simonyan and Zisserman, "Very deep convolutional networks", 2015; 134 M parameters for 10 classes
    would be fewer than the published 138 M, so it keeps 1,000."""
    layers: list[nn.Module] = []
    before = 3
    for times, count in ((1, 2), (2, 2), (4, 3), (8, 3), (8, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(before, times * width, 3, padding=1), nn.ReLU()]
            before = times * width
        layers.append(nn.MaxPool2d(2))
    features = before * (side // 32) ** 2
    last = (nn.Linear(features, dense), nn.ReLU(), nn.Dropout(), nn.Linear(dense, dense), nn.ReLU(), nn.Dropout())
    return nn.Sequential(*layers, nn.Flatten(), *last, nn.Linear(dense, 1000))


class TextLoss(nn.Module):
    """Mean cross entropy of each letter's prediction: logits (B, T, letters), letters int64 (B, T)."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())


MODELS = {
    "W1": small_cnn,
    "W2": small_cnn,
    "W3": tutorial_cnn,
    "W4": lambda: mlp(784, 128, 10),
    "W5": lambda: mlp(784, 2048, 2048, 10),
    "W6": resnet18,
    "W7": Gpt,
    "W8": Lstm,
    "W9": vgg16,
}


def build(name: str) -> nn.Module:
    """The network of a workload, with the weights that all peers start from."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]()


def loss_module(name: str) -> type[nn.Module]:
    return TextLoss if name in ("W7", "W8") else nn.CrossEntropyLoss
