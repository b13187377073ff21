"""Batches as a function of (seed, epoch): built-in sets, the user's files, sources, order, random augmentation.

`from hotloop import data; data.fashion_mnist()`.
"""

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
