"""What torch's compiler, Inductor, has to know of captured steps. Its import takes seconds, which a kept package does without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from hotloop.core.patches import patch_attribute
from hotloop.lowering.compile.output_strides import keep_rng_layout, use_real_output_strides
from hotloop.lowering.grouped_mm import traceable_groups
from hotloop.lowering.rewrites import fx_nodes, mm_by_onednn
from hotloop.lowering.transforms.threads import parallel_embedding_gradients


@contextmanager
def patch_mutation_deps() -> Iterator[None]:
    """Meanwhile an operation of other loops waits for what it waited for before."""
    from torch._inductor import scheduler  # the compiler, which takes seconds to import

    with patch_attribute(scheduler.SchedulerNode, "recompute_size_and_body", _keep_dependencies):
        yield


def _keep_dependencies(recompute: Callable[..., None]) -> Callable[..., None]:
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch.utils._ordered_set import OrderedSet

    def recomputed(node: Any, *given: Any, **named: Any) -> None:
        waited = OrderedSet(one for one in node.read_writes.reads if isinstance(one, StarDep | WeakDep))
        recompute(node, *given, **named)
        node.set_read_writes(node.read_writes.with_read(waited).rename(node.mutation_renames))

    return recomputed


_MAX_TERMS = 8
"""Operations of an index from which on it is expanded, which takes milliseconds, and simplified only if that makes it short."""


@contextmanager
def patch_stride_simplify() -> Iterator[None]:
    """An index that stays long then is taken for one whose numbers lie apart: slower to read, and as right."""
    from torch._inductor import sizevars  # brings sympy along

    with patch_attribute(sizevars, "sympy", _FastSympy):
        yield


class _FastSympy:
    """sympy, but for what it simplifies."""

    def __init__(self, sympy: Any) -> None:
        self._sympy = sympy

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sympy, name)

    def simplify(self, index: Any) -> Any:
        if index.count_ops() > _MAX_TERMS:
            index = self._sympy.expand(index)
        return index if index.count_ops() > _MAX_TERMS else self._sympy.simplify(index)


INDUCTOR_PATCH_VERSION = 4
"""Version of the fixes of the compiler. A program that another version compiled is not read from a cache."""


@contextmanager
def inductor_patches(device: torch.device) -> Iterator[None]:
    """Around whatever is compiled for a device."""
    mm_by_onednn.register_onednn_product()
    fx_nodes.register_layout_op()
    config = torch.compiler.config  # a module to which torch gives `patch` when it is imported
    with ExitStack() as stack:
        tag = f"{config.cache_key_tag} hotloop {INDUCTOR_PATCH_VERSION} {torch.backends.mkldnn.enabled}"
        stack.enter_context(config.patch(cache_key_tag=tag))  # type: ignore[attr-defined]
        for mending in (
            patch_stride_simplify,
            patch_mutation_deps,
            traceable_groups,
            use_real_output_strides,
            keep_rng_layout,
        ):
            stack.enter_context(mending())
        stack.enter_context(parallel_embedding_gradients(device))
        yield
