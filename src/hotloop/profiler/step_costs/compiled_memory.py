"""An estimate of a compiled step's activations from those of the eager step."""

from __future__ import annotations

from collections.abc import Iterable

from hotloop.core.records.step_costs import OperatorCost

_FUSED = ("elementwise", "copy", "random")


def compiled_activation_share(operators: Iterable[OperatorCost]) -> float:
    """Returns the share of the eager step's activations that a compiled step has at its peak.

    The compiler fuses elementwise operators into their neighbours and computes cheap results again in the backward
    pass, so that their results aren't saved: about the half of them, since one of two is an input of a product.
    """
    forward = [one for one in operators if one.phase == "forward"]
    written = sum(one.written_bytes * one.count for one in forward)
    fused = sum(one.written_bytes * one.count for one in forward if one.kind in _FUSED)
    return 1.0 - 0.5 * fused / written if written else 1.0
