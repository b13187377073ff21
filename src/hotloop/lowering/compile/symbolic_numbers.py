"""Speeds up the symbols that stand for a step's numbers while the step is traced (torch 2.13; no upstream issues known).

Tests without the patches: `test_torch_s_symbols_import_the_exporter`, `test_torch_proves_that_the_base_of_a_root_is_positive`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._guards import SLoc
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from hotloop.core.patches import patch_attribute


class FastShapeEnv(ShapeEnv):
    """torch's ShapeEnv without a search for the user's line behind each symbol and guard.

    torch imports its exporter and parts of its compiler to know which lines aren't the user's.
    """

    def _get_stack_summary(self, is_debug: bool = False, framework_loc: str | None = None) -> tuple[SLoc, str]:
        return super()._get_stack_summary(is_debug, framework_loc) if is_debug else (SLoc(framework_loc, None), "")

    def _log_create_unbacked_symbol(self, *args: Any, **kwargs: Any) -> None:
        pass


@contextmanager
def skip_power_guards() -> Iterator[None]:
    """Computes powers without proving that their base isn't negative.

    torch has sympy prove it for each root, such as that of `1 - beta ** step`: a third of the time of tracing Adam.
    """
    with patch_attribute(torch.SymFloat, "__pow__", _skip_guard):
        yield


def _skip_guard(original: Callable[..., Any]) -> Callable[..., Any]:
    def power(base: torch.SymFloat, exponent: Any) -> Any:
        is_number = isinstance(exponent, int | float | torch.SymInt | torch.SymFloat)
        return base.__float_pow__(exponent) if is_number else NotImplemented

    return power
