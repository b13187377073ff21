"""A stand-in for the parts of torchvision that `bench.public_scripts` needs, for builds of torch that torchvision doesn't fit.

A sample is read as in torchvision: a row of a byte tensor becomes a PIL image, and transforms follow one by one. The pictures
are Fashion-MNIST, from the folder in the environment variable FASHION_MNIST; FASHION_MNIST_COUNT limits
their number.
"""

from __future__ import annotations

from torchvision import datasets, transforms, utils

__all__ = ["datasets", "transforms", "utils"]
