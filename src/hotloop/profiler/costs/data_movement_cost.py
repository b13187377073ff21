"""Cost formulas of views, copies and gathers, which do no arithmetic, and of fused optimizer updates."""

from __future__ import annotations

from math import prod

from hotloop.profiler.costs.op_cost import Formula, OpCall, UncountableCall

# Views, and allocations without a write.
_FREE_OPS = (
    "view _unsafe_view _reshape_alias reshape_as view_as t transpose numpy_T permute movedim as_strided as_strided_ expand"
    " expand_as unsqueeze unsqueeze_ squeeze squeeze_ select slice narrow split split_with_sizes chunk unbind unflatten"
    " detach detach_ alias diagonal unfold lift_fresh resolve_conj resolve_neg empty empty_like empty_strided new_empty"
    " new_empty_strided resize_ set_ requires_grad_ is_nonzero view_as_real view_as_complex is_pinned record_stream"
    " swapaxes swapdims moveaxis mT mH T H real item _local_scalar_dense"
)


def _embedding(call: OpCall) -> tuple[float, float]:
    """Counts `embedding(weight, indices)`: one row of the weight per index."""
    row = call.shape(0)[-1] * call.item(0)
    return 0, call.size(1) + 2 * call.count(1) * row


def _embedding_backward(call: OpCall) -> tuple[float, float]:
    """Counts `embedding_dense_backward(grad, indices, rows)`: zeros for all rows, then an addition per row of grad."""
    written = call.argument(2) * call.shape(0)[-1] * call.item(0)
    return call.count(0), call.size(0, 1) + written


def _index_select(call: OpCall) -> tuple[float, float]:
    """Counts `index_select(self, dim, index)`."""
    shape = call.shape(0)
    if not shape:
        raise UncountableCall
    rest = prod(size for position, size in enumerate(shape) if position != call.argument(1) % len(shape))
    return 0, call.size(2) + 2 * call.count(2) * rest * call.item(0)


def _select_backward(call: OpCall) -> tuple[float, float]:
    """Counts `select_backward(grad, sizes, ...)` and `slice_backward`: zeros of the sizes, then a copy of grad."""
    return 0, prod(call.argument(1)) * call.item(0) + 2 * call.size(0)


def _scatter(flops: int) -> Formula:
    """Counts `scatter_(self, dim, index, src)`, `scatter_add_`: src is read, and written or added."""

    def count(call: OpCall) -> tuple[float, float]:
        moved = call.size(3) if call.given(3) else call.count(2) * call.item(0)
        return flops * call.count(2), call.size(2) + (2 + flops) * moved

    return count


def _pad(call: OpCall) -> tuple[float, float]:
    """Counts `constant_pad_nd(self, pad)`; `pad` has the sizes before and after, the last dimension first."""
    shape, pad = call.shape(0), list(call.argument(1))
    for position in range(len(pad) // 2):
        shape[-1 - position] += pad[2 * position] + pad[2 * position + 1]
    return 0, call.size(0) + prod(shape) * call.item(0)


def _fused_update(flops: int, *read_and_written: int) -> Formula:
    """Counts a fused update of lists of tensors; the gradients, at position 1, are only read."""

    def count(call: OpCall) -> tuple[float, float]:
        elements = sum(map(prod, call.shapes_of(0)))
        updated = sum(
            sum(map(prod, call.shapes_of(position))) for position in read_and_written if position < len(call.shapes)
        )
        return flops * elements, (2 * updated + elements) * call.item(0)

    return count


FORMULAS: dict[str, Formula] = {
    **dict.fromkeys(_FREE_OPS.split(), lambda call: (0, 0)),
    "cat": lambda call: (0, 2 * sum(map(prod, call.shapes_of(0))) * call.item(0)),
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "index_select": _index_select,
    "gather": lambda call: (0, call.size(2) + 2 * call.count(2) * call.item(0)),
    "select_backward": _select_backward,
    "slice_backward": _select_backward,
    "scatter_": _scatter(0),
    "scatter_add_": _scatter(1),
    "constant_pad_nd": _pad,
    "_fused_adam_": _fused_update(12, 0, 2, 3, 4),
    "_fused_adamw_": _fused_update(12, 0, 2, 3, 4),
    "_fused_sgd_": _fused_update(4, 0, 2),
}
