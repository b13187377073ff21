"""Chains: operations of one function that follow one another over large tensors, each of which goes through memory by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hotloop.diagnosing.parts import function_of
from hotloop.diagnosing.step import COUNTS, Step, grouped, heaviest, inside
from hotloop.profiles import OperatorTime, Phase, Remedy

_WHERE: tuple[Phase, ...] = ("forward", "loss", "backward")

_LEAST = 3
"""Passes over memory in a forward that are worth a word."""

_TORCHS_OWN = ("MultiheadAttention", "Transformer", "Dropout", "AlphaDropout", "FeatureAlphaDropout")
"""How the classes of torch's own layers begin that need as many."""

_BY_NUMBER = frozenset(
    {
        "add",
        "sub",
        "rsub",
        "mul",
        "div",
        "neg",
        "abs",
        "sign",
        "reciprocal",
        "pow",
        "square",
        "sqrt",
        "rsqrt",
        "exp",
        "exp2",
    }
    | {
        "expm1",
        "log",
        "log2",
        "log10",
        "log1p",
        "sin",
        "cos",
        "tan",
        "tanh",
        "sigmoid",
        "erf",
        "erfc",
        "floor",
        "round",
    }
    | {
        "clamp",
        "clamp_min",
        "clamp_max",
        "maximum",
        "minimum",
        "where",
        "masked_fill",
        "lerp",
        "addcmul",
        "addcdiv",
        "atan",
    }
    | {
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "logical_and",
        "logical_or",
        "logical_not",
        "_to_copy",
        "sum",
        "mean",
        "amax",
        "amin",
    }
    | {"sigmoid_backward", "tanh_backward"}
)
_ARRANGING = frozenset(
    {
        "copy",
        "clone",
        "cat",
        "stack",
        "constant_pad_nd",
        "slice_backward",
        "select_backward",
        "zero",
        "fill",
        "roll",
        "flip",
    }
)


def written_out(step: Step) -> Iterator[Remedy]:
    """What a function writes out in many operations; the longest of them, forward and backward, is taken to stay."""
    for chains in grouped(_chains(step), lambda chain: (function_of(chain[0]), step.kind_at(chain[0]))).values():
        ones = [one for chain in chains for one in chain]
        spent, stays = _spent(step, ones), sum(_longest(step, chain) for chain in chains)
        forward = [one for one in ones if one.phase != "backward"]
        largest = max(forward, key=step.cost)
        of = f" of {largest.shapes[0]}" if largest.shapes and largest.shapes[0] else ""
        yield Remedy(
            cause=f"{_calls(forward):.0f} operations follow one another over tensors{of}{inside(forward, step)}, each of which goes through memory by itself",
            where=heaviest(forward, step),
            remedy="an operation that does it all, where there is one (F.cross_entropy, F.gelu, F.conv2d, "
            "F.scaled_dot_product_attention, a normalisation)",
            gain=step.share(spent - stays),
            evidence=f"forward and backward they take {spent:.2f} ms of each step of {step.ms:.2f} ms; the longest take {stays:.2f} ms",
        )


def written(step: Step) -> list[OperatorTime]:
    """The operators of such chains as are named, unless it's one of them that takes most of the time."""
    found = []
    for chain in _chains(step):
        spent, stays = _spent(step, chain), _longest(step, chain)
        if step.share(spent - stays) >= COUNTS and stays <= 0.5 * spent:
            found += chain
    return found


def _chains(step: Step) -> list[list[OperatorTime]]:
    """Of each function and module, what goes through memory, if there is enough of it in the forward."""
    own = {one.name for one in step.profile.modules if one.kind.startswith(_TORCHS_OWN)}
    passing = step.operators(
        lambda one: one.phase in _WHERE and bool(one.where) and one.module not in own and _passes(step, one)
    )
    chains = grouped(passing, lambda one: (function_of(one), one.module)).values()
    return [ones for ones in chains if _calls([one for one in ones if one.phase != "backward"]) >= _LEAST]


def _passes(step: Step, one: OperatorTime) -> bool:
    """Whether it does little with each number, and has many."""
    name = one.name.removeprefix("aten::").rstrip("_")
    return name in _BY_NUMBER | _ARRANGING and step.cost(one) >= step.small_ms * one.calls


def _spent(step: Step, ones: Sequence[OperatorTime]) -> float:
    return sum(step.cost(one) for one in ones)


def _longest(step: Step, chain: Sequence[OperatorTime]) -> float:
    """Milliseconds of the longest call in the forward, and in the backward."""
    each = [(one.phase == "backward", step.cost(one) / max(one.calls, 1.0)) for one in chain]
    return sum(max((ms for of, ms in each if of is backward), default=0.0) for backward in (False, True))


def _calls(ones: Sequence[OperatorTime]) -> float:
    return sum(one.calls for one in ones)
