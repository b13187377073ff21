"""Which modules a compiled kernel computes for: noted when Inductor makes it, found again when it runs.

Inductor makes a kernel of nodes of a graph, and each node knows the module whose forward it is of, or whose forward made
it, for backward. So a kernel of several modules has parts, as large as the arithmetic of their nodes. The caches of
whole graphs are switched off meanwhile, since nothing is made where a graph comes out of one; compiled kernels still
come out of theirs. How a graph is compiled, and so what it computes, stays as it is.
"""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from operator import getitem
from typing import Any

from torch import SymBool, SymFloat, SymInt, Tensor, nn
from torch._C._profiler import _RecordFunctionFast
from torch.utils._pytree import tree_leaves

from hotloop.core.patches import Patches
from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.base.transparency import hide_from_compiler
from hotloop.profiler.costs.operator_cost import count_operator

GRAPH_PREFIX = "hotloop-graph#"
PHASE_KEY = "hotloop_phase"
"""Key by which a node may say its phase."""
_KERNEL_PREFIXES = ("cpp_fused", "cpp_")
_LINE_PATTERN = re.compile(r'File "(.+)", line (\d+)')


@dataclass(frozen=True)
class KernelPart:
    """What a kernel does for one module.

    Attributes:
        module: its id; 0 for none.
        phase: where the graph says so itself; None where the time of its running tells.
        line: of the user's, from which most of it comes.
        share: of the kernel's arithmetic.
        flops: None where not all are known.
    """

    module: int
    phase: Phase | None
    line: tuple[str, int] | None
    share: float
    flops: float | None


@dataclass(frozen=True)
class KernelLaunch:
    """A kernel that a compiled graph runs, by the name that a profiler gives it."""

    name: str
    parts: tuple[KernelPart, ...]


@hide_from_compiler
class CompilationRecorder:
    """Notes what is compiled between `install()` and `remove()`, and marks what runs between `begin()` and `end()`.

    Attributes:
        graphs: the kernels of each graph, in the order in which it runs them.
        model: whose modules are meant, where none is ever called because the whole step is compiled; None otherwise.
    """

    def __init__(self) -> None:
        self.graphs: list[list[KernelLaunch]] = []
        self.model: nn.Module | None = None
        self._current_kernels, self._running = Patches(), Patches()
        self._open: dict[int, list[KernelLaunch]] = {}
        self._numbers: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._caches: list[tuple[Any, str, Any]] = []

    def install(self) -> None:
        """Listens to Inductor, which is imported by now."""
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
        """Stops noting; what was noted stays."""
        self._current_kernels.undo()
        for owner, name, before in self._caches:
            setattr(owner, name, before)
        self._caches = []

    def begin(self) -> None:
        """A traced step starts: graphs and kernels show in the profiler's record."""
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
            with _RecordFunctionFast(f"{GRAPH_PREFIX}{number}"):
                return call(compiled, inputs)

        return marked

    def _note(self, name: str, nodes: Iterable[Any]) -> None:
        from torch._inductor.virtualized import V

        self._open.setdefault(id(V.graph), []).append(KernelLaunch(name, kernel_parts(nodes)))


@hide_from_compiler
def _record_kernel(name: str, kernel: Any) -> Any:
    def recorded(*args: Any) -> Any:
        with _RecordFunctionFast(name):
            return kernel(*args)

    return hide_from_compiler(recorded) if callable(kernel) else kernel


def operator_of(kernel: str) -> str:
    """The operator that generated code calls, as a profiler names it: `extern_kernels.addmm` is `aten::addmm`."""
    steps = kernel.removeprefix("torch.ops.").split(".")
    if len(steps) < 2:
        return kernel
    library = "aten" if steps[0] in ("extern_kernels", "aten") else steps[0]
    return f"{library}::{steps[1].removeprefix('bias_')}"


def kernel_parts(nodes: Iterable[Any]) -> tuple[KernelPart, ...]:
    """What some nodes of a graph compute for which module, the largest part first; a node counts once."""
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
    """A node that the compiler itself wrote in place of others knows no module: it goes to the largest that has one."""
    for key in [key for key in found if key[0] is None]:
        others = [other for other in found if other[0] is not None]
        if others:
            found[max(others, key=lambda other: (other[0] != 0, _sum(found[other])))] += found.pop(key)


def _node_numbers(node: Any) -> float:
    """Numbers that a node makes, as far as they are known."""
    shapes = [_shape(one) for one in tree_leaves(node.meta.get("val")) if isinstance(one, Tensor)]
    return float(sum(math.prod(shape) for shape in shapes if shape is not None))


def _shape(tensor: Tensor) -> list[int] | None:
    shape = [_size_hint(size) for size in tensor.shape]
    return None if None in shape else shape


def _size_hint(size: Any) -> Any:
    """Of a size that may change the one that it has now, if that is known; to ask for an int would compile for it alone."""
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
    """Of the innermost module: torch keeps their ids as text, from the outermost on. None where nothing is known."""
    if "seq_nr" not in meta and "nn_module_stack" not in meta:
        return None
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack") or {}
    return next((int(key) for key in reversed(stack) if str(key).isdigit()), 0)


def _line_of(node: Any) -> tuple[str, int] | None:
    found = _LINE_PATTERN.findall(node.meta.get("stack_trace") or "")
    return (found[-1][0], int(found[-1][1])) if found else None
