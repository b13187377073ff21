"""What each rewrite of the step brings, in networks that no other bench has: compiled with it, against compiled without.

python -m bench.rewrites                    each rewrite in all networks that have something for it, three or more, and all
                                            of them together; a compilation for each, so some minutes
python -m bench.rewrites --networks lenet --rewrites all --seconds 20
python -m bench.rewrites --device cuda      those that are for a GPU, there
python -m bench.rewrites --record           writes the figures to claims/ as well

The exit code is 1 where a rewritten step failed or is broken.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hotloop
from bench.claim import write_claim
from hotloop.core.hardware.devices import check_device
from hotloop.core.records.race import Timing
from hotloop.errors import DeviceError
from hotloop.lowering.build import lower
from hotloop.lowering.rewrites import GPU_REWRITES, REWRITE_FUNCTIONS, REWRITES
from hotloop.parity.proof import prove
from hotloop.plan import Plan
from hotloop.tuning.races.measure import Contender, measure

_CLASSES = 10
PLANS = {
    "cpu": Plan(compile="package", device="cpu"),
    "cuda": Plan(compile="step", device="cuda", residency="device", graphs=32),
}
"""What each device's steps are compiled by."""

NOT_ON = {"cpu": {"mm_as_sum", "mm_in_parts"}, "cuda": {"mm_by_onednn", "draw_by_words"}}


def lenet() -> nn.Sequential:
    """As in LeCun et al. (Gradient-based learning applied to document recognition, 1998), with ReLU and max pooling."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, _CLASSES)),
    )


def small_vgg() -> nn.Sequential:
    """Two blocks of two convolutions each, on colour images (after Simonyan and Zisserman, 2015)."""
    layers: list[nn.Module] = []
    for given, made in ((3, 16), (16, 32)):
        layers += [nn.Conv2d(given, made, 3, padding=1), nn.ReLU(inplace=True)]
        layers += [nn.Conv2d(made, made, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 64, 64), nn.ReLU(), nn.Linear(64, _CLASSES))


class Residual(nn.Module):
    """A stem of convolution, normalisation, ReLU and pooling, and one residual block (after He et al., 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True))
        self.pool = nn.MaxPool2d(2)
        self.block = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True))
        self.head = nn.Linear(16, _CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(self.stem(images))
        return self.head((x + self.block(x)).mean((2, 3)))  # type: ignore[no-any-return]


def colour() -> nn.Sequential:
    """Two convolutions, each pooled, on colour images."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 64, _CLASSES)),
    )


def spectrogram() -> nn.Sequential:
    """On pictures of sound, frequencies by times, pooled more along time."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d((2, 4))),
        *(nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(16 * 16 * 8, _CLASSES)),
    )


def digits() -> nn.Sequential:
    """As it was long the example of PyTorch for MNIST: pooled before the ReLU, with dropout of whole channels."""
    return nn.Sequential(
        *(nn.Conv2d(1, 10, 5), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Conv2d(10, 20, 5), nn.Dropout2d(), nn.MaxPool2d(2), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(320, 50), nn.ReLU(), nn.Dropout(), nn.Linear(50, _CLASSES)),
    )


def overlapping() -> nn.Sequential:
    """Convolutions with overlapping pooling (after Krizhevsky, Sutskever and Hinton, ImageNet classification, 2012)."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(32, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Flatten(), nn.Linear(32 * 49, _CLASSES)),
    )


def stem() -> nn.Sequential:
    """How a ResNet for photographs begins, with one block after it (He et al., 2016)."""
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(3, 2, 1)),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, _CLASSES)),
    )


class Mixed(nn.Module):
    """Layers that mix patches, then features, in turn (after Tolstikhin et al., MLP-Mixer, 2021)."""

    def __init__(self, patches: int = 16, width: int = 192, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, width, 7, stride=7)
        self.over_patches, self.over_features = (
            nn.ModuleList(
                nn.Sequential(
                    nn.LayerNorm(width), *turned, nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size)
                )
                for _ in range(blocks)
            )
            for size, turned in ((patches, [Turned()]), (width, []))
        )
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).mT
        for patches, features in zip(self.over_patches, self.over_features, strict=True):
            x = x + patches(x).mT
            x = x + features(x)
        return self.head(x.mean(1))  # type: ignore[no-any-return]


class Turned(nn.Module):
    """The last two dimensions the other way round."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mT


def recommending() -> nn.Sequential:
    """A wide network on a bag of clicks, as for recommendations (after Covington, Adams and Sargin, 2016)."""
    layers: list[nn.Module] = [nn.Flatten()]
    for given, made in ((3072, 1024), (1024, 512), (512, 256)):
        layers += [nn.Linear(given, made), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, _CLASSES))


class Tabular(nn.Module):
    """Residual blocks of linear layers (after Gorishniy et al., Revisiting deep learning models for tabular data, 2021)."""

    def __init__(self, features: int = 768, width: int = 256, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Flatten(), nn.Linear(features, width))
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.2)),
                *(nn.Linear(width, width), nn.Dropout(0.1)),
            )
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)  # type: ignore[no-any-return]


def perceptron() -> nn.Sequential:
    """Two hidden layers, all with dropout (after Srivastava et al., Dropout, 2014)."""
    return nn.Sequential(
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(784, 256), nn.ReLU(), nn.Dropout(0.5)),
        *(nn.Linear(256, 256), nn.ReLU(), nn.Dropout(0.5), nn.Linear(256, _CLASSES)),
    )


class Rows(nn.Module):
    """A transformer's encoder that reads the rows of an image, with dropout on attention too (after Vaswani et al., 2017)."""

    def __init__(self, rows: int = 28, width: int = 64) -> None:
        super().__init__()
        self.embed, self.places = nn.Linear(rows, width), nn.Parameter(torch.zeros(rows, width))
        layers = (nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True) for _ in range(2))
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(width, _CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(images[:, 0]) + self.places).mean(1))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Network:
    """One to try rewrites in.

    Attributes:
        shape: of an image (channels, rows, columns).
        rewrites: those that find something in its step.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, int, int]
    rewrites: tuple[str, ...]
    batch_size: int = 32

    def asked(self, which: Sequence[str], device: str = "cpu") -> list[str]:
        """Those of `which` to try here; all together where some of them are for it."""
        able = [one for one in self.rewrites if one not in NOT_ON[device]]
        together = not (REWRITE_FUNCTIONS if device == "cpu" else GPU_REWRITES).keys().isdisjoint(able)
        return [one for one in which if one in able or (one == "all" and together)]


_SMALL, _LONG = ("mm_as_sum",), ("mm_as_sum", "mm_in_parts")
"""Products that are small, and some of many terms, too."""
_POOLED = ("pool_as_max", "conv_in_pool")

NETWORKS = {
    "lenet": Network(lenet, (1, 28, 28), (*_POOLED, "mm_by_onednn", *_SMALL)),
    "small_vgg": Network(small_vgg, (3, 32, 32), ("pool_as_max", "mm_by_onednn", *_LONG)),
    "residual": Network(Residual, (3, 32, 32), ("pool_as_max", *_SMALL)),
    "colour": Network(colour, (3, 32, 32), (*_POOLED, *_LONG)),
    "spectrogram": Network(spectrogram, (1, 64, 64), (*_POOLED, *_LONG)),
    "digits": Network(digits, (1, 28, 28), (*_POOLED, "draw_by_words", *_SMALL)),
    "overlapping": Network(overlapping, (3, 32, 32), _LONG),
    "stem": Network(stem, (3, 64, 64), _SMALL),
    "mixed": Network(Mixed, (1, 28, 28), ("mm_by_onednn", *_LONG)),
    "recommending": Network(recommending, (3, 32, 32), ("mm_by_onednn", *_LONG)),
    "tabular": Network(Tabular, (3, 16, 16), ("mm_by_onednn", "draw_by_words", *_LONG)),
    "perceptron": Network(perceptron, (1, 28, 28), ("mm_by_onednn", "draw_by_words", *_LONG)),
    "rows": Network(Rows, (1, 28, 28), ("mm_by_onednn", "draw_by_words", *_LONG)),
}


def task_of(name: str, samples: int = 2048, batch_size: int | None = None) -> hotloop.Task:
    """A network on made-up images with a class that can be learned."""
    network = NETWORKS[name]
    images = torch.randn(samples, *network.shape, generator=torch.Generator().manual_seed(1))
    return hotloop.Task(
        name=name,
        model=network.make,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        data=(images, images.flatten(1)[:, :_CLASSES].argmax(1)),
        batch_size=batch_size or network.batch_size,
        seed=0,
    )


def measured(name: str, which: Sequence[str], seconds: float, device: str = "cpu") -> list[dict[str, Any]]:
    """Each rewrite of one network: how many times as fast as without it, with the 99 % interval, and its parity."""
    plans = {rewrites: PLANS[device].with_axes(rewrites=rewrites) for rewrites in ["none", *which]}
    task = task_of(name)
    entrants = [Contender(key, lambda plan=plan: lower(task, plan), plan) for key, plan in plans.items()]  # type: ignore[misc]
    found = measure(entrants, "none", steps=100_000, time_limit_s=seconds)
    return [_row(task, name, one, plans[one.name]) for one in found.plans]


def _row(task: hotloop.Task, name: str, timing: Timing, plan: Plan) -> dict[str, Any]:
    figures = timing.model_dump(include={"step_ms", "ratio", "ratio_low", "ratio_high", "verdict", "failure"})
    row = {"network": name, "rewrites": timing.name, **figures}
    if timing.failure is None:
        row["parity"] = prove(task, plan).parity
    print(row, flush=True)
    return row


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--rewrites", default=",".join([*REWRITES, "all"]))
    parser.add_argument("--device", choices=PLANS, default="cpu")
    parser.add_argument("--seconds", type=float, default=40.0, help="of racing, for each network")
    parser.add_argument("--record", action="store_true", help="write a claim")
    given = parser.parse_args(arguments)
    for kind, asked, known in (("network", given.networks, NETWORKS), ("rewrite", given.rewrites, (*REWRITES, "all"))):
        for name in asked.split(","):
            if name not in known:
                parser.error(f"{name} is no {kind}; expected some of {', '.join(known)}")
    try:
        check_device(given.device)
    except DeviceError as error:
        parser.error(str(error))
    return given


def main() -> int:
    given = parsed()
    which, rows = given.rewrites.split(","), []
    for name in given.networks.split(","):
        if asked := NETWORKS[name].asked(which, given.device):
            rows += measured(name, asked, given.seconds, given.device)
        else:
            print(f"{name} has nothing for {given.rewrites}", flush=True)
    if given.record:
        options = f"--networks {given.networks} --rewrites {given.rewrites} --seconds {given.seconds:g} --record"
        options = options if given.device == "cpu" else f"--device {given.device} {options}"
        figures = {"torch_threads": torch.get_num_threads(), "rows": rows}
        print(write_claim("rewrites", f"python -m bench.rewrites {options}", PLANS[given.device], figures))
    return int(any(row.get("failure") or row.get("parity") == "broken" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
