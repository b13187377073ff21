"""The backend `hotloop` of `torch.compile`: hotloop's rewrites of the graph of forward and backward, then Inductor.

`pyproject.toml` registers the backend, so `torch.compile(model, backend="hotloop")` needs no import of hotloop.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from hotloop.core.hardware.machine import find_compiler
from hotloop.errors import PlanError
from hotloop.lowering.compile.inductor_patches import fix_graph_for_inductor, inductor_options, inductor_patches
from hotloop.lowering.rewrites import GPU_REWRITES, REWRITE_FUNCTIONS
from hotloop.lowering.rewrites.fx_nodes import (
    aten,
    decompose_inserted,
    drop_identities,
    drop_node,
    fake_value,
    find_calls,
    insert_operations,
    operand_at,
    replace_node,
    result_part,
)

NO_COMPILER = "there is no C++ compiler"

_REWRITTEN = (
    aten.max_pool2d_with_indices_backward.default,
    aten.max_pool2d_with_indices.default,
    aten.threshold_backward.default,
)
"""Operations that the rewrites replace, and that Inductor decomposes before the rewrites run."""


def hotloop(
    graph: GraphModule, examples: Sequence[Any], *, options: Mapping[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compiles a graph that `torch.compile` captured; the result computes the same as the graph except for rounding.

    Without a C++ compiler, a CPU's graph runs uncompiled, and a warning reports this.

    Args:
        examples: the graph's inputs, as fake tensors.
        options: Inductor's options, as of `torch.compile`.

    Raises:
        PlanError: a mode is given.
    """
    if mode is not None:
        raise PlanError(f"mode={mode!r} with backend='hotloop'", expected="no mode", fix="name options={...} instead")
    device = _device_of(examples)
    if device.type == "cpu" and find_compiler() is None:
        warnings.warn(f"hotloop: {NO_COMPILER}, so this graph runs uncompiled; install g++", stacklevel=2)
        return graph.forward
    return compile_rewritten(graph, examples, {**inductor_options(), **(options or {})})


def compile_rewritten(graph: GraphModule, examples: Sequence[Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Compiles a graph by Inductor with the rewrites for its device, and with hotloop's patches."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    device = _device_of(examples)

    def inner(*args: Any, **kwargs: Any) -> Any:
        with inductor_patches(device):  # torch compiles the backward later, outside of this function
            return compile_fx_inner(*args, **kwargs)

    patches = {**options, "joint_custom_pre_pass": _rewriting_pass(device.type)}
    with inductor_patches(device), torch._inductor.config.patch(fallback_random=bool(options.get("fallback_random"))):
        kept = {key: value for key, value in select_decomp_table().items() if key not in _REWRITTEN}
        compiled: Any = compile_fx(graph, examples, inner_compile=inner, config_patches=patches, decompositions=kept)
        return compiled


def _device_of(examples: Sequence[Any]) -> torch.device:
    return next((value.device for value in examples if isinstance(value, Tensor)), torch.device("cpu"))


@cache
def _rewriting_pass(device: str) -> Any:
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class RewritingPass(CustomGraphPass):
        """Rewrites the joint graph; its `uuid` is a part of the keys of Inductor's caches."""

        def __call__(self, graph: torch.fx.Graph) -> None:
            if graph.owning_module is not None:
                rewrite_joint_graph(graph.owning_module, device)

        def uuid(self) -> Any:
            from hotloop.lowering.rewrites.mm_by_onednn import is_mkl_slow_here

            here = Path(__file__)
            files = [here, *sorted((here.parents[1] / "rewrites").glob("*.py"))]
            return get_hash_for_files(
                tuple(map(str, files)), f"{device} {is_mkl_slow_here()} {torch.get_num_threads()}"
            )

    return RewritingPass()


def rewrite_joint_graph(graph: GraphModule, device: str, but: Collection[str] = ("draw_by_words",)) -> dict[str, int]:
    """Applies the rewrites that are likely to be faster, then Inductor's decompositions of what is left.

    Args:
        but: rewrites to leave out. By default random numbers stay those of the eager module.

    Returns:
        how often each rewrite was applied.
    """
    from torch._inductor.decomposition import select_decomp_table

    counts: dict[str, int] = {}
    with decompose_inserted(select_decomp_table()):
        if all(map(_has_known_sizes, graph.graph.nodes)):
            drop_identities(graph)
            for node in find_calls(graph, aten.alias.default):
                replace_node(graph, node, operand_at(node))
            chosen = REWRITE_FUNCTIONS if device == "cpu" else GPU_REWRITES
            counts = {name: apply(graph) for name, apply in chosen.items() if name not in but}
            fix_graph_for_inductor(graph)
        for target in _REWRITTEN:
            for node in find_calls(graph, target):
                _decompose(graph, node)
    graph.recompile()
    return counts


def _has_known_sizes(node: Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return not isinstance(value, torch.SymInt)
    return value.layout == torch.strided and all(isinstance(size, int) for size in (*value.shape, *value.stride()))


def _decompose(graph: GraphModule, node: Node) -> None:
    """Replaces an operation by Inductor's decomposition."""
    target: Any = node.target
    tensors = [value for value in node.args if isinstance(value, Node)]
    others = [value for value in node.args if not isinstance(value, Node)]
    places = [isinstance(value, Node) for value in node.args]

    def run(*given: Tensor) -> Any:
        left, rest = list(given), list(others)
        return target(*(left.pop(0) if is_tensor else rest.pop(0) for is_tensor in places), **node.kwargs)

    new = insert_operations(graph, node, run, *tensors)
    if isinstance(fake_value(node), Tensor):
        replace_node(graph, node, new)
        return
    for place, value in enumerate(new):
        if (old := result_part(node, place)) is not None:
            old.replace_all_uses_with(value)
    drop_node(graph, node)
