"""Converts a network's layers to torch modules with the same weights; torch is imported on demand."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING, Any

from hotloop.arrays import activations as act
from hotloop.arrays.backend import Shape
from hotloop.arrays.conv import AveragePool, Conv, MaxPool
from hotloop.arrays.dense import BatchNorm, Dense, Dropout, Embedding, Flatten, LayerNorm
from hotloop.arrays.graph import INPUT, Graph
from hotloop.arrays.layer import Chain, Layer, Residual
from hotloop.arrays.recurrent import LSTM, RNN
from hotloop.arrays.reshape import At, Mean, Reshape
from hotloop.errors import TaskError

if TYPE_CHECKING:
    from torch import fx, nn

Build = Callable[["fx.Graph", "fx.Node"], "fx.Node"]
"""Adds operations on a value to a graph, and returns the result."""


def to_sequential(chain: Chain, sample: Shape) -> nn.Sequential:
    """Returns modules that compute what the layers compute, with copies of their weights.

    torch.fx makes a module where torch has none, such as for a residual sum.

    Args:
        sample: shape of an input sample.

    Raises:
        TaskError: torch has no equivalent of a layer.
    """
    from torch import nn

    modules: list[nn.Module] = []
    for layer in chain.layers:
        if isinstance(layer, Dense) and not layer.each and len(sample) > 1:
            modules.append(nn.Flatten())
        modules.append(_torch_module(layer, sample))
        sample = tuple(layer.shape(sample))
    return nn.Sequential(*modules)


def _torch_module(layer: Layer, sample: Shape) -> nn.Module:
    if type(layer) in _CONTAINER_MAKERS:
        return _CONTAINER_MAKERS[type(layer)](layer, sample)
    make = _MODULE_MAKERS.get(type(layer))
    if make is None:
        raise TaskError(
            f"{layer!r} has no equivalent in torch",
            expected="layers with an equivalent module of torch",
            fix="leave that layer out, or use the network itself",
        )
    from torch import nn

    module = _copy_weights(make(nn, layer, sample), layer)
    return _OUTPUT_SELECTORS[type(layer)](module, layer) if type(layer) in _OUTPUT_SELECTORS else module


def _copy_weights(module: nn.Module, layer: Layer) -> nn.Module:
    import torch

    suffix = "_l0" if isinstance(layer, LSTM | RNN) else ""
    arrays = {f"{name}{suffix}": value for name, value in layer.weights.items()} | layer.buffers
    state = {name: torch.from_dlpack(value) for name, value in arrays.items()}
    for value in state.values():
        if value.is_floating_point():
            module.to(value.device, value.dtype)
    module.load_state_dict(state)
    return module


def _convolution(nn: Any, layer: Conv, sample: Shape) -> nn.Module:
    window = layer.window
    sizes = (window.size, window.stride, window.pad, window.dilation)
    return nn.Conv2d(sample[0], layer.channels, *sizes, layer.groups, bias=layer.bias)


def _batch_norm(nn: Any, layer: BatchNorm, sample: Shape) -> nn.Module:
    make = {3: nn.BatchNorm2d, 4: nn.BatchNorm3d}.get(len(sample), nn.BatchNorm1d)
    return make(sample[0], layer.eps, layer.momentum, layer.affine)


def _layer_norm(nn: Any, layer: LayerNorm, sample: Shape) -> nn.Module:
    return nn.LayerNorm(sample[-layer.dims :], layer.eps, layer.affine, layer.bias)


def _average_pool(nn: Any, layer: AveragePool, sample: Shape) -> nn.Module:
    window = layer.window
    return nn.AdaptiveAvgPool2d(1) if layer.whole else nn.AvgPool2d(window.size, window.stride, window.pad)


def _dense(nn: Any, layer: Dense, sample: Shape) -> nn.Module:
    return nn.Linear(layer.weights["weight"].shape[1], layer.units, bias=layer.bias)


def _max_pool(nn: Any, layer: MaxPool, sample: Shape) -> nn.Module:
    window = layer.window
    return nn.MaxPool2d(window.size, window.stride, window.pad, window.dilation)


_MODULE_MAKERS: dict[type[Layer], Callable[[Any, Any, Shape], nn.Module]] = {
    AveragePool: _average_pool,
    BatchNorm: _batch_norm,
    Conv: _convolution,
    Dense: _dense,
    Dropout: lambda nn, layer, sample: nn.Dropout(layer.p),
    Embedding: lambda nn, layer, sample: nn.Embedding(layer.numbers, layer.size),
    Flatten: lambda nn, layer, sample: nn.Flatten(),
    LayerNorm: _layer_norm,
    LSTM: lambda nn, layer, sample: nn.LSTM(sample[1], layer.units, batch_first=True),
    MaxPool: _max_pool,
    RNN: lambda nn, layer, sample: nn.RNN(sample[1], layer.units, batch_first=True),
    act.ELU: lambda nn, layer, sample: nn.ELU(layer.a),
    act.GELU: lambda nn, layer, sample: nn.GELU(),
    act.Identity: lambda nn, layer, sample: nn.Identity(),
    act.LeakyReLU: lambda nn, layer, sample: nn.LeakyReLU(layer.s),
    act.ReLU: lambda nn, layer, sample: nn.ReLU(),
    act.Sigmoid: lambda nn, layer, sample: nn.Sigmoid(),
    act.SiLU: lambda nn, layer, sample: nn.SiLU(),
    act.Softmax: lambda nn, layer, sample: nn.Softmax(layer.axis),
    act.Softplus: lambda nn, layer, sample: nn.Softplus(),
    act.Tanh: lambda nn, layer, sample: nn.Tanh(),
}


def _trace_module(name: str, parts: dict[str, nn.Module], build: Build) -> nn.Module:
    from torch import fx, nn

    graph = fx.Graph()
    graph.output(build(graph, graph.placeholder(INPUT)))
    return fx.GraphModule(nn.ModuleDict(parts), graph, name)


def _recurrent(module: nn.Module, layer: RNN | LSTM) -> nn.Module:
    """Wraps a recurrent module of torch so that it returns no states."""

    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        every = graph.call_function(operator.getitem, (graph.call_module("recurrent", (x,)), 0))
        return _select(graph, every, -1) if layer.last else every

    return _trace_module(type(layer).__name__, {"recurrent": module}, build)


_OUTPUT_SELECTORS: dict[type[Layer], Callable[[Any, Any], nn.Module]] = {RNN: _recurrent, LSTM: _recurrent}


def _select(graph: fx.Graph, x: fx.Node, step: int) -> fx.Node:
    return graph.call_function(operator.getitem, (x, (slice(None), step)))


def _residual(layer: Residual, sample: Shape) -> nn.Module:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        return graph.call_function(operator.add, (x, graph.call_module("layers", (x,))))

    return _trace_module("Residual", {"layers": to_sequential(layer, sample)}, build)


def _graph(layer: Graph, sample: Shape) -> nn.Module:
    shapes = layer.shapes(sample)
    modules: dict[str, nn.Module] = {
        f"layer{place}": to_sequential(Chain([node]), shapes[sources[0]])
        for place, (node, sources) in enumerate(layer.nodes.values())
    }

    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        values = {INPUT: x}
        for place, name in enumerate(layer.nodes):
            inputs = [values[source] for source in layer.nodes[name][1]]
            total = reduce(lambda one, other: graph.call_function(operator.add, (one, other)), inputs)
            values[name] = graph.call_module(f"layer{place}", (total,))
        return values[name]

    return _trace_module("Graph", modules, build)


def _reshape(layer: Reshape, sample: Shape) -> nn.Module:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        return graph.call_method("reshape", (x, graph.call_method("size", (x, 0)), *layer.sizes))

    return _trace_module("Reshape", {}, build)


_CONTAINER_MAKERS: dict[type[Layer], Callable[[Any, Shape], nn.Module]] = {
    At: lambda layer, sample: _trace_module("At", {}, lambda graph, x: _select(graph, x, layer.step)),
    Chain: to_sequential,
    Graph: _graph,
    Mean: lambda layer, sample: _trace_module("Mean", {}, lambda graph, x: graph.call_method("mean", (x, layer.axes))),
    Residual: _residual,
    Reshape: _reshape,
}
