"""Each layer's equations against autograd, on random shapes; what isn't known is named; a wrong equation is caught."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotloop
from hotloop.core.records.explanation import Explanation, LayerExplanation
from hotloop.explainer import explain as explaining
from hotloop.explainer import explain as written
from hotloop.explainer.autograd_check import _largest_difference
from hotloop.explainer.explain import explain
from hotloop.explainer.layers.equation import FunctionCall, LayerEquations

R = random.Random(0)


def task_of(model: Callable[[], nn.Module], x: Tensor, loss: Any = None, y: Any = None) -> hotloop.Task:
    def total(out: Any, _: Tensor) -> Tensor:
        out = out[0] if isinstance(out, tuple) else out
        return (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum()

    return hotloop.Task(
        model=model,
        loss=loss or total,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=(x, torch.zeros(len(x)) if y is None else y),
        batch_size=len(x),
    )


def explained(module: Callable[[], nn.Module], x: Tensor) -> Explanation:
    """Of a module behind a linear layer where it can be, so that its input needs a gradient."""
    if not x.is_floating_point():
        return explain(task_of(module, x))
    return explain(task_of(lambda: nn.Sequential(nn.Linear(x.shape[-1], x.shape[-1]), module()), x))


def layers(explanation: Explanation, operation: str) -> list[LayerExplanation]:
    return [layer for layer in explanation.layers if layer.operation == operation]


def images(dims: int, channels: int = 4) -> Tensor:
    return torch.randn(R.randint(1, 3), channels, *(R.randint(7, 10) for _ in range(dims)))


class Functional(nn.Module):
    """A function of its input."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def of(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Functional(function)


class SelfAttention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


KINDS: dict[str, tuple[str, Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": ("linear", lambda: nn.Linear(5, 3), lambda: torch.randn(4, 5)),
    "linear over time": ("linear", lambda: nn.Linear(5, 3, bias=False), lambda: torch.randn(4, 2, 5)),
    "matmul": ("matmul", of(lambda x: x @ x.transpose(-1, -2)), lambda: torch.randn(2, 3, 4, 5)),
    "matmul, broadcast": ("matmul", of(lambda x: x @ x[0].mT), lambda: torch.randn(2, 4, 5)),
    "matrix times vector": ("matmul", of(lambda x: x @ x[0]), lambda: torch.randn(4, 5)),
    "addmm": ("addmm", of(lambda x: torch.addmm(x[0], x, x.T[:, :5], beta=2, alpha=3)), lambda: torch.randn(5, 5)),
    "einsum": ("einsum", of(lambda x: torch.einsum("bik,bjk->bij", x, x)), lambda: torch.randn(2, 3, 4)),
    "conv1d": ("conv1d", lambda: nn.Conv1d(4, 3, 3, stride=2, padding=1), lambda: images(1)),
    "conv2d": ("conv2d", lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=1, dilation=(1, 2)), lambda: images(2)),
    "conv2d, groups": ("conv2d", lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False), lambda: images(2)),
    "conv2d, same": ("conv2d", lambda: nn.Conv2d(4, 6, (4, 3), padding="same"), lambda: images(2)),
    "conv2d, circular": ("conv2d", lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), lambda: images(2)),
    "conv3d": ("conv3d", lambda: nn.Conv3d(2, 3, 2, stride=2), lambda: images(3, 2)),
    "transposed": (
        "conv_transpose2d",
        lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        lambda: images(2),
    ),
    "max pool": ("max_pool2d", lambda: nn.MaxPool2d(3, stride=2, padding=1), lambda: images(2)),
    "max pool, overlapping": ("max_pool2d", lambda: nn.MaxPool2d(2, stride=1, dilation=2), lambda: images(2)),
    "max pool 1d": ("max_pool1d", lambda: nn.MaxPool1d(2), lambda: images(1)),
    "average pool": ("avg_pool2d", lambda: nn.AvgPool2d(3, stride=2, padding=1), lambda: images(2)),
    "average pool, inside": (
        "avg_pool2d",
        lambda: nn.AvgPool2d(2, padding=1, count_include_pad=False),
        lambda: images(2),
    ),
    "adaptive average": ("adaptive_avg_pool2d", lambda: nn.AdaptiveAvgPool2d((2, 3)), lambda: images(2)),
    "adaptive max": ("adaptive_max_pool2d", lambda: nn.AdaptiveMaxPool2d(1), lambda: images(2)),
    "batch norm": ("batch_norm", lambda: nn.BatchNorm2d(4), lambda: torch.randn(3, 4, 5, 6)),
    "batch norm 1d": ("batch_norm", lambda: nn.BatchNorm1d(5, affine=False), lambda: torch.randn(4, 5)),
    "batch norm, frozen": ("batch_norm", lambda: nn.BatchNorm1d(5).eval(), lambda: torch.randn(4, 5)),
    "layer norm": ("layer_norm", lambda: nn.LayerNorm((4, 5)), lambda: torch.randn(3, 4, 5)),
    "group norm": ("group_norm", lambda: nn.GroupNorm(2, 4), lambda: images(2)),
    "instance norm": ("instance_norm", lambda: nn.InstanceNorm2d(4, affine=True), lambda: images(2)),
    "rms norm": ("rms_norm", lambda: nn.RMSNorm(5), lambda: torch.randn(3, 4, 5)),
    "attention": ("scaled_dot_product_attention", SelfAttention, lambda: torch.randn(2, 5, 8)),
    "attention, dropout": (
        "scaled_dot_product_attention",
        lambda: SelfAttention(dropout=0.3),
        lambda: torch.randn(2, 5, 8),
    ),
    "attention, causal": (
        "scaled_dot_product_attention",
        of(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True)),
        lambda: torch.randn(2, 2, 5, 8),
    ),
    "attention, rows masked as a whole": (
        "scaled_dot_product_attention",
        of(lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(5, 5).bool().tril(-1))),
        lambda: torch.randn(2, 2, 5, 8),
    ),
    "attention, rows masked by infinity": (
        "scaled_dot_product_attention",
        of(lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.full((5, 5), -torch.inf).triu())),
        lambda: torch.randn(2, 2, 5, 8),
    ),
    "attention, shared keys": (
        "scaled_dot_product_attention",
        of(lambda x: F.scaled_dot_product_attention(x, x[:, :2], x[:, :2], enable_gqa=True)),
        lambda: torch.randn(2, 4, 5, 8),
    ),
    "embedding": ("embedding", lambda: nn.Embedding(7, 3), lambda: torch.randint(0, 7, (4, 5))),
    "embedding, padded": ("embedding", lambda: nn.Embedding(7, 3, padding_idx=2), lambda: torch.randint(0, 7, (9, 5))),
    "rnn": ("rnn_tanh", lambda: nn.RNN(5, 4, batch_first=True), lambda: torch.randn(3, 6, 5)),
    "rnn, relu": ("rnn_relu", lambda: nn.RNN(5, 4, nonlinearity="relu", bias=False), lambda: torch.randn(3, 6, 5)),
    "lstm": ("lstm", lambda: nn.LSTM(5, 4, num_layers=2, bidirectional=True), lambda: torch.randn(3, 6, 5)),
    "gru": ("gru", lambda: nn.GRU(5, 4, num_layers=2, batch_first=True), lambda: torch.randn(3, 6, 5)),
    "lstm cell": ("lstm_cell", lambda: nn.LSTMCell(5, 4), lambda: torch.randn(3, 5)),
    "gru cell": ("gru_cell", lambda: nn.GRUCell(5, 4), lambda: torch.randn(3, 5)),
    "dropout, in place": ("dropout", lambda: nn.Dropout(0.3, inplace=True), lambda: torch.randn(2, 4, 5)),
    "dropout": ("dropout", lambda: nn.Dropout(0.3), lambda: torch.randn(20, 5)),
    "channel dropout": ("feature_dropout", lambda: nn.Dropout2d(0.5), lambda: torch.randn(5, 8, 3, 4)),
    **{
        name: (name, of(function), lambda: torch.randn(4, 5))
        for name, function in {
            "relu": lambda x: F.relu(x, inplace=True),
            "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
            "elu": F.elu,
            "gelu": F.gelu,
            "silu": F.silu,
            "softplus": F.softplus,
            "sigmoid": torch.sigmoid,
            "tanh": torch.tanh,
            "log_sigmoid": F.logsigmoid,
            "hardtanh": F.hardtanh,
            "softmax": lambda x: x.softmax(1),
            "log_softmax": lambda x: F.log_softmax(x, -1),
            "exp": torch.exp,
            "square": torch.square,
            "pow": lambda x: x**3,
            "clamp": lambda x: x.clamp(-0.5, 1),
            "div": lambda x: x / (x * x + 1),
            "rsub": lambda x: 1 - x,
            "sub": lambda x: x - x.mean(0),
            "where": lambda x: torch.where(x > 0, x, 0.1 * x),
            "masked_fill": lambda x: x.masked_fill(x > 0, 1.0),
            "var": lambda x: x.var(1),
            "std": lambda x: x.std(),
            "linalg_vector_norm": lambda x: F.normalize(x, dim=1),
            "cumsum": lambda x: x.cumsum(1),
            "logsumexp": lambda x: x.logsumexp(1),
            "selu": F.selu,
            "mish": F.mish,
            "hardswish": F.hardswish,
            "to": lambda x: x.to(torch.float64) * 2,
            "maximum": lambda x: torch.maximum(x, -x),
            "amax": lambda x: x.amax(1),
            "max": lambda x: x.max(1).values,
            "mean": lambda x: x.mean((0, 1)),
            "sum": lambda x: x.sum(1, keepdim=True),
            "cat": lambda x: torch.cat([x, 2 * x], 1),
            "chunk": lambda x: x.chunk(2, 1)[1],
            "getitem": lambda x: x[[0, 2, 2], 1:],
            "expand": lambda x: x[:1].expand(3, 5),
            "pad": lambda x: F.pad(x, (1, 2)),
            "repeat": lambda x: x.repeat(2, 3),
        }.items()
    },
    "gelu, tanh": ("gelu", lambda: nn.GELU(approximate="tanh"), lambda: torch.randn(4, 5)),
}


@pytest.mark.parametrize("name", KINDS)
def test_equations_are_what_autograd_computes(name: str) -> None:
    torch.manual_seed(0)
    operation, module, data = KINDS[name]
    found = explained(module, data())
    ours = layers(found, operation)
    assert ours
    for layer in ours:
        assert layer.known, layer.notes
        gradients = [one for one in layer.backward if one.agrees is not None]
        assert gradients or all(one.shape == [] for one in layer.forward)
        assert [one for one in layer.forward if one.agrees is None and one.result == "Z"] == []
    assert [(layer.operation, one.result, one.difference) for layer, one in found.wrong] == []
    assert found.unexplained == []


@pytest.mark.parametrize("name", KINDS)
def test_a_planted_wrong_equation_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gradient of each layer, one part in a million off."""
    torch.manual_seed(0)
    operation, module, data = KINDS[name]
    formula = explaining.FORMULAS[operation]

    def wrong(call: FunctionCall) -> LayerEquations:
        worked = formula(call)
        bent = [replace(term, value=lambda term=term: 1.000001 * term.value()) for term in worked.backward]
        return replace(worked, backward=bent)

    monkeypatch.setattr(explaining, "FORMULAS", {**explaining.FORMULAS, operation: wrong})
    found = explained(module, data())
    compared = {
        (layer.operation, one.result) for layer in layers(found, operation) for one in layer.backward if one.largest
    }
    caught = {(layer.operation, one.result) for layer, one in found.wrong if layer.operation == operation}
    assert caught == compared != set()


LOSSES: dict[str, tuple[Any, Callable[[], Tensor]]] = {
    "cross_entropy_loss": (nn.CrossEntropyLoss(), lambda: torch.randint(0, 5, (6,))),
    "cross entropy, ignored": (nn.CrossEntropyLoss(ignore_index=1), lambda: torch.tensor([0, 1, 2, 1, 4, 1])),
    "cross entropy, smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), lambda: torch.randint(0, 5, (6,))),
    "cross entropy, shares": (nn.CrossEntropyLoss(), lambda: torch.rand(6, 5).softmax(1)),
    "nll": (lambda out, y: F.nll_loss(F.log_softmax(out, 1), y), lambda: torch.randint(0, 5, (6,))),
    "mse": (nn.MSELoss(), lambda: torch.randn(6, 5)),
    "l1": (nn.L1Loss(), lambda: torch.randn(6, 5)),
    "smooth l1": (nn.SmoothL1Loss(beta=0.5), lambda: torch.randn(6, 5)),
    "huber": (nn.HuberLoss(delta=0.7), lambda: torch.randn(6, 5)),
    "binary": (lambda out, y: F.binary_cross_entropy(out.sigmoid(), y), lambda: torch.rand(6, 5)),
    "binary with logits": (nn.BCEWithLogitsLoss(), lambda: torch.rand(6, 5)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_what_autograd_computes(name: str) -> None:
    torch.manual_seed(0)
    loss, targets = LOSSES[name]
    found = explain(task_of(lambda: nn.Linear(4, 5), torch.randn(6, 4), loss, targets()))
    last = found.layers[-1]
    assert (last.module, last.known) == ("(loss)", True)
    assert [one.agrees for one in last.equations] == [True, True]
    assert found.wrong == [] and found.unexplained == []


class Residual(nn.Module):
    """User-defined: a nested block used twice, functional activations, a residual sum, a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.scale = nn.Parameter(torch.full((5,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + F.relu(self.block(x))
        return x * self.scale


def test_shared_and_nested_modules_and_residual_sums() -> None:
    found = explain(task_of(Residual, torch.randn(4, 5)))
    linear = layers(found, "linear")
    assert [(layer.module, layer.call) for layer in linear] == [("block.0", 1), ("block.0", 2)]
    assert {one.result for one in linear[0].backward} == {"dW", "db"}  # the data need no gradient
    assert {one.result for one in linear[1].backward} == {"dX", "dW", "db"}
    sums = layers(found, "add")
    assert [layer.module for layer in sums] == ["", ""]
    assert {one.text for one in sums[1].backward} == {"dZ"}
    scaled = next(layer for layer in layers(found, "mul") if layer.module == "")
    assert [matrix.parameter for matrix in scaled.matrices] == ["", "scale", ""]
    assert scaled.where.endswith(f"test_equations.py:{_line_of('x * self.scale')}")
    assert found.gradients == (3, 3)


def _line_of(text: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, start=1) if line.strip() == f"return {text}")


def inputs_gradients(explanation: Explanation) -> list[tuple[str, str]]:
    (layer,) = layers(explanation, "lstm")
    return [(one.result, one.text) for one in layer.backward if one.result.startswith("dX")]


def test_an_infinite_number_agrees_with_itself_alone() -> None:
    infinite, one = torch.tensor(torch.inf), torch.tensor(1.0)
    assert _largest_difference(infinite, infinite) == 0.0
    assert _largest_difference(infinite, one) == _largest_difference(one, -infinite) == torch.inf


def test_the_input_of_both_directions_gets_a_gradient_of_each() -> None:
    def both() -> nn.Module:
        return nn.LSTM(5, 4, bidirectional=True)

    x = torch.randn(3, 6, 5)
    each = [("dX_l0", "dA W_ih"), ("dX_l0_reverse", "dA W_ih")]
    assert inputs_gradients(explained(both, x)) == [*each, ("dX", "dX_l0 + dX_l0_reverse")]
    assert inputs_gradients(explain(task_of(both, x))) == []


def test_the_matrices_of_a_transposed_convolution_in_groups() -> None:
    found = explained(lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), torch.randn(2, 4, 7, 8))
    (layer,) = layers(found, "conv_transpose2d")
    assert layer.notes == [
        "as a product: X is 112x4, W is 4x27, dZ_col 112x54",
        "in 2 groups of channels, a product of 112x2 by 2x27 each",
    ]


def test_a_linear_layer_costs_what_its_products_cost() -> None:
    found = explain(task_of(lambda: nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 3)), torch.randn(4, 7)))
    second = layers(found, "linear")[1]
    assert [(one.result, one.text, one.flops) for one in second.equations] == [
        ("Z", "X W^T + b", 2 * 4 * 7 * 3),
        ("dX", "dZ W", 2 * 4 * 7 * 3),
        ("dW", "dZ^T X = sum of dz_n^T x_n over the rows n", 2 * 4 * 7 * 3),
        ("db", "sum of dz_n over the rows n", 4 * 3),
    ]
    assert second.equations[2].bytes == 4 * (4 * 3 + 4 * 7 + 3 * 7)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Strange(nn.Module):
    """What explain can't know: a function of one's own, and one that is not in its list."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bilinear(Twice.apply(x), x, self.weight, None)


def test_what_is_not_known_is_named_with_its_shapes() -> None:
    torch.manual_seed(0)
    model = lambda: nn.Sequential(nn.Linear(4, 4), Strange())  # noqa: E731
    found = explain(task_of(model, torch.randn(6, 4)))
    unknown = [layer for layer in found.layers if not layer.known]
    assert [layer.operation for layer in unknown] == ["TwiceBackward", "bilinear"]
    assert all(layer.module == "1" and layer.kind == "Strange" for layer in unknown)
    bilinear = unknown[1]
    assert bilinear.parameters == 5 * 4 * 4
    assert [(matrix.shape, matrix.parameter) for matrix in bilinear.matrices] == [
        ([6, 4], ""),
        ([6, 4], ""),
        ([5, 4, 4], "1.weight"),
        ([6, 5], ""),
    ]
    assert bilinear.equations == []
    assert found.unexplained == ["1.weight"]


def test_an_input_that_is_overwritten_later_is_not_compared_with_what_it_became() -> None:
    def overwriting(x: Tensor) -> Tensor:
        y = x + 1
        y *= 3  # what was added is gone
        y += x
        return y

    found = explained(of(overwriting), torch.randn(4, 5))
    assert found.wrong == []
    assert found.unexplained == []


def test_sparse_gradients_and_transforms() -> None:
    found = explained(lambda: nn.Embedding(7, 3, sparse=True), torch.randint(0, 7, (4, 5)))
    assert (found.wrong, found.unexplained, found.gradients) == ([], [], (1, 1))
    mapped = explained(of(lambda x: torch.vmap(lambda row: 2 * row)(x)), torch.randn(4, 5))
    assert [layer.operation for layer in mapped.layers if not layer.known] == ["MulBackward0"]
    branching = lambda x: torch.cond(x.sum() > 0, torch.relu, torch.tanh, (x,))  # noqa: E731
    either = explained(of(branching), torch.randn(4, 5))
    assert either.wrong == [] and [layer.operation for layer in either.layers if not layer.known] == ["cond"]


def test_explaining_leaves_no_trace() -> None:
    torch.manual_seed(1)
    asks = torch.nn.functional.has_torch_function
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    random_before = torch.get_rng_state()
    explain(task_of(module, torch.randn(1, 4).repeat(5, 1)))  # type: ignore[arg-type]
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in module.modules())
    assert torch.nn.functional.has_torch_function is asks
    torch.set_rng_state(random_before)


def test_a_loss_without_a_gradient_is_an_error_of_one_line() -> None:
    with pytest.raises(hotloop.HotloopError, match="gradient"):
        explain(task_of(lambda: nn.Linear(4, 4), torch.randn(5, 4), lambda out, y: out.detach().sum()))


def test_layers_that_hotloop_arrays_has_are_given_as_written_out_there() -> None:
    model = lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3), nn.PReLU())  # noqa: E731
    found = explain(task_of(model, torch.randn(2, 2, 4, 4), nn.CrossEntropyLoss(), torch.tensor([0, 2])))
    assert list(found.written) == ["Conv", "Tanh", "Dense", "CrossEntropy"]
    conv = found.written["Conv"].splitlines()
    assert conv[0].startswith("forward   P  = U X") and conv[2].startswith("backward  dW = ") and len(conv) == 5
    assert found.written["Tanh"] == "f = tanh x; f' = 1 - y²."
    every = explained(lambda: nn.LSTM(4, 3, batch_first=True), torch.randn(2, 5, 4)).written
    assert list(every) == ["Dense", "LSTM"]


def test_each_layer_of_hotloop_arrays_has_matrices_to_show() -> None:
    assert written._OPERATION_EQUATIONS.keys() <= explaining.FORMULAS.keys()
    for layer in set(written._OPERATION_EQUATIONS.values()):
        text = written.docstring_equations(layer)
        assert text.startswith(("forward ", "f = ")) and ("backward " in text or "f' = " in text), layer
