"""timm where torchvision has no build that fits torch.

timm wants torchvision, whose builds fit one build of torch each (those on PyPI are for CUDA). Where it can't be
imported, a stand-in takes its place while timm is. Networks need nothing of it: timm loads pictures with it.
"""

from __future__ import annotations

import importlib
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

from torch import nn


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
        return ModuleSpec(name, self, is_package=True) if _is_part(name) else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def imported_timm() -> Any:
    """timm, with the stand-in where it has to be; other libraries don't find that afterwards."""
    if "timm" in sys.modules:
        return sys.modules["timm"]
    try:
        import torchvision  # noqa: F401

        return importlib.import_module("timm")
    except (ImportError, RuntimeError):  # of another build, it raises RuntimeError
        _forget()
    finder: Any = Finder()
    sys.meta_path.insert(0, finder)
    try:
        return importlib.import_module("timm")
    finally:
        sys.meta_path.remove(finder)
        _forget()


def _is_part(name: str) -> bool:
    return name.partition(".")[0] == "torchvision"


def _forget() -> None:
    for name in filter(_is_part, list(sys.modules)):
        del sys.modules[name]
