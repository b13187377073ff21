"""What compiled kernels compute, and for whom: in modules that a script compiles, and in hotloop's own compiled steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import hotloop
from hotloop.core.records.profile import OperatorTime
from hotloop.lowering.build import lower
from hotloop.lowering.compile.capture import capture_step
from hotloop.profiler.timers.module_names import ModuleName, ModuleNames, OwnTime, module_times
from hotloop.profiler.timers.modules import ModuleClock
from hotloop.profiler.trace.events import with_compiled, with_fused, with_shares
from hotloop.profiler.trace.inductor_kernels import (
    PHASE_KEY,
    CompilationRecorder,
    NodeLabels,
    kernel_parts,
    operator_of,
)
from hotloop.profiler.trace.tracer import Tracer

aten = torch.ops.aten


def node(graph: fx.Graph, target: Any, *args: fx.Node, shape: tuple[int, ...], **meta: Any) -> fx.Node:
    found = graph.call_function(target, args)
    found.meta.update(val=torch.empty(shape), seq_nr=1, **meta)
    return found


def of(module: int) -> dict[str, Any]:
    return {str(module): ("L['self'].it", nn.Module)}


def a_kernel() -> list[fx.Node]:
    """Nodes of a kernel of two modules, with one outside of all and one that the compiler wrote itself."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 8)
    wide = node(graph, aten.relu.default, x, shape=(4, 8), nn_module_stack={**of(1), **of(11)})
    same = node(graph, aten.neg.default, wide, shape=(4, 8), nn_module_stack={**of(1), **of(11)})
    slim = node(graph, aten.sum.dim_IntList, same, shape=(8,), fwd_nn_module_stack=of(22))
    free = node(graph, aten.exp.default, slim, shape=(8,))
    written = node(graph, aten.neg.default, free, shape=(8,))
    del written.meta["seq_nr"]
    return [wide, same, slim, free, written, wide]


def test_a_kernels_parts_are_as_large_as_their_arithmetic() -> None:
    parts = kernel_parts(a_kernel())
    # 64 numbers of module 11, 8 more that the compiler wrote; 32 added up for module 22; 8 outside of all.
    assert [(part.module, part.share) for part in parts] == [
        (11, pytest.approx(72 / 112)),
        (22, pytest.approx(32 / 112)),
        (0, pytest.approx(8 / 112)),
    ]
    assert sum(part.share for part in parts) == pytest.approx(1)


def test_a_node_that_says_its_phase_makes_a_part_of_its_own() -> None:
    nodes = a_kernel()
    nodes[0].meta["custom"] = {PHASE_KEY: "backward"}
    assert {(part.module, part.phase) for part in kernel_parts(nodes)} == {
        (11, None),
        (11, "backward"),
        (22, None),
        (0, None),
    }


@pytest.mark.parametrize(
    ("kernel", "operator"),
    [
        ("extern_kernels.addmm", "aten::addmm"),
        ("extern_kernels.bias_addmm", "aten::addmm"),
        ("torch.ops.aten.convolution_backward.default", "aten::convolution_backward"),
        ("torch.ops.mkldnn._linear_pointwise.default", "mkldnn::_linear_pointwise"),
        ("cpp_fused_relu_0", "cpp_fused_relu_0"),
    ],
)
def test_names_in_generated_code_are_those_of_the_profiler(kernel: str, operator: str) -> None:
    assert operator_of(kernel) == operator


def operator(module: str, phase: Any, ms: float) -> OperatorTime:
    return OperatorTime(name="cpp_fused_x", phase=phase, module=module, calls=1, ms=ms)


def test_modules_inside_take_what_their_kernels_take_from_the_compiled_one() -> None:
    own = {ModuleName("net", ""): OwnTime(10.0, 20.0, 2.0), ModuleName("", "(loss)"): OwnTime(1.0, 1.0, 1.0)}
    operators = [operator("a.b", "forward", 4.0), operator("a.b", "backward", 5.0), operator("c", "backward", 30.0)]
    inside = {"a.b": ModuleName("net", "a.b"), "c": ModuleName("net", "c")}
    found = with_compiled(own, operators, inside)
    assert found[ModuleName("net", "a.b")] == OwnTime(4.0, 5.0, 2.0)
    assert found[ModuleName("net", "")] == OwnTime(6.0, 0.0, 2.0)  # never less than nothing
    modules = with_fused(module_times(found, {}, 100.0), {"a.b": ["c"]})
    assert {one.name: one.fused_with for one in modules} == {"": [], "a": [], "a.b": ["c"], "c": [], "(loss)": []}
    assert next(one for one in modules if one.name == "a").backward_ms == 5.0


def test_a_compiled_steps_time_is_shared_out_and_still_adds_up() -> None:
    found = with_shares({"data": 1.0, "unattributed": 8.0}, {"forward": 0.25, "backward": 0.5})
    assert found == {"data": 1.0, "forward": 2.0, "backward": 4.0, "unattributed": 2.0}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.acts = nn.Linear(16, 32), nn.ModuleList([nn.GELU(), nn.LayerNorm(32)])
        self.last = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for act in self.acts:
            x = act(x)
        return self.last(x * 2)


def task() -> hotloop.Task:
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    return hotloop.Task(
        model=Net,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=(x, torch.arange(32) % 4),
        batch_size=8,
    )


def labelled(labels: NodeLabels) -> tuple[nn.Module, list[fx.Node]]:
    """The nodes of a whole captured step, and the model."""
    program = lower(task(), hotloop.Plan(device="cpu"))
    try:
        step = program._step
        with labels.on():
            captured = capture_step(step, (torch.randn(8, 16), torch.arange(8) % 4), 8, {}, whole=True)  # type: ignore[arg-type]
        return program.parts.model, [one for one in captured.graph.graph.nodes if one.op == "call_function"]
    finally:
        program.close()


def check_labels(labels: NodeLabels) -> None:
    model, nodes = labelled(labels)
    names = {str(id(module)): name for name, module in model.named_modules()}
    found = {
        (
            str(one.target),
            names.get(next(iter(one.meta.get("nn_module_stack", {})), "")),
            one.meta.get("custom", {}).get(PHASE_KEY, ""),
        )
        for one in nodes
    }
    assert {
        ("aten.addmm.default", "first", "forward"),
        ("aten.gelu.default", "acts.0", "forward"),
        ("aten.native_layer_norm.default", "acts.1", "forward"),
        ("aten.mul.Tensor", "", "forward"),
        ("aten.nll_loss_forward.default", None, "loss"),
        ("aten.nll_loss_backward.default", None, "backward"),
        ("aten.gelu_backward.default", "acts.0", "backward"),
        ("aten.native_layer_norm_backward.default", "acts.1", "backward"),
        ("aten.mm.default", "last", "backward"),
        ("aten.mm.default", "first", "backward"),
    } <= found
    assert {phase for target, _, phase in found if "addcmul" in target or "add_" in target} <= {"update"}


def test_nodes_of_a_captured_step_know_their_module_and_phase() -> None:
    check_labels(NodeLabels())


def test_labels_that_forget_who_made_a_node_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NodeLabels, "_note", lambda self: None)
    with pytest.raises(AssertionError):
        check_labels(NodeLabels())


def test_nothing_of_the_labels_is_left() -> None:
    from torch.fx.experimental.proxy_tensor import PythonKeyTracer

    before = fx.Graph.create_node, PythonKeyTracer.call_module
    labelled(NodeLabels())
    assert (fx.Graph.create_node, PythonKeyTracer.call_module) == before


@pytest.mark.more
@pytest.mark.slow
def test_a_compiled_module_is_split_over_the_modules_inside() -> None:
    import torch._inductor.compile_fx
    from torch._inductor.codecache import PyCodeCache

    compilations, namer = CompilationRecorder(), ModuleNames()
    compilations.install()
    caches = torch._inductor.config.fx_graph_cache
    try:
        model = Net()
        compiled = torch.compile(model)
        x = torch.randn(8, 16)

        def step() -> list[Tensor]:
            model.zero_grad()
            compiled(x).square().sum().backward()
            return [value.grad for value in model.parameters()]  # type: ignore[misc]

        alone = [value.clone() for value in step()]
    finally:
        compilations.remove()
    assert not caches and torch._inductor.config.fx_graph_cache
    tracer = Tracer(lambda code: False, lambda file, line: f"{line}", namer=namer, compilations=compilations)
    clock = ModuleClock(namer=namer)
    kernels = [
        {name: value for name, value in vars(module).items() if "fused" in name} for module in PyCodeCache.modules
    ]
    for watch in (clock, tracer):
        watch.begin()
        watched = step()
        watch.end()
        assert all(torch.equal(one, other) for one, other in zip(watched, alone, strict=True))
    assert kernels == [
        {name: value for name, value in vars(module).items() if "fused" in name} for module in PyCodeCache.modules
    ]
    operators = tracer.operators()
    fused = [one for one in operators if one.name.startswith("cpp_fused")]
    assert {one.module for one in fused if one.phase == "forward"} >= {"acts.0", "acts.1"}
    assert {one.module for one in fused if one.phase == "backward"} >= {"acts.0", "acts.1"}
    products = {(one.module, one.phase) for one in operators if one.name in ("aten::mm", "aten::addmm")}
    assert products == {("first", "forward"), ("last", "forward"), ("first", "backward"), ("last", "backward")}
    assert "acts.1" in tracer.fused()["acts.0"]
    modules = module_times(with_compiled(clock.own(), operators, tracer.compiled_modules()), namer.kinds, None)
    assert {one.name for one in modules} >= {"", "first", "acts", "acts.0", "acts.1", "last"}


def made(function: Any, mode: str) -> list[fx.Node]:
    graph = make_fx(function, tracing_mode=mode)(torch.ones(6, 8)).graph
    return [one for one in graph.nodes if one.op == "call_function"]


def sized(x: Tensor) -> Tensor:
    return torch.cat([(x @ x.T).relu(), x.sum(1, keepdim=True)], 1)


def test_sizes_that_may_change_are_counted_as_they_are_now_and_stay_free() -> None:
    nodes = made(sized, "symbolic")
    shapes = next(one.meta["val"] for one in nodes if isinstance(one.meta["val"], Tensor)).fake_mode.shape_env
    before = len(shapes.guards)
    assert kernel_parts(nodes) == kernel_parts(made(sized, "fake")) and len(shapes.guards) == before
    assert any(isinstance(size, torch.SymInt) for one in nodes for size in getattr(one.meta["val"], "shape", ()))


def test_sizes_that_nobody_knows_yet_are_not_counted() -> None:
    nodes = made(lambda x: x.nonzero().float().exp().sum(), "symbolic")
    assert [part.share for part in kernel_parts(nodes)] == [1.0]
