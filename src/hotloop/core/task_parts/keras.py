"""Where the modules of another library don't behave as torch's own: Keras 3, on its torch backend.

Nothing here imports Keras; there are Keras models only where the user has imported it.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

from torch import nn


def call_arguments(model: nn.Module) -> dict[str, Any]:
    """What a call of `model` needs beside its inputs: Keras is told by each call whether this is training."""
    return {"training": model.training} if _is_keras(type(model).__mro__) else {}


@lru_cache(maxsize=256)
def _is_keras(bases: tuple[type, ...]) -> bool:
    return any(base.__module__.startswith("keras.") for base in bases)


def default_device(model: nn.Module | None) -> AbstractContextManager[Any]:
    """Within it, Keras makes its tensors where `model` is (None: on the CPU), not on the accelerator that it finds."""
    if "keras.src.backend.torch" not in sys.modules:
        return nullcontext()
    parameter = next(model.parameters(), None) if model is not None else None
    return sys.modules["keras"].device("cpu" if parameter is None else str(parameter.device))


def restart_names() -> None:
    """Makes Keras number its layers from the beginning, since `dense_3` is part of its parameters' names.

    It counts through the whole process, so that the same model built twice would have other names, and a checkpoint
    of one wouldn't fit the other.
    """
    naming = sys.modules.get("keras.src.utils.naming")
    if naming is not None:
        naming.reset_uids()


def is_built(module: nn.Module) -> bool:
    """Whether a module has all its variables; Keras makes them when it first sees an input."""
    return getattr(module, "built", True) is not False
