"""Patches of torch's compiler for captured steps, and the versions that need them.

Each patch names the torch version, the upstream issue, and the test that runs torch without the patch: when that test fails,
the patch can go. Inductor is imported within functions: the import takes seconds, which a cached package saves.
"""

from __future__ import annotations

import operator
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch._dispatch.python import no_python_dispatcher
from torch._prims_common import suggest_memory_format
from torch.fx import GraphModule, Node

from hotloop.core.files.user_folders import cache_folder, foreign_access, make_private_folder
from hotloop.core.patches import patch_attribute
from hotloop.core.reporter import Say
from hotloop.core.torch_private import (
    FakeTensorMode,
    OpOverload,
    disable_current_modes,
    tree_leaves,
    tree_map,
    tree_map_only,
)
from hotloop.errors import RunError
from hotloop.lowering.compile.compiled_rng import is_random_op
from hotloop.lowering.grouped_mm import traceable_groups
from hotloop.lowering.rewrites import fx_nodes, mm_by_onednn

INDUCTOR_PATCH_VERSION = 4
"""Version of all patches. A program that was compiled with another version is never read from a cache."""


@contextmanager
def inductor_patches(device: torch.device, say: Say = warnings.warn) -> Iterator[None]:
    """Applies all patches while a step is compiled for a device, and registers hotloop's operators.

    `say` gets a line if the compiler's cache folder isn't used, since another user may have written its programs.
    """
    _use_private_cache(say)
    mm_by_onednn.register_onednn_product()
    fx_nodes.register_layout_op()
    config = torch.compiler.config  # torch adds `patch` to the module at import
    tag = f"{config.cache_key_tag} hotloop {INDUCTOR_PATCH_VERSION} {torch.backends.mkldnn.enabled}"
    with ExitStack() as stack:
        stack.enter_context(config.patch(cache_key_tag=tag))  # type: ignore[attr-defined]
        stack.enter_context(patch_stride_simplify())
        stack.enter_context(patch_mutation_deps())
        stack.enter_context(traceable_groups())
        stack.enter_context(use_real_output_strides())
        stack.enter_context(keep_rng_layout())
        stack.enter_context(parallel_embedding_gradients(device))
        yield


def _use_private_cache(say: Say) -> None:
    """Changes the folder of torch's compiled programs if another user can write the present one.

    torch 2.13 runs whatever programs it finds in its folder below the temporary one.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    if (access := foreign_access(Path(cache_dir()))) is None:
        return
    folder = cache_folder() / "torchinductor"
    with suppress(RunError):
        make_private_folder(folder)
    if not folder.is_dir() or foreign_access(folder) is not None:
        folder = Path(tempfile.mkdtemp(prefix="hotloop-"))
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    say(f"compiled programs are in {folder}, not in torch's cache: {access}")


_MAX_TERMS = 8
"""Operations of an index. A longer one is expanded, which takes milliseconds, and simplified only if it gets short."""


@contextmanager
def patch_stride_simplify() -> Iterator[None]:
    """Limits the time that Inductor spends on sympy's simplification of index expressions (torch 2.13).

    A long index takes sympy minutes. Unsimplified, it counts as not contiguous: slower to read, and as correct.
    Upstream: pytorch/pytorch#133734, for another caller. Test without the patch: `test_torch_simplifies_long_indices`.
    """
    from torch._inductor import sizevars  # imports sympy

    with patch_attribute(sizevars, "sympy", _FastSympy):
        yield


class _FastSympy:
    """sympy with a limited `simplify`."""

    def __init__(self, sympy: Any) -> None:
        self._sympy = sympy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sympy, name)

    def simplify(self, index: Any) -> Any:
        if index.count_ops() > _MAX_TERMS:
            index = self._sympy.expand(index)
        return index if index.count_ops() > _MAX_TERMS else self._sympy.simplify(index)


@contextmanager
def patch_mutation_deps() -> Iterator[None]:
    """Keeps the dependencies of Inductor's nodes when the scheduler changes their loops (torch 2.13).

    Without it a dropout mask may be read before it is drawn. Upstream: pytorch/pytorch#185509 and #177631.
    Test without the patch: `test_torch_forgets_it_by_itself`.
    """
    from torch._inductor import scheduler

    with patch_attribute(scheduler.SchedulerNode, "recompute_size_and_body", _keep_dependencies):
        yield


def _keep_dependencies(recompute: Callable[..., None]) -> Callable[..., None]:
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch.utils._ordered_set import OrderedSet

    def recomputed(node: Any, *args: Any, **kwargs: Any) -> None:
        dependencies = OrderedSet(read for read in node.read_writes.reads if isinstance(read, StarDep | WeakDep))
        recompute(node, *args, **kwargs)
        node.set_read_writes(node.read_writes.with_read(dependencies).rename(node.mutation_renames))

    return recomputed


_RNG_NAMES = (
    "rand_like",
    "randn_like",
    "randint_like",
    "bernoulli",
    "normal",
    "poisson",
    "binomial",
    "_standard_gamma",
)
_RNG_OPS = {getattr(torch.ops.aten, name) for name in _RNG_NAMES}


@contextmanager
def keep_rng_layout() -> Iterator[None]:
    """Keeps the eager layout of tensors in whose shape random numbers are drawn: kernels draw in the order of memory.

    Inductor lays out the result of a convolution otherwise, so `randn_like` of it has its numbers in other places (torch 2.13).
    Upstream: pytorch/pytorch#177652. Test without the patch:
    `test_noise_on_what_convolutions_give_is_that_of_the_eager_step[False]`.
    """
    from torch._inductor import graph

    with patch_attribute(graph, "maybe_layout_constraints", _with_rng_constraints):
        yield


def _with_rng_constraints(original: Callable[..., Any]) -> Callable[..., Any]:
    from torch._inductor.lowering import constrain_to_fx_strides

    def constraint(operation: Any) -> Any:
        is_random = isinstance(operation, OpOverload) and operation.overloadpacket in _RNG_OPS
        return constrain_to_fx_strides if is_random else original(operation)

    return constraint


@contextmanager
def parallel_embedding_gradients(device: torch.device) -> Iterator[None]:
    """Makes Inductor call torch's kernel for an embedding's gradient, whose threads add up in a fixed order.

    In deterministic mode Inductor's own code for the gradient runs on a single thread (torch 2.13; no upstream issue known).
    Test without the patch: `test_torch_adds_up_an_embedding_s_gradient_on_one_thread`.

    Applies the patch on CPUs in deterministic mode.
    """
    if device.type != "cpu" or not torch.are_deterministic_algorithms_enabled():
        yield
        return
    from torch._inductor.decomposition import decompositions
    from torch._inductor.lowering import lowerings, make_fallback, require_contiguous

    operation = torch.ops.aten.embedding_dense_backward.default
    decomposition = decompositions.pop(operation)
    has_lowering = operation in lowerings
    try:
        if not has_lowering:  # warn=True raises if the environment variable CI is set
            make_fallback(operation, layout_constraint=require_contiguous, warn=False)
        yield
    finally:
        decompositions[operation] = decomposition
        if not has_lowering:
            lowerings.pop(operation, None)


StrideCache = dict[str, Any]
"""Results on the meta device, by operation and operands."""


@contextmanager
def use_real_output_strides() -> Iterator[None]:
    """Reads the strides of results that Inductor leaves to ATen kernels from the kernels instead of the meta kernels.

    `replication_pad2d_backward` promises a contiguous gradient, and returns channels last for channels-last images (torch 2.13):
    a compiled step then fails, and a package computes wrong numbers. torch's own `generate_fake_kernels_from_real_mismatches`
    needs a whole trace in memory. Upstream: no issue for this kernel, pytorch/pytorch#144187 for another.
    Test without the patch: `test_by_what_torch_says_it_reads_something_else`.

    Runs such operations on zeros with their operands' strides, if they run on the CPU and have no side effects.
    """
    from torch._inductor import ir

    cache: StrideCache = {}

    def with_real_strides(process: Any) -> Any:
        def processed(cls: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
            return process.__func__(cls, _infer_result(kernel, cache) if _is_pure(kernel) else kernel, *args, **kwargs)

        return classmethod(processed)

    with patch_attribute(ir.ExternKernel, "process_kernel", with_real_strides):
        yield


def _is_pure(kernel: Any) -> bool:
    """Whether an operation is torch's own, and mutates nothing; others may have side effects."""
    return isinstance(kernel, OpOverload) and kernel.namespace == "aten" and not kernel._schema.is_mutable


def _infer_result(kernel: OpOverload, cache: StrideCache) -> Callable[..., Any]:
    """Returns the operation on fake tensors, with the strides of its results on real tensors."""

    def run(*args: Any, **kwargs: Any) -> Any:
        promised = kernel(*args, **kwargs)
        if is_random_op(kernel, args, kwargs) or not _is_inferable(args, kwargs):
            return promised
        key = f"{kernel} {tree_map_only(Tensor, _call_key, (args, kwargs))}"
        if key not in cache:
            cache[key] = _computed_result(kernel, args, kwargs)
        try:
            return tree_map(_with_strides, promised, cache[key])
        except ValueError:  # the operation fails on zeros
            return promised

    return run


def _is_inferable(args: Any, kwargs: Any) -> bool:
    """Whether the operands are plain values and tensors of known sizes on the CPU, at least one."""
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if not isinstance(leaf, _PLAIN)]
    return bool(leaves) and all(
        isinstance(leaf, Tensor) and leaf.device.type == "cpu" and _has_known_size(leaf) for leaf in leaves
    )


_PLAIN = (type(None), int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


def _has_known_size(value: Tensor) -> bool:
    return value.layout == torch.strided and all(isinstance(size, int) for size in (*value.shape, *value.stride()))


def _call_key(value: Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), value.stride(), value.dtype


def _computed_result(kernel: OpOverload, args: Any, kwargs: Any) -> Any:
    """Returns the result for zeros, on the meta device; None if the operation fails, as a factorisation may."""
    try:
        with disable_current_modes(), no_python_dispatcher(), torch.no_grad():
            result = kernel(*tree_map_only(Tensor, _zeros, args), **tree_map_only(Tensor, _zeros, kwargs))
            return tree_map_only(Tensor, _to_meta, result)
    except Exception:
        return None


def _to_meta(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _zeros(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu").zero_()


def _with_strides(promised: Any, real: Any) -> Any:
    """Returns the promised result with the real strides."""
    are_tensors = isinstance(promised, Tensor) and isinstance(real, Tensor) and _has_known_size(promised)
    if not are_tensors or promised.shape != real.shape or significant_strides(promised) == significant_strides(real):
        return promised
    return promised.new_empty_strided(promised.shape, real.stride())


def significant_strides(value: Tensor) -> list[int]:
    """Returns the strides of dimensions with more than one element."""
    return [stride for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1]


@contextmanager
def trace_mode() -> Iterator[None]:
    """Applies the patches of tracing, and hides warnings, which the eager step has shown.

    The patches are for torch 2.13, without known upstream issues. Tests without the patches:
    `test_torch_captures_onednn_s_lstm`, `test_torch_s_cache_of_strides_ignores_onednn_s_switch`,
    `test_torch_s_lerp_asks_for_its_weight`.
    """
    with warnings.catch_warnings(), reset_stride_cache():
        warnings.simplefilter("ignore")
        with patch_attribute(torch._VF, "lstm", _without_fused_lstm), traceable_groups():
            yield


def _without_fused_lstm(lstm: Callable[..., Any]) -> Callable[..., Any]:
    """Disables oneDNN's fused LSTM layer, whose gradient Inductor can't compile.

    oneDNN's convolutions stay enabled: their meta kernels alone return channels-last results for channels-last images.
    """

    @wraps(lstm)
    def plain(*args: Any) -> Any:
        with torch.backends.mkldnn.flags(enabled=False):
            return lstm(*args)

    return plain


@contextmanager
def reset_stride_cache() -> Iterator[None]:
    """Clears FakeTensorMode's cache if oneDNN is off: cached convolution strides ignore this switch."""
    clear = FakeTensorMode.cache_clear if not torch.backends.mkldnn.enabled else lambda: None
    clear()
    try:
        yield
    finally:
        clear()


def _lerp_(start: Tensor, end: Tensor, weight: Any) -> Tensor:
    return start.add_((end - start) * weight)


DECOMPOSITIONS = {torch.ops.aten.lerp_.Scalar: _lerp_}
"""Replaces torch's decomposition, which branches on `weight < 0.5`: unknown for a schedule's number."""


def mutated_nodes(nodes: Sequence[Node]) -> set[Node]:
    """Returns the nodes that a later operation changes in place, directly or through a view."""
    found = set[Node]()
    for node in nodes:
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            for place, argument in enumerate(node.target._schema.arguments[: len(node.args)]):
                value = node.args[place]
                if argument.is_write and isinstance(value, Node):
                    found.update(_view_chain(value))
    return found


def _view_chain(node: Node) -> Iterator[Node]:
    """Yields the node, and the nodes of which it is a view."""
    yield node
    while node.op == "call_function" and node.all_input_nodes:
        target = node.target
        if target is not operator.getitem and not (
            isinstance(target, OpOverload) and any(value.alias_info for value in target._schema.returns)
        ):
            return
        node = node.all_input_nodes[0]
        yield node


def fix_graph_for_inductor(graph: GraphModule) -> None:
    """Rewrites patterns of a captured graph that Inductor compiles to another result than the eager step (torch 2.13).

    Each rewrite names its upstream issue, if known. Tests without the rewrites: `test_inductor_drops_the_factor_of_a_sum`,
    `test_inductor_keeps_the_strides_of_a_single_operand`, `test_inductor_draws_in_another_order`,
    `test_that_takes_what_is_written_for_it`.

    Rewrites a captured step for Inductor; the results stay the same.
    """
    _expand_scaled_sums(graph)
    _drop_empty_operands(graph)
    _draw_in_memory_order(graph)
    _skip_permutation_checks(graph)
    graph.recompile()


def _expand_scaled_sums(graph: GraphModule) -> None:
    """Splits `a + factor * b`, as one operation, into two.

    Inductor turns an addition to a matrix product into `addmm`, and drops the factor: plain SGD's update, `parameter +
    (-rate) * (x @ y)`, would ascend with a rate of 1. Upstream: pytorch/pytorch#167313 for the reverse pattern.
    """
    aten = torch.ops.aten
    kinds = (aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor)
    for node in graph.graph.nodes:
        if node.target in kinds and "alpha" in node.kwargs:
            with graph.graph.inserting_before(node):
                scaled = graph.graph.call_function(aten.mul.Tensor, (node.args[1], node.kwargs["alpha"]))
            node.args, node.kwargs = (node.args[0], scaled), {}


def _drop_empty_operands(graph: GraphModule) -> None:
    """Removes tensors of shape (0,), such as an empty cache, from concatenations.

    Inductor drops them by itself, but keeps the strides of a single remaining tensor. The eager kernel returns a new
    contiguous tensor, and captured views of that tensor don't fit the other strides.
    """
    aten = torch.ops.aten
    for node in graph.graph.find_nodes(op="call_function", target=aten.cat.default):
        operands: Any = node.args[0]
        filled = [operand for operand in operands if not _is_empty(operand.meta["val"])]
        # an empty operand may have decided the result's dtype
        has_other_dtype = any(operand.meta["val"].dtype != node.meta["val"].dtype for operand in filled)
        if has_other_dtype or len(filled) in (0, len(operands)):
            continue
        node.args = (filled, *node.args[1:])
        if len(filled) == 1:
            options: dict[str, Any] = {"memory_format": suggest_memory_format(node.meta["val"])}
            with graph.graph.inserting_before(node):
                copied = graph.graph.call_function(aten.clone.default, (filled[0],), options)
            copied.meta = dict(node.meta)
            node.replace_all_uses_with(copied)
            graph.graph.erase_node(node)


def _is_empty(value: Tensor) -> bool:
    return value.ndim == 1 and isinstance(value.shape[0], int) and not value.shape[0]


def _draw_in_memory_order(graph: GraphModule) -> None:
    """Permutes the operands of random operations so that dimensions are in the order of memory.

    Eager kernels draw in the order of memory. Inductor chooses other strides for intermediate tensors, so a mask with
    permuted strides, such as of attention's output, would get other numbers.
    """
    permute = torch.ops.aten.permute.default
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if not _is_random(node) or not isinstance(value, Tensor) or value.is_contiguous():
            continue
        if node.target.overloadpacket is torch.ops.aten.normal:
            _draw_from_contiguous(graph, node, value)
            continue
        strides = value.stride()
        order = sorted(range(value.ndim), key=strides.__getitem__, reverse=True)
        with graph.graph.inserting_before(node):
            args = tuple(_permute_operand(graph, arg, value, order) if _is_tensor(arg) else arg for arg in node.args)
        with graph.graph.inserting_after(node):
            back = graph.graph.call_function(permute, (node, [order.index(place) for place in range(value.ndim)]))
        node.args, back.meta = args, dict(node.meta)
        node.meta["val"] = value.permute(order)
        node.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)


def _draw_from_contiguous(graph: GraphModule, node: Node, value: Tensor) -> None:
    """Makes the operands of `normal` contiguous: unlike its meta kernel, it draws in the order of dimensions."""
    with graph.graph.inserting_before(node):
        args = tuple(_make_contiguous(graph, arg) if _is_tensor(arg) else arg for arg in node.args)
    node.args, node.meta["val"] = args, value.contiguous()


def _make_contiguous(graph: GraphModule, node: Node) -> Node:
    options: dict[str, Any] = {"memory_format": torch.contiguous_format}
    copied = graph.graph.call_function(torch.ops.aten.clone.default, (node,), options)
    copied.meta["val"] = node.meta["val"].contiguous()
    return copied


def _permute_operand(graph: GraphModule, node: Node, value: Tensor, order: list[int]) -> Node:
    """Returns an operand, expanded to the shape of `value`, with permuted dimensions."""
    if node.meta["val"].shape != value.shape:
        expanded = node.meta["val"].expand(value.shape)
        node = graph.graph.call_function(torch.ops.aten.expand.default, (node, list(value.shape)))
        node.meta["val"] = expanded
    permuted = graph.graph.call_function(torch.ops.aten.permute.default, (node, order))
    permuted.meta["val"] = node.meta["val"].permute(order)
    return permuted


def _is_tensor(value: Any) -> TypeGuard[Node]:
    return isinstance(value, Node) and isinstance(value.meta.get("val"), Tensor)


def _is_random(node: Node) -> bool:
    """Whether the node draws into a tensor, or in the shape of a tensor."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or torch.Tag.nondeterministic_seeded not in node.target.tags:  # type: ignore[union-attr]
        return False
    return schema.name.partition("::")[2].removesuffix("_") in _RANDOM_OPS or schema.name.endswith("_like")


_RANDOM_OPS = ("bernoulli", "uniform", "normal", "exponential", "random", "cauchy", "geometric", "log_normal")


def _skip_permutation_checks(graph: GraphModule) -> None:
    """Drops the bounds check of indexing with a random permutation of the rows, as mixup does.

    Inductor has the same pattern, but fails if all rows are indexed. Upstream: pytorch/pytorch#158457 and #183988.
    """
    aten = torch.ops.aten
    lookups = graph.graph.find_nodes(op="call_function", target=aten.index.Tensor)
    mutated = mutated_nodes(list(graph.graph.nodes)) if lookups else set()
    for node in lookups:
        image, rows = node.args[0].meta["val"], node.args[1]
        if len(rows) == 1 and rows[0] not in mutated and _is_permutation(rows[0], image.shape[0]):
            node.target = aten._unsafe_index.Tensor


def _is_permutation(node: Node, rows: Any) -> bool:
    """Whether the node draws a permutation of at most `rows` rows, as far as shapes are known at capture."""
    draws = node.target in (torch.ops.aten.randperm.default, torch.ops.aten.randperm.generator)
    return draws and isinstance(rows, int) and isinstance(node.args[0], int) and node.args[0] <= rows


def inductor_options() -> dict[str, Any]:
    """Returns options: random numbers are drawn from torch's generators, as in the eager step, and AVX isn't tested.

    A compiler that accepts torch's headers supports AVX2 and AVX-512, so torch's four test compilations of 9 s are left
    out. Torch still tests the compiler for VNNI, bfloat16 and AMX, in less than a second each (torch 2.13).
    """
    is_avx = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return {"fallback_random": True, **({"cpp.vec_isa_ok": True} if is_avx else {})}
