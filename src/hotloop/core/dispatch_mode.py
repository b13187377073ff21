"""Sees each operation of a step, and leaves nothing behind where torch can't show them all."""

from __future__ import annotations

import sys
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class ReadOnlyDispatchMode(TorchDispatchMode):
    """A dispatch mode that only looks.

    Raises:
        NotImplementedError: the step has an operation that torch shows to no mode, such as `torch.cond`.
    """

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        compiler = sys.modules.get("torch._dynamo")
        if isinstance(error, NotImplementedError) and compiler is not None:
            compiler.reset()  # it ran that operation's branches under the mode, and would take them so ever after
