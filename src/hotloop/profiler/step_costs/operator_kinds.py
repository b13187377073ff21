"""Classes of operators with a common rate, their shapes, and the kernels that a GPU launches for them."""

from __future__ import annotations

from math import ceil, prod

from hotloop.core.records.step_costs import Kind
from hotloop.profiler.costs.elementwise_cost import FORMULAS as ELEMENTWISE
from hotloop.profiler.costs.op_cost import OpCall, UncountableCall

_NAMES: dict[Kind, str] = {
    "linear": "mm addmm mv addmv dot vdot linear _addmm_activation addr _int_mm _scaled_mm",
    "batched_product": "bmm baddbmm addbmm _grouped_mm",
    "convolution": "convolution convolution_backward _convolution mkldnn_convolution cudnn_convolution",
    "softmax": "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data _safe_softmax",
    "gather": "embedding embedding_dense_backward index index_put index_put_ _index_put_impl_ _unsafe_index index_select"
    " _unsafe_index_put index_add index_add_ gather scatter scatter_ scatter_add scatter_add_ take _embedding_bag"
    " _embedding_bag_dense_backward index_copy_ index_fill_ masked_scatter take_along_dim",
    "copy": "copy_ copy _to_copy clone cat stack constant_pad_nd fill_ zero_ zeros ones zeros_like ones_like full full_like"
    " new_zeros new_ones new_full slice_backward select_backward select_scatter slice_scatter roll flip repeat tril triu"
    " tril_ triu_ arange linspace eye scalar_tensor contiguous repeat_interleave reflection_pad2d replication_pad2d"
    " as_strided_scatter unfold_backward pixel_shuffle pixel_unshuffle im2col col2im one_hot meshgrid",
    "random": "normal_ uniform_ random_ bernoulli_ bernoulli exponential_ native_dropout randn rand randint randperm"
    " multinomial normal randn_like rand_like randint_like log_normal_ cauchy_ geometric_",
    "reduction": "sum mean prod nansum amax amin max min all any var std var_mean std_mean argmax argmin logsumexp norm"
    " linalg_vector_norm cumsum cumprod nll_loss_forward nll_loss2d_forward nll_loss_backward nll_loss2d_backward mse_loss"
    " mse_loss_backward smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward binary_cross_entropy"
    " binary_cross_entropy_backward max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d"
    " avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward max_pool3d_with_indices"
    " max_pool3d_with_indices_backward avg_pool3d avg_pool3d_backward topk sort _ctc_loss _ctc_loss_backward"
    " upsample_nearest2d upsample_nearest2d_backward upsample_bilinear2d upsample_bilinear2d_backward"
    " upsample_bicubic2d _cdist_forward _cdist_backward count_nonzero",
}
_KIND_OF: dict[str, Kind] = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_PARTS: dict[str, Kind] = {
    "attention": "attention",
    "batch_norm": "normalization",
    "layer_norm": "normalization",
    "group_norm": "normalization",
    "rms_norm": "normalization",
    "_rnn": "recurrent",
    "_lstm": "recurrent",
    "_gru": "recurrent",
}

# torch's multi_tensor_apply: the most tensors of one launch by number of lists, and elements of its 320 blocks.
_TENSORS_OF_LAUNCH = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
_ELEMENTS_OF_LAUNCH = 320 * 65536

# Kernels of one call, where they are not one. Backward passes of normalization reduce the gradients of weight and bias
# in a second kernel; those of embeddings sort the indices.
_LAUNCHES = {
    "native_layer_norm_backward": 2,
    "native_group_norm_backward": 2,
    "embedding_dense_backward": 4,
    "index_put_": 4,
    "_index_put_impl_": 4,
    "_unsafe_index_put": 4,
    "cumsum": 2,
    "topk": 3,
    "sort": 3,
}


def operator_kind(name: str, phase: str) -> Kind:
    """Returns the class of an operator of torch's name without namespace, such as `convolution_backward`."""
    if name.startswith(("_fused_adam", "_fused_sgd", "_fused_adagrad")) or (
        name.startswith("_foreach_") and phase == "update"
    ):
        return "update"
    if (kind := _KIND_OF.get(name) or _KIND_OF.get(name.removesuffix("_"))) is not None:
        return kind
    for part, part_kind in _PARTS.items():
        if part in name:
            return part_kind
    return "elementwise" if name in ELEMENTWISE or name.startswith("_foreach_") else "other"


def operator_shape(kind: Kind, name: str, call: OpCall, read: int, written: int) -> tuple[int, ...]:
    """Returns the shape as documented in `OperatorCost`.

    Args:
        read, written: elements of the largest tensor that the operator reads, and of all that it writes.
    """
    try:
        match kind:
            case "linear" | "batched_product":
                return _product_shape(name, call)
            case "convolution":
                return _convolution_shape(name, call)
            case "attention":
                first = 1 if "backward" in name else 0
                *lead, queries, width = call.shape(first)
                return (prod(lead), queries, call.shape(first + 1)[-2], width)
            case "recurrent":
                return _recurrent_shape(call)
            case "softmax":
                sizes = call.shape(0)
                columns = sizes[call.argument(2 if "backward" in name else 1)] if sizes else 1
                return (prod(sizes) // max(columns, 1), columns)
            case "normalization":
                return _normalized_rows(name, call)
            case "reduction":
                rows = max(min(read, written), 1)
                return (rows, max(read, written) // rows)
    except (UncountableCall, ValueError, IndexError, TypeError):
        pass
    return (written,)


def _product_shape(name: str, call: OpCall) -> tuple[int, ...]:
    first = 1 if name.startswith(("add", "badd", "_addmm")) else 0
    *batch, m, k = call.shape(first) if name not in ("dot", "vdot") else [1, *call.shape(first)]
    right = call.shape(first + 1)
    return (prod(batch), m, right[-1] if len(right) > 1 else 1, k)


def _convolution_shape(name: str, call: OpCall) -> tuple[int, ...]:
    backward = "backward" in name
    image, weight = (call.shape(position) for position in ((1, 2) if backward else (0, 1)))
    stride, groups = call.argument(4 if backward else 3), call.argument(9 if backward else 8)
    is_transposed = bool(call.argument(7 if backward else 6))
    n, c_in, *space = image
    c_out, _, *kernel = weight
    if is_transposed:
        c_out = weight[1] * groups
    *high, w = [1] * (2 - len(space)) + space
    *kernel_high, kw = [1] * (2 - len(kernel)) + kernel
    return (n, c_in, prod(high), w, c_out, prod(kernel_high), kw, stride[-1], groups)


def _recurrent_shape(call: OpCall) -> tuple[int, ...]:
    steps, rows, inputs = call.shape(0)
    return (steps, rows, inputs, call.shape(2)[-1])


def _normalized_rows(name: str, call: OpCall) -> tuple[int, ...]:
    sizes = call.shape(1 if "backward" in name and len(call.shapes) > 1 and call.shape(1) else 0)
    if "batch_norm" in name:
        return (sizes[1], prod(sizes) // max(sizes[1], 1))
    if "group_norm" in name:
        groups = next(value for value in reversed(call.arguments) if type(value) is int and not isinstance(value, bool))
        rows = sizes[0] * (groups if groups <= sizes[1] else 1)
        return (rows, prod(sizes) // max(rows, 1))
    normalized = next((value for value in call.arguments if isinstance(value, list | tuple) and value), [sizes[-1]])
    columns = prod(normalized) if all(type(value) is int for value in normalized) else sizes[-1]
    return (prod(sizes) // max(columns, 1), columns)


def kernel_launches(kind: Kind, name: str, tensor_lists: int, tensors: int, elements: int, gradients: int) -> int:
    """Returns the kernels that a GPU launches for one call.

    Args:
        tensor_lists: lists of tensors among the arguments; 0 for an operator of single tensors.
        tensors: the tensors in the longest list.
        elements: in the longest list.
        gradients: products of a convolution's backward.
    """
    if kind == "view":
        return 0
    if tensor_lists and (name.startswith(("_foreach_", "_fused_"))):
        most = _TENSORS_OF_LAUNCH.get(min(tensor_lists, 5), 30)
        return max(ceil(tensors / most), ceil(elements / _ELEMENTS_OF_LAUNCH), 1)
    if name == "convolution_backward":
        return max(gradients, 1)
    if kind == "attention" and "backward" in name:
        return 3
    return _LAUNCHES.get(name, 1)
