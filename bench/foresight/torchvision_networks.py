"""The torchvision networks of pytorch-gpu-benchmark, by timm or written here, and their costs at a batch of 12."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from bench.without_torchvision import imported_timm
from hotloop.core.records.step_costs import StepCosts
from hotloop.profiler.step_costs.trace import trace_step

BATCH = 12

TIMM = {
    "densenet121": "densenet121", "densenet161": "densenet161", "densenet169": "densenet169", "densenet201": "densenet201",
    "mnasnet0_5": "mnasnet_050", "mnasnet1_0": "mnasnet_100", "mobilenet_v2": "mobilenetv2_100",
    "resnet18": "resnet18", "resnet34": "resnet34", "resnet50": "resnet50", "resnet101": "resnet101", "resnet152": "resnet152",
    "resnext50_32x4d": "resnext50_32x4d", "resnext101_32x8d": "resnext101_32x8d",
    "vgg11": "vgg11", "vgg11_bn": "vgg11_bn", "vgg13": "vgg13", "vgg13_bn": "vgg13_bn",
    "vgg16": "vgg16", "vgg16_bn": "vgg16_bn", "vgg19": "vgg19", "vgg19_bn": "vgg19_bn",
    "wide_resnet50_2": "wide_resnet50_2", "wide_resnet101_2": "wide_resnet101_2",
}  # fmt: skip


class Fire(nn.Module):
    def __init__(self, inputs: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Sequential(nn.Conv2d(inputs, squeeze, 1), nn.ReLU(True))
        self.one = nn.Sequential(nn.Conv2d(squeeze, expand, 1), nn.ReLU(True))
        self.three = nn.Sequential(nn.Conv2d(squeeze, expand, 3, padding=1), nn.ReLU(True))

    def forward(self, x):
        x = self.squeeze(x)
        return torch.cat([self.one(x), self.three(x)], 1)


def squeezenet(version: str) -> nn.Module:
    pool = lambda: nn.MaxPool2d(3, 2, ceil_mode=True)  # noqa: E731
    fires = [Fire(*sizes) for sizes in (
        (96 if version == "1_0" else 64, 16, 64), (128, 16, 64), (128, 32, 128), (256, 32, 128),
        (256, 48, 192), (384, 48, 192), (384, 64, 256), (512, 64, 256))]  # fmt: skip
    first = nn.Conv2d(3, 96, 7, 2) if version == "1_0" else nn.Conv2d(3, 64, 3, 2)
    pools = (3, 7) if version == "1_0" else (2, 4)
    layers = [first, nn.ReLU(True), pool()]
    for index, fire in enumerate(fires):
        if index in pools:
            layers.append(pool())
        layers.append(fire)
    layers += [nn.Dropout(0.5), nn.Conv2d(512, 1000, 1), nn.ReLU(True), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers)


def unit(
    inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1, relu: bool = True
) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs)] + [nn.ReLU(True)] * relu


class Shuffle(nn.Module):
    """The block of ShuffleNet v2: half of the channels pass, the others are convolved, then both are interleaved."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        half, self.stride = outputs // 2, stride
        self.first = (
            nn.Sequential(*unit(inputs, inputs, 3, 2, inputs, False), *unit(inputs, half)) if stride == 2 else None
        )
        start = inputs if stride == 2 else half
        self.second = nn.Sequential(*unit(start, half), *unit(half, half, 3, stride, half, False), *unit(half, half))

    def forward(self, x):
        if self.first is None:
            left, right = x.chunk(2, 1)
            x = torch.cat([left, self.second(right)], 1)
        else:
            x = torch.cat([self.first(x), self.second(x)], 1)
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)


def shufflenet(widths: tuple[int, ...]) -> nn.Module:
    layers: list[nn.Module] = [*unit(3, 24, 3, 2), nn.MaxPool2d(3, 2, 1)]
    inputs = 24
    for outputs, repeats in zip(widths, (4, 8, 4), strict=False):
        layers += [Shuffle(inputs, outputs, 2)] + [Shuffle(outputs, outputs, 1) for _ in range(repeats - 1)]
        inputs = outputs
    return nn.Sequential(
        *layers, *unit(inputs, widths[3]), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[3], 1000)
    )


OWN: dict[str, Callable[[], nn.Module]] = {
    "squeezenet1_0": lambda: squeezenet("1_0"),
    "squeezenet1_1": lambda: squeezenet("1_1"),
    "shufflenet_v2_x0_5": lambda: shufflenet((48, 96, 192, 1024)),
    "shufflenet_v2_x1_0": lambda: shufflenet((116, 232, 464, 1024)),
    "shufflenet_v2_x1_5": lambda: shufflenet((176, 352, 704, 1024)),
    "shufflenet_v2_x2_0": lambda: shufflenet((244, 488, 976, 2048)),
}

NETWORKS = (*TIMM, *OWN)


def costs_of(name: str) -> StepCosts:
    """Returns the costs of forward and backward; the benchmark has no update."""
    build = OWN.get(name) or (lambda: imported_timm().create_model(TIMM[name]))
    return trace_step(build, torch.empty(BATCH, 3, 224, 224), device="cuda")


def traced(cache: Path) -> dict[str, StepCosts]:
    """Returns the costs of all networks, from the cache where it has them."""
    stored = json.loads(cache.read_text()) if cache.exists() else {}
    for name in NETWORKS:
        if name not in stored:
            stored[name] = costs_of(name).to_dict()
            cache.parent.mkdir(parents=True, exist_ok=True)
            cache.write_text(json.dumps(stored))
    return {name: StepCosts.from_dict(costs) for name, costs in stored.items()}
