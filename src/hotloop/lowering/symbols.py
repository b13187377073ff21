"""The symbols that stand for a step's numbers while it is traced."""

from __future__ import annotations

from typing import Any

from torch._guards import SLoc
from torch.fx.experimental.symbolic_shapes import ShapeEnv


class Symbols(ShapeEnv):
    """torch's, which look for no line of the user's behind each symbol and guard: errors alone tell it.

    To know which lines aren't the user's, torch imports its exporter and parts of its compiler.
    """

    def _get_stack_summary(self, is_debug: bool = False, framework_loc: str | None = None) -> tuple[SLoc, str]:
        return super()._get_stack_summary(is_debug, framework_loc) if is_debug else (SLoc(framework_loc, None), "")

    def _log_create_unbacked_symbol(self, *told: Any, **more: Any) -> None:
        pass
