"""Layers of `hotloop.arrays` beside what torch's autograd says, and signs turned round in their source.

A `Case` says how a layer is made, what samples it gets, and how torch computes the same. `compare` holds one against the
other in float64.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch
from array_api_compat import array_namespace
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from hotloop import arrays
from hotloop.arrays.backend import ArrayFactory, namespace

TOLERANCE = 1e-10
"""Of float64, for numbers of about 1."""

QUIET = dict(deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False)
PLANTED: dict[str, Any] = dict(QUIET, max_examples=6, derandomize=True, phases=[Phase.generate])


def examples(name: str) -> int:
    """Array operations of `array-api-strict` are slow, since each argument is looked at."""
    return 20 if name == "numpy" else 5


Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A layer and its like in torch.

    Attributes:
        layer: the class.
        reference: `(x, weights, settings)` -> y in torch.
        settings: draws the arguments of the class.
        sample: `(draw, settings)` -> shape of a sample.
        whole: the largest number among whole-numbered inputs; None for floats.
    """

    layer: type[Any]
    reference: Callable[[Tensor, Weights, dict[str, Any]], Tensor]
    settings: st.SearchStrategy[dict[str, Any]] = field(default_factory=lambda: st.just({}))
    sample: Callable[[Any, dict[str, Any]], tuple[int, ...]] = lambda draw, settings: tuple(
        draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    )
    whole: int | None = None


def host(array: Any) -> np.ndarray:
    """An array of any namespace as NumPy's."""
    return np.from_dlpack(array)


def close(found: Any, expected: Any, what: str) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape, f"{what}: shape {found.shape}, torch has {expected.shape}"
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    off = float(np.abs(found - expected).max(initial=0.0))
    assert off <= TOLERANCE * scale, f"{what} is off by {off:.3g}"  # NaN isn't


def compare(case: Case, draw: Any, xp: Any, layer_class: type[Any] | None = None) -> None:
    """Forward, dX and the weights' gradients of one layer of random settings, on random numbers."""
    settings = draw(case.settings)
    sample = case.sample(draw, settings)
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    samples = draw(st.integers(2, 4))
    layer = (layer_class or case.layer)(**settings)
    like = xp.zeros((1,), dtype=xp.float64)
    layer.build(sample, ArrayFactory(xp, like, 0))
    for name, weight in layer.weights.items():
        weight[...] = xp.asarray(random.standard_normal(weight.shape))
        layer.weights[name] = weight
    if case.whole is None:
        given = random.standard_normal((samples, *sample))
    else:
        given = random.integers(0, case.whole + 1, (samples, *sample))
    y = layer.forward(xp.asarray(given), training=True)
    assert tuple(y.shape[1:]) == tuple(layer.shape(sample))
    towards = random.standard_normal(y.shape)
    dx = layer.backward(xp.asarray(towards))

    x = torch.tensor(given, requires_grad=case.whole is None)
    weights = {name: torch.tensor(host(value).copy(), requires_grad=True) for name, value in layer.weights.items()}
    expected = case.reference(x, weights, settings | {"layer": layer})
    close(host(y), expected.detach().numpy(), "forward")
    if expected.requires_grad:
        expected.backward(torch.tensor(towards))
    if case.whole is None:
        close(host(dx), np.zeros_like(given) if x.grad is None else x.grad.numpy(), "dX")
    assert layer.gradients.keys() == weights.keys()
    for name, weight in weights.items():
        assert weight.grad is not None
        close(host(layer.gradients[name]), weight.grad.numpy(), f"gradient of {name}")


# --- signs turned round


def turned(source: type[Any]) -> Iterator[tuple[str, type[Any]]]:
    """The class with one sign of its own arithmetic turned round: each + and - between values, each leading -.

    Yields the line, and the class of a module that is the same but for that sign.
    """
    text = inspect.getsource(importlib.import_module(source.__module__))
    for number in range(len(list(_signs(ast.parse(text), source)))):
        tree = ast.parse(text)
        node = list(_signs(tree, source))[number]
        if isinstance(node, ast.UnaryOp):
            node.op = ast.UAdd()
        else:
            node.op = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()
        yield text.splitlines()[node.lineno - 1].strip(), _run(tree, source)


def remade(source: type[Any]) -> type[Any]:
    """The class made again from its source, as it is."""
    return _run(ast.parse(inspect.getsource(importlib.import_module(source.__module__))), source)


def _run(tree: ast.Module, source: type[Any]) -> type[Any]:
    changed = ModuleType(source.__module__)
    exec(compile(tree, source.__module__, "exec"), vars(changed))
    return getattr(changed, source.__name__)  # type: ignore[no-any-return]


def _signs(tree: ast.Module, source: type[Any]) -> Iterator[Any]:
    names = {one.__name__ for one in source.__mro__ if one.__module__ == source.__module__}
    for definition in tree.body:
        if isinstance(definition, ast.ClassDef) and definition.name in names:
            yield from _of_class(definition)
        elif isinstance(definition, ast.FunctionDef) and definition.name in _SHARED:
            yield from filter(_is_sign, ast.walk(definition))


def _of_class(definition: ast.ClassDef) -> Iterator[Any]:
    for method in definition.body:
        if isinstance(method, ast.FunctionDef) and method.name not in _NOT_ARITHMETIC:
            yield from filter(_is_sign, ast.walk(method))


def _is_sign(node: ast.AST) -> bool:
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant)  # -1 counts dimensions
    return isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Add | ast.Sub)


_SHARED = ("_update_mean",)
"""Functions that all classes of their module use."""

_NOT_ARITHMETIC = ("__init__", "__repr__", "shape", "build", "check", "_wide", "_fit", "memory")


# --- the cases


def _conv(x: Tensor, w: Weights, s: dict[str, Any]) -> Tensor:
    return F.conv2d(x, w["weight"], w.get("bias"), s["stride"], s["pad"], s["dilation"], s["groups"])


@st.composite
def _conv_settings(draw: Any) -> dict[str, Any]:
    sizes = st.tuples(st.integers(1, 3), st.integers(1, 3))
    return {
        "channels": 2 * draw(st.integers(1, 2)),
        "size": draw(sizes),
        "stride": draw(sizes),
        "pad": draw(st.tuples(st.integers(0, 2), st.integers(0, 2))),
        "dilation": draw(st.tuples(st.integers(1, 2), st.integers(1, 2))),
        "groups": draw(st.sampled_from([1, 2])),
        "bias": draw(st.booleans()),
    }


def _image(draw: Any, settings: dict[str, Any]) -> tuple[int, ...]:
    size, dilation = settings.get("size") or (1, 1), settings.get("dilation", (1, 1))
    least = [d * (k - 1) + 1 for d, k in zip(dilation, size, strict=True)]
    return (
        settings.get("groups", 1) * draw(st.integers(1, 2)),
        *(draw(st.integers(one, one + 3)) for one in least),
    )


@st.composite
def _pool_settings(draw: Any) -> dict[str, Any]:
    size = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    return {
        "size": size,
        "stride": draw(st.one_of(st.none(), st.tuples(st.integers(1, 3), st.integers(1, 3)))),
        "pad": (draw(st.integers(0, size[0] // 2)), draw(st.integers(0, size[1] // 2))),
    }


def _average(x: Tensor, w: Weights, s: dict[str, Any]) -> Tensor:
    if s["size"] is None:
        return F.adaptive_avg_pool2d(x, 1)
    return F.avg_pool2d(x, s["size"], s["stride"], s["pad"])


def _recurrent(kind: type[torch.nn.RNNBase]) -> Callable[[Tensor, Weights, dict[str, Any]], Tensor]:
    def computed(x: Tensor, w: Weights, s: dict[str, Any]) -> Tensor:
        module = kind(x.shape[2], s["units"], batch_first=True).double()
        named = {f"{name}_l0": value for name, value in w.items()}
        every, _ = torch.func.functional_call(module, named, (x,))
        return every[:, -1] if s["last"] else every

    return computed


def _batch_norm(x: Tensor, w: Weights, s: dict[str, Any]) -> Tensor:
    mean, variance = torch.zeros(x.shape[1]).double(), torch.ones(x.shape[1]).double()
    y = F.batch_norm(x, mean, variance, w.get("weight"), w.get("bias"), True, s["momentum"], s["eps"])
    close(host(s["layer"].buffers["running_mean"]), mean, "running mean")
    close(host(s["layer"].buffers["running_var"]), variance, "running variance")
    assert int(s["layer"].buffers["num_batches_tracked"]) == 1
    xp = array_namespace(s["layer"].buffers["running_mean"])
    given = xp.asarray(x.detach().numpy())
    later = F.batch_norm(x.detach(), mean, variance, w.get("weight"), w.get("bias"), False, 0.0, s["eps"])
    close(host(s["layer"].forward(given)), later.detach(), "forward outside of training")
    return y


def _dense(x: Tensor, w: Weights, s: dict[str, Any]) -> Tensor:
    return F.linear(x if s["each"] else x.flatten(1), w["weight"], w.get("bias"))


def _layer_norm(x: Tensor, w: Weights, s: dict[str, Any]) -> Tensor:
    return F.layer_norm(x, x.shape[-s["dims"] :], w.get("weight"), w.get("bias"), s["eps"])


def _dropout(x: Tensor, w: Weights, s: dict[str, Any]) -> Tensor:
    """torch's own has other draws; what a mask does is the same."""
    if s["p"] == 1:
        return F.dropout(x, 1.0)
    mask = s["layer"].draw.__self__  # the maker, whose numbers begin anew
    drawn = ArrayFactory(mask.xp, mask.xp.zeros((1,), dtype=mask.xp.float64), 0).bernoulli(tuple(x.shape), 1 - s["p"])
    return x * torch.tensor(host(drawn)) / (1 - s["p"])


def _units(**more: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"units": st.integers(1, 4), **more})


def _function(name: str, **arguments: str) -> Callable[[Tensor, Weights, dict[str, Any]], Tensor]:
    def computed(x: Tensor, w: Weights, s: dict[str, Any]) -> Tensor:
        return getattr(F, name)(x, **{theirs: s[ours] for ours, theirs in arguments.items()})

    return computed


def _residual(x: Tensor, w: Weights, s: dict[str, Any]) -> Tensor:
    return x + torch.tanh(torch.sigmoid(x))


def _graph_of_three() -> dict[str, Any]:
    """What comes in is used three times, and one result twice."""
    return {
        "nodes": {
            "a": (arrays.Sigmoid(), "x"),
            "b": (arrays.Tanh(), "a", "x"),
            "c": (arrays.Identity(), "a", "b", "x"),
        }
    }


def _of_three(x: Tensor, w: Weights, s: dict[str, Any]) -> Tensor:
    a = torch.sigmoid(x)
    return a + torch.tanh(a + x) + x


_SEQUENCE = st.integers(1, 3)
_LAST = st.booleans()

CASES = {
    "Dense": Case(arrays.Dense, _dense, _units(bias=st.booleans(), each=st.booleans())),
    "Flatten": Case(arrays.Flatten, lambda x, w, s: x.flatten(1)),
    "Dropout": Case(arrays.Dropout, _dropout, st.fixed_dictionaries({"p": st.sampled_from([0.0, 0.3, 0.5, 1.0])})),
    "Embedding": Case(
        arrays.Embedding,
        lambda x, w, s: F.embedding(x, w["weight"]),
        st.fixed_dictionaries({"numbers": st.just(5), "size": st.integers(1, 4)}),
        whole=4,
    ),
    "BatchNorm": Case(
        arrays.BatchNorm,
        _batch_norm,
        st.fixed_dictionaries({"momentum": st.floats(0, 1), "eps": st.floats(1e-6, 0.1), "affine": st.booleans()}),
    ),
    "LayerNorm": Case(
        arrays.LayerNorm,
        _layer_norm,
        st.fixed_dictionaries(
            {
                "dims": st.integers(1, 2),
                "eps": st.floats(1e-6, 0.1),
                "affine": st.booleans(),
                "bias": st.booleans(),
            }
        ),
        lambda draw, s: tuple(draw(st.lists(st.integers(2, 4), min_size=2, max_size=3))),
    ),
    "Conv": Case(arrays.Conv, _conv, _conv_settings(), _image),
    "MaxPool": Case(
        arrays.MaxPool, lambda x, w, s: F.max_pool2d(x, s["size"], s["stride"], s["pad"]), _pool_settings(), _image
    ),
    "AveragePool": Case(arrays.AveragePool, _average, _pool_settings(), _image),
    "AveragePool of all": Case(arrays.AveragePool, _average, st.just({"size": None}), _image),
    "RNN": Case(
        arrays.RNN, _recurrent(torch.nn.RNN), _units(last=_LAST), lambda draw, s: (draw(_SEQUENCE), draw(_SEQUENCE))
    ),
    "LSTM": Case(
        arrays.LSTM, _recurrent(torch.nn.LSTM), _units(last=_LAST), lambda draw, s: (draw(_SEQUENCE), draw(_SEQUENCE))
    ),
    "Residual": Case(arrays.Residual, _residual, st.builds(lambda: {"layers": [arrays.Sigmoid(), arrays.Tanh()]})),
    "Graph": Case(arrays.Graph, _of_three, st.builds(_graph_of_three)),
    "Reshape": Case(
        arrays.Reshape,
        lambda x, w, s: x.reshape(x.shape[0], *s["sizes"]),
        st.fixed_dictionaries({"sizes": st.sampled_from([(2, -1), (-1,)])}),
        lambda draw, s: (draw(_SEQUENCE), 2, draw(_SEQUENCE)),
    ),
    "Mean": Case(
        arrays.Mean,
        lambda x, w, s: x.mean(s["axes"]),
        st.fixed_dictionaries({"axes": st.sampled_from([1, -1, (1, 3), (-2, -3)])}),
        lambda draw, s: (draw(_SEQUENCE), draw(_SEQUENCE), 3),
    ),
    "At": Case(
        arrays.At,
        lambda x, w, s: x[:, s["step"]],
        st.fixed_dictionaries({"step": st.integers(-2, 1)}),
        lambda draw, s: (draw(st.integers(2, 4)), draw(_SEQUENCE)),
    ),
    "Step": Case(arrays.Step, lambda x, w, s: torch.heaviside(x.detach(), torch.zeros(()).double())),
    "Identity": Case(arrays.Identity, lambda x, w, s: x * 1),
    "Sigmoid": Case(arrays.Sigmoid, _function("sigmoid")),
    "Tanh": Case(arrays.Tanh, _function("tanh")),
    "ReLU": Case(arrays.ReLU, _function("relu")),
    "LeakyReLU": Case(
        arrays.LeakyReLU, _function("leaky_relu", s="negative_slope"), st.fixed_dictionaries({"s": st.floats(0, 0.5)})
    ),
    "ELU": Case(arrays.ELU, _function("elu", a="alpha"), st.fixed_dictionaries({"a": st.floats(0.1, 2)})),
    "Softplus": Case(arrays.Softplus, _function("softplus")),
    "GELU": Case(arrays.GELU, _function("gelu")),
    "SiLU": Case(arrays.SiLU, _function("silu")),
    "Softmax": Case(
        arrays.Softmax,
        _function("softmax", axis="dim"),
        st.fixed_dictionaries({"axis": st.sampled_from([-1, 1])}),
    ),
}

_INSTALLED = [name for name in ("numpy", "array_api_strict", "torch") if importlib.util.find_spec(name)]
NAMESPACES = {name: namespace(name) for name in _INSTALLED}
"""A machine with a GPU may have no array_api_strict; the dev extra has."""
