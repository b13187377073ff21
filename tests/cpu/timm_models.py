"""Trains models of timm, and stops and resumes them: run by test_models.py in a process of its own.

timm wants torchvision, whose builds fit one build of torch each (those on PyPI are for CUDA). Where it can't be
imported, a stand-in takes its place. The models here need nothing of it: timm loads pictures with it.
"""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from torch import nn

from tests.cpu.programs import a_task, assert_resumes


class StandIn(types.ModuleType):
    """A module in which every name is a class that nobody uses."""

    __path__: list[str] = []  # noqa: RUF012  so that it counts as a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        modes = ("NEAREST", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")
        return type(name, (nn.Module,), {mode: mode for mode in modes})


class Finder:
    """Finds a stand-in for torchvision and all its parts."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def main() -> None:
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):  # of another build, it raises RuntimeError
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
    import timm

    images = torch.randn(12, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
    models = {
        "test_resnet": {},
        "test_vit": {"img_size": 32, "patch_size": 16},
        "test_convnext": {},
        "test_efficientnet": {"drop_rate": 0.2, "drop_path_rate": 0.2},
    }
    for name, options in models.items():
        task = a_task(
            model=lambda name=name, options=options: timm.create_model(name, num_classes=3, **options),
            data=images,
            batch_size=4,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        )
        state = assert_resumes(task, stop=2, steps=4)
        print(name, len(state.parameters))


if __name__ == "__main__":
    main()
