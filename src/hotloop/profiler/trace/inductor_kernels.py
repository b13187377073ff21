"""Records the modules of compiled kernels when Inductor generates them, and finds the kernels when they run.

Each graph node has the module of its forward, or of the forward of its backward. A kernel of several modules is divided
by the arithmetic of their nodes. Caches of whole graphs are off while recording, since a cached graph isn't generated;
caches of compiled kernels stay on. The compiled code is the same.

hotloop captures a compiled step in one run under torch's tracer (`lowering/compile/capture.py`), which doesn't record
modules. `NodeLabels` observes the calls of modules in that run; autograd numbers nodes as in any step.
"""

from __future__ import annotations

import math
import re
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from operator import getitem
from typing import Any

from torch import SymBool, SymFloat, SymInt, Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import PythonKeyTracer
from torch.nn.modules.loss import _Loss

from hotloop.core.patches import Patches
from hotloop.core.records.profile_terms import Phase
from hotloop.core.torch_private import RecordFunctionFast, current_autograd_node, next_sequence_number, tree_leaves
from hotloop.lowering.compile import capture
from hotloop.profiler.base.transparency import hide_from_compiler
from hotloop.profiler.operator_cost import count_operator

GRAPH_PREFIX = "hotloop-graph#"
PHASE_KEY = "hotloop_phase"
"""Key of a node's metadata for its phase."""
_KERNEL_PREFIXES = ("cpp_fused", "cpp_")
_LINE_PATTERN = re.compile(r'File "(.+)", line (\d+)')


@dataclass(frozen=True)
class KernelPart:
    """The part of a kernel for one module.

    Attributes:
        module: id of the module; 0 for none.
        phase: phase from the graph; None if the time of the run decides.
        line: the user's line of most of the part.
        share: share of the kernel's arithmetic.
        flops: None if some are unknown.
    """

    module: int
    phase: Phase | None
    line: tuple[str, int] | None
    share: float
    flops: float | None


@dataclass(frozen=True)
class KernelLaunch:
    """A kernel of a compiled graph, by its name in the profiler."""

    name: str
    parts: tuple[KernelPart, ...]


@hide_from_compiler
class CompilationRecorder:
    """Records compilations between `install()` and `remove()`, and marks runs between `begin()` and `end()`.

    Attributes:
        graphs: the kernels of each graph, in order of execution.
        model: the model if the whole step is compiled, so that no module is called; else None.
    """

    def __init__(self) -> None:
        self.graphs: list[list[KernelLaunch]] = []
        self.model: nn.Module | None = None
        self._current_kernels, self._running = Patches(), Patches()
        self._open: dict[int, list[KernelLaunch]] = {}
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._caches: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Patches Inductor, which must be imported already."""
        import torch._functorch.config
        from torch._inductor import config
        from torch._inductor.codegen.cpp import CppScheduling
        from torch._inductor.codegen.triton import TritonScheduling
        from torch._inductor.output_code import CompiledFxGraph
        from torch._inductor.scheduler import Scheduler

        self._caches = [
            (config, "fx_graph_cache", config.fx_graph_cache),
            (torch._functorch.config, "enable_autograd_cache", torch._functorch.config.enable_autograd_cache),
        ]
        for owner, name, _ in self._caches:
            setattr(owner, name, False)
        for scheduling in (CppScheduling, TritonScheduling):
            self._current_kernels.patch(scheduling, "define_kernel", self._kernel)
        self._current_kernels.patch(Scheduler, "codegen_extern_call", self._extern)
        self._current_kernels.patch(CompiledFxGraph, "__init__", self._compiled)

    def remove(self) -> None:
        """Removes the patches; records stay."""
        self._current_kernels.undo()
        for owner, name, before in self._caches:
            setattr(owner, name, before)
        self._caches = []

    def begin(self) -> None:
        """Starts a traced step: graphs and kernels appear in the profiler's record."""
        if not self.graphs:
            return
        from torch._inductor.codecache import PyCodeCache
        from torch._inductor.output_code import CompiledFxGraph

        self._running.patch(CompiledFxGraph, "__call__", self._marked)
        for module in PyCodeCache.modules:
            for name in [name for name in vars(module) if name.startswith(_KERNEL_PREFIXES)]:
                self._running.patch(module, name, partial(_record_kernel, name))

    def end(self) -> None:
        self._running.undo()

    def _kernel(self, define: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(define)
        def noted(scheduling: Any, source: str, nodes: Any, *rest: Any, **named: Any) -> Any:
            name = define(scheduling, source, nodes, *rest, **named)
            made = [node.node for node in nodes if getattr(node, "node", None) is not None]
            self._note(str(name), [origin for node in made for origin in node.origins])
            return name

        return noted

    def _extern(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(generate)
        def noted(scheduler: Any, node: Any, *rest: Any, **named: Any) -> Any:
            made = getattr(node, "node", None)
            if made is not None and getattr(made, "python_kernel_name", None):
                self._note(operator_of(made.python_kernel_name), made.origins)
            return generate(scheduler, node, *rest, **named)

        return noted

    def _compiled(self, initialise: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(initialise)
        def noted(compiled: Any, current_callable: Any, graph: Any, *rest: Any, **named: Any) -> None:
            initialise(compiled, current_callable, graph, *rest, **named)
            self._numbers[id(compiled)] = (weakref.ref(compiled), len(self.graphs))
            self.graphs.append(self._open.pop(id(graph), []))

        return noted

    def _marked(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def marked(compiled: Any, inputs: Any) -> Any:
            known, number = self._numbers.get(id(compiled), (None, -1))
            if known is None or known() is not compiled:
                return call(compiled, inputs)
            with RecordFunctionFast(f"{GRAPH_PREFIX}{number}"):
                return call(compiled, inputs)

        return marked

    def _note(self, name: str, nodes: Iterable[Any]) -> None:
        from torch._inductor.virtualized import V

        self._open.setdefault(id(V.graph), []).append(KernelLaunch(name, kernel_parts(nodes)))


@hide_from_compiler
def _record_kernel(name: str, kernel: Any) -> Any:
    def recorded(*args: Any) -> Any:
        with RecordFunctionFast(name):
            return kernel(*args)

    return hide_from_compiler(recorded) if callable(kernel) else kernel


def operator_of(kernel: str) -> str:
    """Returns the profiler's name of an operator in generated code: `extern_kernels.addmm` is `aten::addmm`."""
    steps = kernel.removeprefix("torch.ops.").split(".")
    if len(steps) < 2:
        return kernel
    library = "aten" if steps[0] in ("extern_kernels", "aten") else steps[0]
    return f"{library}::{steps[1].removeprefix('bias_')}"


def kernel_parts(nodes: Iterable[Any]) -> tuple[KernelPart, ...]:
    """Returns the parts of some graph nodes by module, the largest first; repeated nodes count once."""
    found: dict[tuple[int | None, Phase | None], list[tuple[float, float | None, Any]]] = {}
    for node in dict.fromkeys(nodes):
        size = _node_numbers(node)
        if node.op == "call_function" and node.target is not getitem and size:
            flops = _flops(node)
            key = (_module_of(node.meta), (node.meta.get("custom") or {}).get(PHASE_KEY))
            found.setdefault(key, []).append((flops or size, flops, node))
    _assign_unowned_nodes(found)
    total = sum(work for parts in found.values() for work, _, _ in parts)
    parts = [
        KernelPart(
            module or 0, phase, _line_of(max(work, key=lambda one: one[0])[2]), _sum(work) / total, _known_or_none(work)
        )
        for (module, phase), work in found.items()
        if total
    ]
    return tuple(sorted(parts, key=lambda part: -part.share))


def _assign_unowned_nodes(found: dict[tuple[int | None, Phase | None], list[tuple[float, float | None, Any]]]) -> None:
    """Assigns nodes that the compiler inserted without a module to the largest part that has a module."""
    for key in [key for key in found if key[0] is None]:
        others = [other for other in found if other[0] is not None]
        if others:
            found[max(others, key=lambda other: (other[0] != 0, _sum(found[other])))] += found.pop(key)


def _node_numbers(node: Any) -> float:
    """Returns the number of elements that a node makes, as far as known."""
    shapes = [_shape(one) for one in tree_leaves(node.meta.get("val")) if isinstance(one, Tensor)]
    return float(sum(math.prod(shape) for shape in shapes if shape is not None))


def _shape(tensor: Tensor) -> list[int] | None:
    shape = [_size_hint(size) for size in tensor.shape]
    return None if None in shape else shape


def _size_hint(size: Any) -> Any:
    """Returns the current value of a symbolic size; `int()` would specialize the graph to it."""
    return size.node.hint if isinstance(size, SymInt | SymFloat | SymBool) else size


def _sum(work: Sequence[tuple[float, float | None, Any]]) -> float:
    return math.fsum(one for one, _, _ in work)


def _known_or_none(work: Sequence[tuple[float, float | None, Any]]) -> float | None:
    known = [flops for _, flops, _ in work if flops is not None]
    return math.fsum(known) if len(known) == len(work) else None


def _flops(node: Any) -> float | None:
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return None
    values = [getattr(value, "meta", {}).get("val", value) for value in node.args]
    shapes = [_shape(value) if isinstance(value, Tensor) else [] for value in values]
    if None in shapes:
        return None
    dtypes = [str(value.dtype) if isinstance(value, Tensor) else "Scalar" for value in values]
    counts = count_operator(
        schema.name, shapes, dtypes, [None if isinstance(v, Tensor) else _size_hint(v) for v in values]
    )
    return None if counts is None else counts.flops


def _module_of(meta: dict[str, Any]) -> int | None:
    """Returns the id of the innermost module; torch's stack has ids as text, outermost first. None if unknown."""
    if "seq_nr" not in meta and "nn_module_stack" not in meta:
        return None
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    return next((int(key) for key in reversed(stack) if str(key).isdigit()), 0)


def _line_of(node: Any) -> tuple[str, int] | None:
    found = _LINE_PATTERN.findall(node.meta.get("stack_trace") or "")
    return (found[-1][0], int(found[-1][1])) if found else None


class NodeLabels:
    """Labels the nodes of steps that are captured inside of `on()`."""

    def __init__(self) -> None:
        self._inside: list[nn.Module | None] = [None]
        self._numbers: list[int] = []
        self._makers: list[nn.Module | None] = []
        self._labelled_nodes = False

    @contextmanager
    def on(self) -> Iterator[None]:
        patches = Patches()
        patches.patch(capture, "make_fx", self._tracing)
        try:
            yield
        finally:
            patches.undo()

    def _tracing(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Patches only the tracer's own run: later copies of graphs have the labels."""

        @wraps(make)
        def make_labelled(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            run = make(*args, **kwargs)

            def labelled(*inputs: Any) -> Any:
                patches = Patches()
                patches.patch(PythonKeyTracer, "call_module", self._called)
                patches.patch(fx.Graph, "create_node", self._created)
                self._labelled_nodes = False
                try:
                    return run(*inputs)
                finally:
                    patches.undo()

            return labelled

        return make_labelled

    def _called(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def called(tracer: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._inside.append(module)
            self._note()
            try:
                return call(tracer, module, *args, **kwargs)
            finally:
                self._inside.pop()
                self._note()

        return called

    def _note(self) -> None:
        self._numbers.append(next_sequence_number())
        self._makers.append(self._inside[-1])

    def _created(self, create: Callable[..., fx.Node]) -> Callable[..., fx.Node]:
        @wraps(create)
        def created(*args: Any, **kwargs: Any) -> fx.Node:
            node = create(*args, **kwargs)
            module, phase = self._now()
            node.meta["custom"] = {**(node.meta.get("custom") or {}), PHASE_KEY: phase}
            node.meta["nn_module_stack"] = {} if module is None else {str(id(module)): ("", type(module))}
            return node

        return created

    def _now(self) -> tuple[nn.Module | None, Phase]:
        """Returns the module and phase of a node that is made now."""
        running: Any = current_autograd_node()
        if running is not None:
            self._labelled_nodes = True
            at = bisect_right(self._numbers, running._sequence_nr()) - 1
            return _innermost_user_module(self._makers[at]) if at >= 0 else None, "backward"
        called = self._inside[-1]
        if called is None:
            return None, "update" if self._labelled_nodes else "loss"
        self._labelled_nodes = False
        return _innermost_user_module(called), "loss" if isinstance(called, _Loss) else "forward"


def _innermost_user_module(module: nn.Module | None) -> nn.Module | None:
    return None if isinstance(module, _Loss) else module
