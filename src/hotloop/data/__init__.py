"""Batches as a function of (seed, epoch): built-in sets, the user's files, sources, order, random augmentation.

`from hotloop import data; data.fashion_mnist()`. The names are imported at first use, since other packages need single modules.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotloop.data.augment import Draws, compose, random_crop, random_erase, random_flip
    from hotloop.data.builtin import digits, fashion_mnist, mnist
    from hotloop.data.bundle import Bundle, Standardize
    from hotloop.data.readers.csv_table import csv
    from hotloop.data.readers.image_folder import image_folder

__all__ = [
    "Bundle",
    "Draws",
    "Standardize",
    "compose",
    "csv",
    "digits",
    "fashion_mnist",
    "image_folder",
    "mnist",
    "random_crop",
    "random_erase",
    "random_flip",
]

_HOME = {
    **dict.fromkeys(("Draws", "compose", "random_crop", "random_erase", "random_flip"), "augment"),
    **dict.fromkeys(("digits", "fashion_mnist", "mnist"), "builtin"),
    **dict.fromkeys(("Bundle", "Standardize"), "bundle"),
    "csv": "readers.csv_table",
    "image_folder": "readers.image_folder",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hotloop.data' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"hotloop.data.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
