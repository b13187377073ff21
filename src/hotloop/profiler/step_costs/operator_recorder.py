"""A dispatch mode that records the operators of a step and the bytes of all living tensors.

Operators have a class with a common rate, a shape, the kernels that a GPU launches, and the bytes that they allocate
beside their results, of which fake tensors know nothing. Those sizes are oneDNN's on a CPU with AVX2, measured by
torch's allocator (torch 2.13): convolutions copy their tensors to a blocked layout, whose channels are multiples of 8,
and an LSTM keeps its gates for the backward pass. Fake tensors lack values: where an operator's result depends on
them, the recorder answers in their place.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from hotloop.core.records.step_costs import Kind, OperatorCost, StepPhase
from hotloop.core.torch_private import FakeTensor, ReadOnlyDispatchMode, current_autograd_node, tree_leaves
from hotloop.profiler.operator_cost import ELEMENTWISE_FORMULAS, OpCall, UncountableCall, count_operator

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
    return "elementwise" if name in ELEMENTWISE_FORMULAS or name.startswith("_foreach_") else "other"


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


_CHANNELS = 8  # of a block
_FLAT_CHANNELS = (1, 3)  # of images that a first convolution reads in their own layout
_LSTM_STATES, _LSTM_START, _LSTM_SCRATCH = 15.2, 10.0, 4.17  # floats per step, row and unit; per row and unit
CUBLAS_BYTES = 8_519_680  # torch's default workspace of cuBLAS, `:4096:2:16:8`
_CUBLAS_NAMES = ("mm", "addmm", "bmm", "baddbmm")


def workspace_bytes(name: str, arguments: Sequence[Any], device: str) -> int:
    """Returns the bytes that an operator frees when it ends."""
    if device != "cpu":
        return CUBLAS_BYTES if name in _CUBLAS_NAMES else 0
    if name == "convolution":
        return _convolution(*arguments)
    if name == "convolution_backward":
        return _convolution_backward(*arguments)
    if name.startswith("mkldnn_rnn_layer"):
        x, *weights = arguments[:3]
        floats = _LSTM_SCRATCH * prod(x.shape[:-1]) * weights[1].shape[-1] + sum(weight.numel() for weight in weights)
        return int(floats * x.element_size())
    return 0


def saved_workspace_bytes(name: str, arguments: Sequence[Any]) -> int:
    """Returns the bytes that an operator saves for its backward in its last result, which a fake one lacks."""
    if name != "mkldnn_rnn_layer":
        return 0
    x, recurrent = arguments[0], arguments[2]
    steps, rows, units = x.shape[0], x.shape[1], recurrent.shape[-1]
    return int((_LSTM_STATES * steps + _LSTM_START) * rows * units * x.element_size())


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _blocked(size: int, channels: int) -> int:
    return size * (-(-channels // _CHANNELS) * _CHANNELS) // max(channels, 1)


def _convolution(
    image: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, *rest: Any
) -> int:
    out, channels = _result_bytes(image, weight, stride, padding, dilation, transposed, *rest)
    blocked_out, weights = _blocked(out, channels), _bytes(weight)
    flat = image.shape[1] in _FLAT_CHANNELS and not transposed
    blocked_in = 0 if flat else _blocked(_bytes(image), image.shape[1])
    if transposed:
        return max(2 * out, 2 * blocked_in + weights)
    return max(blocked_in + weights + blocked_out - out, blocked_out)


def _result_bytes(
    image: Tensor,
    weight: Tensor,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    extra: Any,
    groups: int,
) -> tuple[int, int]:
    """Returns the bytes and channels of a convolution's result."""

    def at(values: Any, axis: int) -> int:
        return values[axis % len(values)]

    sides = []
    for axis, (size, kernel) in enumerate(zip(image.shape[2:], weight.shape[2:], strict=True)):
        reach = at(dilation, axis) * (kernel - 1)
        if transposed:
            sides.append((size - 1) * at(stride, axis) - 2 * at(padding, axis) + reach + at(extra, axis) + 1)
        else:
            sides.append((size + 2 * at(padding, axis) - reach - 1) // at(stride, axis) + 1)
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    return image.shape[0] * channels * prod(sides) * image.element_size(), channels


def _convolution_backward(
    gradient: Tensor,
    image: Tensor,
    weight: Tensor,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    extra: Any,
    groups: int,
    mask: Any,
) -> int:
    """Returns the most of two products: for the input's gradient, then, while this exists, for the weight's."""
    plain_in, weights = _bytes(image), _bytes(weight)
    blocked_in = _blocked(plain_in, image.shape[1])
    blocked_out = _blocked(_bytes(gradient), gradient.shape[1])
    is_strided, is_depthwise = max(stride) > 1, groups == image.shape[1] and groups > 1
    results = plain_in * mask[0] + weights * mask[1]
    peaks = [0]
    if mask[0]:
        copies = 3 * plain_in if is_strided and not transposed else plain_in + blocked_in
        peaks += [blocked_out + weights + blocked_in, copies]
    if mask[1]:
        is_flat = image.shape[1] in _FLAT_CHANNELS and not is_strided
        copied = 0 if is_depthwise else blocked_out + (0 if is_flat else blocked_in)
        peaks.append(plain_in * mask[0] + copied + weights)
    return max(max(peaks) - results, 0)


_INDEXED = ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
_MASKS = (torch.bool, torch.uint8)


def answer_item(tensor: Tensor, is_of_all: bool) -> bool | int | float:
    """Returns a value for `tensor.item()`: 1, such as an optimizer's number of steps; conditions are false.

    Args:
        is_of_all: whether `torch.all` computed the tensor, which is then true: masks commonly choose everything.
    """
    if tensor.dtype == torch.bool:
        return is_of_all
    return 1.0 if tensor.is_floating_point() else 1


def with_all_elements(name: str, args: tuple[Any, ...]) -> Any:
    """Returns arguments without masks, or the result of a choice, as if all elements were chosen; None for others."""
    if name in _INDEXED and any(isinstance(index, Tensor) and index.dtype in _MASKS for index in args[1]):
        indices: list[Any] = []
        for index in args[1]:
            if isinstance(index, Tensor) and index.dtype in _MASKS:
                indices += [torch.empty(index.numel(), dtype=torch.int64) for _ in range(index.ndim)]
            else:
                indices.append(index)
        return (args[0], indices, *_spread_values(name, args, indices))
    if name == "nonzero":
        return torch.empty((args[0].numel(), args[0].ndim), dtype=torch.int64)
    if name == "masked_select":
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
        return torch.empty(shape.numel(), dtype=args[0].dtype)
    return None


def _spread_values(name: str, args: tuple[Any, ...], indices: list[Any]) -> tuple[Any, ...]:
    """Returns the rest of the arguments; the values of a write have the number of chosen elements or are one value."""
    if "put" not in name or not isinstance(args[2], Tensor):
        return args[2:]
    values = args[2]
    chosen = max(index.numel() for index in indices if isinstance(index, Tensor))
    if values.ndim and values.shape[0] not in (1, chosen):
        values = torch.empty((chosen, *values.shape[1:]), dtype=values.dtype)
    return (values, *args[3:])


_WITHOUT_COST = ("prim", "profiler")


class StepRecorder(ReadOnlyDispatchMode):
    """Records operators, and the peak of the bytes of all tensors that it saw.

    On fake tensors, an operator whose result depends on values gets an answer: see `data_dependence`.

    Attributes:
        phase: of operators outside of the backward graph.
        is_recording: whether operators are recorded; the memory always is.
        calls: equal operators with their number.
        live_bytes: of living storages.
        largest_bytes: of one storage that a recorded operator made.
        peaks: the most `live_bytes` by phase, with the workspace of operators.
        notes: answers to operators whose result depends on values.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device = device
        self.phase: StepPhase = "forward"
        self.is_recording = False
        self.weight = 1
        self.calls: dict[OperatorCost, int] = {}
        self.live_bytes = self.largest_bytes = 0
        self.peaks: dict[str, int] = {"forward": 0, "backward": 0, "update": 0}
        self.notes: dict[str, None] = {}
        self._storages: dict[int, weakref.ref[Any]] = {}
        self._last_truth: Any = lambda: None  # the storage of the last result of `torch.all`

    def add_tensors(self, tensors: Iterable[Tensor]) -> int:
        """Counts tensors that no operator under this mode made; returns the bytes of those that are new."""
        before = self.live_bytes
        for tensor in tensors:
            self._track(tensor)
        return self.live_bytes - before

    def reset_peaks(self) -> None:
        self.peaks = dict.fromkeys(self.peaks, 0)

    @property
    def operators(self) -> tuple[OperatorCost, ...]:
        return tuple(replace(one, count=number) for one, number in self.calls.items())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _WITHOUT_COST:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        name = func.overloadpacket.__name__
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            if name == "_local_scalar_dense":
                if self.phase != "update":  # an optimizer reads its number of steps
                    self.notes["a value that the step reads is taken as 1, or as false for a condition"] = None
                return answer_item(tensors[0], self._last_truth() is tensors[0].untyped_storage())
            if (changed := with_all_elements(name, args)) is not None:
                self.notes["a choice by a mask is counted as if it chose all elements"] = None
                if not isinstance(changed, tuple):
                    self._track(changed)
                    return changed
                args = changed
        result = func(*args, **kwargs)
        if name == "_local_scalar_dense" and self.phase == "update":  # an optimizer reads its number of steps
            return result
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._observe(func, args, kwargs, tensors, made)
        if name == "all":
            self._last_truth = weakref.ref(made[0].untyped_storage())
        return result

    def _observe(self, func: Any, args: Any, kwargs: Any, read: list[Tensor], made: list[Tensor]) -> None:
        name = func.overloadpacket.__name__
        arguments = _by_position(func, args, kwargs)
        new = [tensor for tensor in made if self._track(tensor)]
        if new and (saved := saved_workspace_bytes(name, arguments)) and not new[-1].numel():
            self._add_bytes(new[-1], saved)
        phase: StepPhase = self.phase
        if phase == "forward" and current_autograd_node() is not None:
            phase = "backward"
        written = [*new, *_mutated(func, args, kwargs)]
        self.peaks[phase] = max(self.peaks[phase], self.live_bytes + workspace_bytes(name, arguments, self.device))
        if self.is_recording:
            cost = _cost(func, name, phase, arguments, read, written)
            self.calls[cost] = self.calls.get(cost, 0) + self.weight

    def _track(self, tensor: Tensor) -> bool:
        """Counts the tensor's storage; returns whether it is new."""
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse and opaque tensors have none
            return False
        key, size = id(storage), storage.nbytes()
        known = self._storages.get(key)
        if known is not None and known() is storage:
            return False
        self._storages[key] = weakref.ref(storage, partial(self._free, key, size))
        self.live_bytes += size
        if self.is_recording:
            self.largest_bytes = max(self.largest_bytes, size)
        return True

    def _add_bytes(self, tensor: Tensor, size: int) -> None:
        """Adds bytes that live as long as the tensor's storage."""
        self.live_bytes += size
        weakref.finalize(tensor.untyped_storage(), self._subtract, size)

    def _subtract(self, size: int) -> None:
        self.live_bytes -= size

    def _free(self, key: int, size: int, reference: Any) -> None:
        self.live_bytes -= size
        if self._storages.get(key) is reference:
            del self._storages[key]


def _by_position(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Returns all arguments in the order of the operator's schema, defaults included."""
    named = func._schema.arguments
    rest = [kwargs.get(one.name, one.default_value) for one in named[len(args) :]]
    return [*args, *rest]


def _mutated(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    for position, one in enumerate(func._schema.arguments):
        if one.alias_info is not None and one.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(one.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _touched_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the tensors, each once; an expanded tensor has those of its storage."""
    unique = {id(tensor): tensor for tensor in tensors}
    return sum(
        min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
        if tensor.layout == torch.strided
        else tensor.numel() * tensor.element_size()
        for tensor in unique.values()
    )


def _cost(
    func: Any, name: str, phase: StepPhase, arguments: list[Any], read: list[Tensor], written: list[Tensor]
) -> OperatorCost:
    call = op_call(arguments)
    full_name = str(func).rpartition(".")[0] or str(func)
    lists = [value for value in arguments if isinstance(value, list | tuple) and _has_tensors(value)]
    longest = max(lists, key=len, default=[])
    elements = sum(tensor.numel() for tensor in written)
    read_elements = max((tensor.numel() for tensor in read), default=0)
    dtype = _arithmetic_dtype(read, written)
    gradients = sum(map(bool, arguments[10][:2])) if name == "convolution_backward" else 1
    kind = operator_kind(name, phase) if written else "view"
    if kind == "view" or name.startswith(("empty", "new_empty", "lift_fresh")):
        return OperatorCost(full_name, "view", phase, 0, 0, 0, (), dtype, launches=0, tensors=len(read))
    counted = count_operator(name, call.shapes, call.dtypes, call.arguments)
    written_bytes = _touched_bytes(written)
    if counted is not None and counted.bytes is not None:
        read_bytes = max(int(counted.bytes) - written_bytes, 0)
    else:
        read_bytes = _touched_bytes(read)
    if counted is not None:
        flops = int(counted.flops)
    else:
        flops = max(elements, read_elements) if kind in ("elementwise", "reduction", "update", "other") else 0
    return OperatorCost(
        full_name,
        kind,
        phase,
        flops,
        read_bytes,
        written_bytes,
        tuple(map(int, operator_shape(kind, name, call, read_elements, elements))),
        dtype,
        kernel_launches(kind, name, len(lists), len(longest), elements, gradients),
        tensors=len(read) + len(written),
        gradients=gradients,
    )


def _has_tensors(value: Any) -> bool:
    return any(isinstance(item, Tensor) for item in value)


def op_call(arguments: Sequence[Any]) -> OpCall:
    """Returns the arguments of an operator call, by position in its schema, as its cost formula reads them."""
    shapes: list[Any] = []
    dtypes: list[str] = []
    values: list[Any] = []
    for value in arguments:
        tensors = []
        if isinstance(value, Tensor):
            tensors = [value]
            shapes.append(list(value.shape))
        elif isinstance(value, list | tuple) and _has_tensors(value):
            tensors = [item for item in value if isinstance(item, Tensor)]
            shapes.append([list(item.shape) for item in tensors])
        else:
            shapes.append([])
        dtypes.append(str(tensors[0].dtype).removeprefix("torch.") if tensors else "")
        values.append(None if tensors else value)
    return OpCall(shapes, dtypes, values)


def _arithmetic_dtype(read: list[Tensor], written: list[Tensor]) -> str:
    """Returns the narrowest floating dtype of what is read, else of what is written, else any dtype."""
    for tensors in (read, written):
        floating = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.ndim]
        if floating:
            return str(min(floating, key=lambda tensor: tensor.element_size()).dtype).removeprefix("torch.")
    anything = [*written, *read]
    return str(anything[0].dtype).removeprefix("torch.") if anything else "float32"


def parameter_elements(tensors: Iterable[Tensor]) -> int:
    return sum(prod(tensor.shape) for tensor in {id(tensor): tensor for tensor in tensors}.values())
