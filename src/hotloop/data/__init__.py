"""Batches as a function of (seed, epoch): built-in sets, sources, order, random augmentation.

`from hotloop import data; data.fashion_mnist()`.
"""

from hotloop.data.augment import Draws, compose, random_crop, random_erase, random_flip
from hotloop.data.builtin import digits, fashion_mnist, mnist
from hotloop.data.bundle import Bundle, Standardize

__all__ = [
    "Bundle",
    "Draws",
    "Standardize",
    "compose",
    "digits",
    "fashion_mnist",
    "mnist",
    "random_crop",
    "random_erase",
    "random_flip",
]
