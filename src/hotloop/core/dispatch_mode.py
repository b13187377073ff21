"""A dispatch mode that observes the operators of a step, and cleans up after operators that reject modes."""

from __future__ import annotations

import sys
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class ReadOnlyDispatchMode(TorchDispatchMode):
    """A base class of dispatch modes that only observe.

    Raises:
        NotImplementedError: the step has an operator that torch runs under no mode, such as `torch.cond`.
    """

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        compiler = sys.modules.get("torch._dynamo")
        if isinstance(error, NotImplementedError) and compiler is not None:
            compiler.reset()  # Dynamo caches the operator's branches as traced under this mode
