"""Array namespaces of the array API standard.

The standard (https://data-apis.org/array-api, 2024.12) names the operations of NumPy, CuPy, PyTorch and others;
`array-api-compat` provides their namespaces. A layer uses the namespace of its input, so no global setting exists.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device, is_array_api_obj

from hotloop.errors import DataError, DeviceError, PlanError, type_name

Array = Any
"""An array of any namespace; docstrings give shapes, in which n is the number of samples in a batch."""

Shape = tuple[int, ...]
"""Shape of one sample, without the batch dimension."""

_WRAPPED = ("numpy", "cupy", "torch")
_INSTALL = {"cupy": "install it with: pip install 'hotloop[cupy]'", "torch": "install it with: pip install torch"}


def namespace(xp: str | ModuleType) -> Any:
    """Returns the namespace of a name (`numpy`, `cupy`, `torch`, or any library of the standard) or of a module.

    Raises:
        PlanError: the library isn't installed, or has no arrays.
    """
    name = xp if isinstance(xp, str) else getattr(xp, "__name__", "")
    name = name.removeprefix("array_api_compat.")
    try:
        module = importlib.import_module(f"array_api_compat.{name}" if name in _WRAPPED else name or "?")
    except ImportError as error:
        fix = _INSTALL.get(name, 'give the name of an installed library, such as xp="numpy"')
        raise PlanError(f"xp={xp!r}, and there is no {name or 'such'} here ({error})", fix=fix) from None
    if not hasattr(module, "matmul"):
        raise PlanError(
            f"xp={xp!r} has no arrays", expected="numpy, cupy, torch, or a library that follows the array API standard"
        )
    return module


class ArrayFactory:
    """Makes new arrays in one namespace, dtype and device, and draws random numbers.

    NumPy draws the numbers on the host: the standard has no generators, and a seed gives the same numbers everywhere.
    """

    def __init__(self, xp: Any, like: Array, seed: int) -> None:
        self.xp, self.dtype, self.device = xp, like.dtype, device(like)
        self.generator = np.random.default_rng(seed)

    def full(self, shape: Shape, value: float) -> Array:
        return self.xp.full(shape, value, dtype=self.dtype, device=self.device)

    def uniform(self, shape: Shape, bound: float) -> Array:
        """Returns numbers between -bound and bound."""
        return self._from_host(self.generator.uniform(-bound, bound, shape))

    def normal(self, shape: Shape) -> Array:
        """Returns numbers with mean 0 and variance 1."""
        return self._from_host(self.generator.standard_normal(shape))

    def bernoulli(self, shape: Shape, share: float) -> Array:
        """Returns ones with the probability `share`, and zeros elsewhere."""
        return self._from_host(self.generator.random(shape) < share)

    def count(self) -> Array:
        """Returns a counter, 0, 0-dim int64."""
        return self.xp.zeros((), dtype=self.xp.int64, device=self.device)

    def _from_host(self, drawn: Any) -> Array:
        return self.xp.asarray(drawn.astype("float64"), dtype=self.dtype, device=self.device)


def dtype_name(array: Array) -> str:
    return str(array.dtype).rpartition(".")[2]


def to_namespace(name: str, given: Any, xp: Any, where: Any = None) -> Array:
    """Returns the user's array as an array of `xp`; converts NumPy's arrays, and refuses those of other libraries.

    Args:
        where: the required device; None for any.

    Raises:
        DataError: no array, an array of another namespace, or no samples.
        DeviceError: the array is on another device.
    """
    if not is_array_api_obj(given):
        raise DataError(f"{name} is {type_name(given)}", expected="an array", fix=f"use numpy.asarray({name})")
    wanted = xp.__name__.removeprefix("array_api_compat.")
    if isinstance(given, np.ndarray) and wanted != "numpy":
        given = xp.asarray(given, device=where)
    found = array_namespace(given).__name__.removeprefix("array_api_compat.")
    if found != wanted:
        raise DataError(
            f"{name} is an array of {found}, and the network computes in {wanted}",
            expected="one namespace",
            fix=f'turn it into an array of {wanted}, or use Network(..., xp="{found}")',
        )
    if where is not None and device(given) != where:
        raise DeviceError(
            f"{name} is on {device(given)}, and the network on {where}",
            expected="one device",
            fix="move it there",
        )
    if given.ndim == 0 or given.shape[0] == 0:
        raise DataError(
            f"{name} has shape {tuple(given.shape)}", expected="one sample or more, along the first dimension"
        )
    return given
