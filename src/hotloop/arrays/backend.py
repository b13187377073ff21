"""Which library computes: the one that the arrays are of. There is one copy of each layer, over the array API standard.

The standard (https://data-apis.org/array-api, 2024.12) names the operations that NumPy, CuPy, PyTorch and others share;
`array-api-compat` gives their namespaces under those names. A layer asks for the namespace of the array that it got,
so there is no switch to set, and nothing that knows of a device.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device, is_array_api_obj

from hotloop.errors import DataError, DeviceError, PlanError, type_name

Array = Any
"""An array of any namespace; shapes are in the docstrings, n is the number of samples in a batch."""

Shape = tuple[int, ...]
"""Of one sample, without the batch's dimension."""

_WRAPPED = ("numpy", "cupy", "torch")
_INSTALL = {"cupy": "install it with: pip install 'hotloop[cupy]'", "torch": "install it with: pip install torch"}


def namespace(xp: str | ModuleType) -> Any:
    """The namespace of a name (`numpy`, `cupy`, `torch`, or any library that follows the standard) or of a module.

    Raises:
        PlanError: there is no such library here, or it isn't one of arrays.
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

    The numbers are drawn by NumPy on the host, since the standard has no generators: a seed means the same everywhere.
    """

    def __init__(self, xp: Any, like: Array, seed: int) -> None:
        self.xp, self.dtype, self.device = xp, like.dtype, device(like)
        self.generator = np.random.default_rng(seed)

    def full(self, shape: Shape, value: float) -> Array:
        return self.xp.full(shape, value, dtype=self.dtype, device=self.device)

    def uniform(self, shape: Shape, bound: float) -> Array:
        """Between -bound and bound."""
        return self._from_host(self.generator.uniform(-bound, bound, shape))

    def normal(self, shape: Shape) -> Array:
        """Of mean 0 and variance 1."""
        return self._from_host(self.generator.standard_normal(shape))

    def to_array(self, shape: Shape, share: float) -> Array:
        """1 where something is kept, which happens with this probability, and 0 elsewhere."""
        return self._from_host(self.generator.random(shape) < share)

    def count(self) -> Array:
        """A whole number that counts from 0, 0-dim."""
        return self.xp.zeros((), dtype=self.xp.int64, device=self.device)

    def _from_host(self, drawn: Any) -> Array:
        return self.xp.asarray(drawn.astype("float64"), dtype=self.dtype, device=self.device)


def to_namespace(name: str, given: Any, xp: Any, where: Any = None) -> Array:
    """What the user gave as an array of `xp`: NumPy's are brought there, those of another library are refused.

    Args:
        where: the device that it has to be on; None if any will do.

    Raises:
        DataError: it is no array, of another namespace, or has no samples.
        DeviceError: it lies on another device.
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
