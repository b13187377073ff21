"""Differences of Keras 3 modules (torch backend) from torch's modules. This file doesn't import Keras."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

from torch import nn


def call_arguments(model: nn.Module) -> dict[str, Any]:
    """Returns the keyword arguments of a call of `model`: a Keras model takes `training` in each call."""
    return {"training": model.training} if _is_keras(type(model).__mro__) else {}


@lru_cache(maxsize=256)
def _is_keras(bases: tuple[type, ...]) -> bool:
    return any(base.__module__.startswith("keras.") for base in bases)


def default_device(model: nn.Module | None) -> AbstractContextManager[Any]:
    """Makes Keras create tensors on the model's device (None: the CPU), not on its default, the accelerator."""
    if "keras.src.backend.torch" not in sys.modules:
        return nullcontext()
    parameter = next(model.parameters(), None) if model is not None else None
    return sys.modules["keras"].device("cpu" if parameter is None else str(parameter.device))


def restart_names() -> None:
    """Makes Keras number its layers from the beginning.

    Keras counts layers per process, and parameter names contain the numbers (`dense_3`). Without a restart, a second
    copy of a model would have other names than its checkpoint.
    """
    naming = sys.modules.get("keras.src.utils.naming")
    if naming is not None:
        naming.reset_uids()


def is_built(module: nn.Module) -> bool:
    """Returns whether a module has all its variables; Keras creates variables at the first input."""
    return getattr(module, "built", True) is not False
