"""FLOPs and bytes of operators against torch's own FLOP counter, and against the tensors that really go in and out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from hotloop.core.records.hardware import Device, Figure, Speed
from hotloop.core.records.profile import HardwareLimits, ModuleTime, OperatorTime, Profile
from hotloop.profiler.operator_cost import (
    OpCost,
    count_operator,
    device_limits,
    least_ms,
    precision_of,
    with_limit_shares,
)

COUNTED_BY_TORCH = ("mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward")


def counted(work: Callable[[], object]) -> dict[str, list[OpCost]]:
    """What each operator costs by its name, from the profiler's shapes, dtypes and arguments; known outermost ones."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        work()
    found: dict[str, list[OpCost]] = defaultdict(list)
    ends = 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda one: (one.start_ns(), -one.duration_ns())):
        if event.start_ns() < ends:
            continue
        counts = count_operator(event.name(), event.shapes(), event.dtypes(), event.concrete_inputs())
        if counts is not None:
            found[event.name().removeprefix("aten::")].append(counts)
            ends = event.end_ns()
    return dict(found)


class Tensors(TorchDispatchMode):
    """Bytes of the tensors that go into and come out of each operator below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, list[int]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs or {}, out))
        self.bytes[func._overloadpacket.__name__].append(sum(one.nbytes for one in leaves if torch.is_tensor(one)))
        return out


def backward(out: torch.Tensor) -> None:
    out.backward(torch.randn_like(out))


def image(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


PRODUCTS = {
    "linear": lambda: backward(nn.Linear(7, 5)(image(3, 7))),
    "linear over time": lambda: backward(nn.Linear(7, 5, bias=False)(image(3, 4, 7))),
    "bmm": lambda: backward(image(3, 4, 5) @ image(3, 5, 2)),
    "conv1d": lambda: backward(nn.Conv1d(3, 4, 3, stride=2)(image(2, 3, 11))),
    "conv2d": lambda: backward(
        nn.Conv2d(3, 4, (3, 5), stride=(2, 1), padding=(1, 2), dilation=(2, 1))(image(2, 3, 11, 9))
    ),
    "conv3d": lambda: backward(nn.Conv3d(2, 3, 3, padding=1)(image(2, 2, 5, 6, 7))),
    "same padding": lambda: backward(nn.Conv2d(3, 4, 3, padding="same")(image(2, 3, 8, 8))),
    "transposed": lambda: backward(nn.ConvTranspose2d(4, 3, 3, stride=2, output_padding=1)(image(2, 4, 5, 6))),
    "first layer": lambda: backward(nn.Conv2d(3, 4, 3)(torch.randn(2, 3, 8, 8))),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_cost_what_torch_counts(name: str) -> None:
    torch.manual_seed(0)
    work = PRODUCTS[name]
    with FlopCounterMode(display=False) as torchs:
        work()
    ours = counted(work)
    found = sum(one.flops for key in COUNTED_BY_TORCH for one in ours.get(key, ()))
    bias = sum(_bias_gradient(key, name) for key in ours)
    assert found - bias == torchs.get_total_flops()


def _bias_gradient(operator: str, name: str) -> float:
    """What `convolution_backward` adds for db, which torch doesn't count: a sum of dZ."""
    if operator != "convolution_backward":
        return 0
    gradients = {
        "conv1d": 2 * 4 * 5,
        "conv2d": 2 * 4 * 5 * 9,
        "conv3d": 2 * 3 * 5 * 6 * 7,
        "same padding": 2 * 4 * 8 * 8,
        "transposed": 2 * 3 * 12 * 14,
        "first layer": 2 * 4 * 6 * 6,
    }
    return gradients[name]


def test_groups_divide_the_products() -> None:
    """Here torch's counter takes the gradient of a weight in groups for one without."""
    torch.manual_seed(0)
    x = image(2, 6, 8, 8)
    ours = counted(lambda: backward(nn.Conv2d(6, 9, 3, groups=3, bias=False)(x)))
    product = 2 * 2 * 36 * 9 * 2 * 9
    assert [one.flops for one in ours["convolution"]] == [product]
    assert [one.flops for one in ours["convolution_backward"]] == [2 * product]


def test_attention_costs_what_torch_counts() -> None:
    """On the CPU torch's counter knows the operator of GPUs alone; the formula is that one's."""
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    q, k, v = image(2, 3, 5, 8), image(2, 3, 7, 8), image(2, 3, 7, 8)
    ours = counted(lambda: backward(F.scaled_dot_product_attention(q, k, v)))
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert ours[name][0].flops == sdpa_flop_count(q.shape, k.shape, v.shape)
    assert ours[f"{name}_backward"][0].flops == sdpa_backward_flop_count(q.shape, q.shape, k.shape, v.shape)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_multiply_each_weight_once_a_time_step(kind: type[nn.RNNBase]) -> None:
    layer = kind(5, 6, num_layers=2, bidirectional=True, batch_first=True)
    x = image(3, 7, 5)
    ours = counted(lambda: backward(layer(x)[0]))
    weights = sum(value.numel() for value in layer.parameters() if value.ndim == 2)
    products = ("mm", "addmm", "mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")
    found = sum(one.flops for key in products for one in ours.get(key, ()))
    if kind is nn.LSTM:
        assert found == 3 * 2 * 3 * 7 * weights
    else:  # the gradient of the first state isn't asked for, so that a product in each direction and layer is missing
        hidden = sum(value.numel() for name, value in layer.named_parameters() if "weight_hh" in name)
        assert found == 3 * 2 * 3 * 7 * weights - 2 * 3 * hidden


# Operators whose bytes are those of all tensors that go in and come out.
PLAIN = {
    "mm": lambda: torch.randn(3, 4) @ torch.randn(4, 5),
    "addmm": lambda: torch.addmm(torch.randn(5), torch.randn(3, 4), torch.randn(4, 5)),
    "bmm": lambda: torch.bmm(torch.randn(2, 3, 4), torch.randn(2, 4, 5)),
    "mv": lambda: torch.mv(torch.randn(3, 4), torch.randn(4)),
    "dot": lambda: torch.dot(torch.randn(4), torch.randn(4)),
    "convolution": lambda: F.conv2d(torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3), torch.randn(4), stride=2),
    "add": lambda: torch.randn(3, 1, 5) + torch.randn(4, 1),
    "add_": lambda: torch.randn(3, 4).add_(torch.randn(4)),
    "mul": lambda: torch.randn(3, 4) * torch.randint(0, 2, (3, 4)),
    "gt": lambda: torch.randn(3, 4) > torch.randn(4),
    "addcmul_": lambda: torch.randn(3, 4).addcmul_(torch.randn(3, 4), torch.randn(3, 4)),
    "relu": lambda: torch.randn(3, 4, dtype=torch.float64).relu(),
    "gelu": lambda: F.gelu(torch.randn(3, 4, dtype=torch.bfloat16)),
    "threshold_backward": lambda: backward(image(3, 4).relu()),
    "gelu_backward": lambda: backward(F.gelu(image(3, 4))),
    "where": lambda: torch.where(torch.randn(3, 4) > 0, torch.randn(3, 4), torch.randn(4)),
    "sum": lambda: torch.randn(3, 4, 5).sum((0, 2)),
    "mean": lambda: torch.randn(3, 4, 5).mean(),
    "argmax": lambda: torch.randn(3, 4).argmax(1),
    "_softmax": lambda: torch.randn(3, 4).softmax(1),
    "_log_softmax_backward_data": lambda: backward(image(3, 4).log_softmax(1)),
    "max_pool2d_with_indices": lambda: F.max_pool2d(image(2, 3, 9, 9), 3, stride=2, padding=1, ceil_mode=True),
    "avg_pool2d": lambda: F.avg_pool2d(torch.randn(2, 3, 9, 8), 2),
    "index_select": lambda: torch.randn(4, 5).index_select(0, torch.tensor([1, 2, 3, 1])),
    "constant_pad_nd": lambda: F.pad(torch.randn(2, 3, 4), (1, 2, 0, 3)),
    "mse_loss": lambda: F.mse_loss(torch.randn(3, 4), torch.randn(3, 4), reduction="none"),
    "mse_loss_backward": lambda: backward(F.mse_loss(image(3, 4), torch.randn(3, 4))),
    "copy_": lambda: torch.randn(3, 4).copy_(torch.randn(3, 4, dtype=torch.float64)),
}
READ_AND_WRITTEN = {"add_", "addcmul_"}
"""The tensor that comes out is one that went in, once as read and once as written."""


@pytest.mark.parametrize("name", PLAIN)
def test_bytes_are_what_goes_in_and_comes_out(name: str) -> None:
    with Tensors() as seen:
        PLAIN[name]()
    ours = counted(PLAIN[name])
    expected = seen.bytes[name][-1] - (name == "copy_") * 3 * 4 * 4  # what is copied over isn't read
    assert ours[name][-1].bytes == pytest.approx(expected, abs=0)


def test_a_planted_wrong_formula_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from hotloop.profiler import operator_cost

    monkeypatch.setattr(operator_cost, "FORMULAS", {**operator_cost.FORMULAS, "mm": operator_cost.FORMULAS["dot"]})
    with pytest.raises(AssertionError):
        test_products_cost_what_torch_counts("linear over time")


def test_a_whole_step_is_known() -> None:
    """Each operator of an ordinary training step that moves or computes anything has a count."""
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(676, 3),
    )
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    x, y = torch.randn(5, 1, 28, 28), torch.randint(0, 3, (5,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    step()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        step()
    unknown = set()
    ends = 0
    events = sorted(seen.profiler.kineto_results.events(), key=lambda one: (one.start_ns(), -one.duration_ns()))
    for place, event in enumerate(events):
        if event.start_ns() < ends or not event.name().startswith("aten::"):
            continue
        counts = count_operator(event.name(), event.shapes(), event.dtypes(), event.concrete_inputs())
        inside = place + 1 < len(events) and events[place + 1].end_ns() <= event.end_ns()
        if counts is not None:
            assert counts.bytes is not None, event.name()
            ends = event.end_ns()
        elif not inside:
            unknown.add(event.name())
    assert unknown <= {
        "aten::item",
        "aten::_local_scalar_dense",
        "aten::to",
        "aten::reshape",
        "aten::contiguous",
        "aten::result_type",
    }


FP32 = "float32"


def test_a_product_is_a_multiplication_and_an_addition_for_each_pair() -> None:
    assert count_operator("aten::mm", [[3, 4], [4, 5]], [FP32, FP32]) == OpCost(
        2 * 3 * 4 * 5, 4 * (3 * 4 + 4 * 5 + 3 * 5)
    )
    assert count_operator("mm", [[3, 4], [4, 5]], ["c10::Half"] * 2) == OpCost(120, 2 * (12 + 20 + 15))


def test_the_words_for_a_dtype_mean_the_same() -> None:
    sizes = {"float": 4, "torch.float64": 8, "double": 8, "c10::BFloat16": 2, "long int": 8, "bool": 1, "int": 4}
    for name, size in sizes.items():
        counts = count_operator("aten::neg", [[10]], [name])
        assert counts is not None and counts.bytes == 2 * 10 * size


def test_a_convolution_is_the_product_of_its_windows() -> None:
    arguments = [None, None, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1]
    counts = count_operator("aten::convolution", [[2, 3, 8, 8], [4, 3, 3, 3], [4]] + [[]] * 6, [FP32] * 3, arguments)
    windows = 2 * 8 * 8
    assert counts == OpCost(2 * windows * 27 * 4, 4 * (2 * 3 * 64 + 4 * 27 + 4 + 2 * 4 * 64))


@pytest.mark.parametrize(
    ("mask", "products"), [([True, True, False], 2), ([False, True, False], 1), ([True, False, False], 1)]
)
def test_convolution_backward_counts_the_gradients_that_are_asked_for(mask: list[bool], products: int) -> None:
    shapes = [[2, 4, 6, 6], [2, 3, 8, 8], [4, 3, 3, 3]] + [[]] * 8
    arguments = [None, None, None, [4], [1, 1], [0, 0], [1, 1], False, [0, 0], 1, mask]
    counts = count_operator("aten::convolution_backward", shapes, [FP32] * 3, arguments)
    assert counts is not None and counts.flops == products * 2 * 2 * 36 * 4 * 27


def test_elementwise_operators_write_what_their_inputs_come_to_together() -> None:
    counts = count_operator("aten::add", [[3, 1, 5], [4, 1], []], [FP32, FP32, "Scalar"], [None, None, 1])
    assert counts == OpCost(60, 4 * (15 + 4 + 60))


def test_a_list_of_tensors_has_bytes_where_their_dtype_is_said() -> None:
    assert count_operator("aten::cat", [[[3, 4], [2, 4]], []], ["TensorList", "Scalar"]) == OpCost(0, None)
    assert count_operator("aten::cat", [[[3, 4], [2, 4]], []], [FP32, "Scalar"]) == OpCost(0, 4 * 2 * 20)


def test_lists_of_tensors_cost_what_their_tensors_cost() -> None:
    two = [[3, 4], [2, 4]]
    assert count_operator("aten::_foreach_addcmul_", [two, two, two], [FP32, FP32, FP32]) == OpCost(
        3 * 20, 4 * (3 * 20 + 20)
    )
    assert count_operator("aten::_foreach_mul_", [two, []], ["TensorList", "Scalar"]) == OpCost(20, None)
    assert count_operator("aten::_fused_adam_", [two] * 4 + [[]] * 9, [FP32] * 4) == OpCost(
        12 * 20, 4 * (2 * 3 * 20 + 20)
    )


def test_the_gradient_of_a_part_is_zeros_around_it() -> None:
    counts = count_operator("aten::select_backward", [[5, 4], [], [], []], [FP32], [None, [3, 5, 4], 0, 2])
    assert counts == OpCost(0, 4 * (60 + 2 * 20))


def test_views_are_free() -> None:
    for name in ("aten::view", "aten::t", "aten::expand", "aten::detach"):
        assert count_operator(name, [[3, 4]], [FP32]) == OpCost(0, 0)


@pytest.mark.parametrize(
    ("name", "shapes", "dtypes", "arguments"),
    [
        ("aten::my_own_operator", [[3, 4]], [FP32], []),
        ("aten::linear", [[3, 4], [5, 4]], [FP32, FP32], []),  # calls others that are known
        ("aten::convolution", [[2, 3, 8, 8], [4, 3, 3, 3]], [FP32, FP32], []),  # without stride and padding
        ("aten::mm", [], [], []),
        ("aten::add", [[], []], ["Scalar", "Scalar"], [1, 2]),
        ("ProfilerStep#3", [], [], []),
    ],
)
def test_what_cannot_be_known_is_not_guessed(name: str, shapes: list, dtypes: list[str], arguments: list) -> None:
    assert count_operator(name, shapes, dtypes, arguments) is None


def test_without_dtypes_flops_are_known_and_bytes_are_not() -> None:
    assert count_operator("aten::mm", [[3, 4], [4, 5]]) == OpCost(120, None)
    assert count_operator("aten::mm", [[3, 4], [4, 5]], ["quantised", "quantised"]) == OpCost(120, None)
    assert OpCost(1, 2) + OpCost(3, None) == OpCost(4, None)


def measured(value: float, unit: str) -> Figure:
    return Figure(value, unit, "measured")  # type: ignore[arg-type]


SPEED = Speed({"fp32": measured(1e12, "flop_per_s")}, measured(1e11, "bytes_per_s"), measured(5, "us"))


def test_limits_are_what_was_measured_and_nothing_else() -> None:
    limits = device_limits(Device("cpu", "cpu", speed=SPEED))
    assert limits == HardwareLimits(flop_per_s={"fp32": 1e12}, bytes_per_s=1e11, launch_us=5)
    assert device_limits(Device("cpu", "cpu")) == HardwareLimits()


def test_the_roofline_is_the_slower_of_arithmetic_and_memory() -> None:
    limits = device_limits(Device("cpu", "cpu", speed=SPEED))
    assert least_ms(OpCost(2e9, 1e6), limits, "fp32") == pytest.approx(2.0)
    assert least_ms(OpCost(2e9, 1e9), limits, "fp32") == pytest.approx(10.0)
    assert least_ms(OpCost(2e9, None), limits, "fp32") == pytest.approx(2.0)
    assert least_ms(OpCost(2e9, 1e9), limits, "bf16") == pytest.approx(10.0)  # its products weren't measured
    assert least_ms(OpCost(2e9, 1e9), HardwareLimits(), "fp32") is None


def test_precisions_by_dtype() -> None:
    assert [precision_of(name) for name in ("float", "torch.float64", "c10::BFloat16", "int64")] == [
        "fp32",
        "fp64",
        "bf16",
        "",
    ]
    assert precision_of("float32", tf32=True) == "tf32"


def test_a_module_reaches_the_share_that_its_operators_could_have_taken() -> None:
    def module(name: str, ms: float, flops: float | None) -> ModuleTime:
        return ModuleTime(name=name, kind="Linear", calls=1, forward_ms=ms, backward_ms=ms, share=0.1, flops=flops)

    def operator(name: str, phase: str, flops: float | None) -> OperatorTime:
        return OperatorTime(
            name="aten::mm", phase=phase, module=name, calls=1, ms=1, dtype=FP32, flops=flops, bytes=0.0
        )  # type: ignore[arg-type]

    profile = Profile(
        source="x",
        steps=1,
        step_ms=100,
        limits=HardwareLimits(flop_per_s={"fp32": 1e12}),
        modules=[module("", 20, 9e9), module("a", 10, 3e9), module("ab", 10, 6e9), module("b", 5, None)],
        operators=[
            operator("a", "forward", 1e9),
            operator("a", "backward", 2e9),
            operator("ab", "forward", 6e9),
            operator("a", "update", 9e9),
            operator("b", "forward", None),
        ],
    )
    shares = {one.name: one.limit_share for one in with_limit_shares(profile).modules}
    assert shares == {"": pytest.approx(9 / 40), "a": pytest.approx(3 / 20), "ab": pytest.approx(6 / 20), "b": None}
