"""The symbols that stand for a step's numbers while it is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._guards import SLoc
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from hotloop.core.patches import patch_attribute


class FastShapeEnv(ShapeEnv):
    """torch's, which look for no line of the user's behind each symbol and guard: errors alone tell it.

    To know which lines aren't the user's, torch imports its exporter and parts of its compiler.
    """

    def _get_stack_summary(self, is_debug: bool = False, framework_loc: str | None = None) -> tuple[SLoc, str]:
        return super()._get_stack_summary(is_debug, framework_loc) if is_debug else (SLoc(framework_loc, None), "")

    def _log_create_unbacked_symbol(self, *told: Any, **more: Any) -> None:
        pass


@contextmanager
def skip_power_guards() -> Iterator[None]:
    """Meanwhile powers are taken without proving that their base isn't negative.

    torch has sympy prove it for each root, such as that of `1 - beta ** step`: a third of what tracing Adam's update takes.
    """
    with patch_attribute(torch.SymFloat, "__pow__", _skip_guard):
        yield


def _skip_guard(asking: Callable[..., Any]) -> Callable[..., Any]:
    def power(base: torch.SymFloat, exponent: Any) -> Any:
        numbers = isinstance(exponent, int | float | torch.SymInt | torch.SymFloat)
        return base.__float_pow__(exponent) if numbers else NotImplemented

    return power
