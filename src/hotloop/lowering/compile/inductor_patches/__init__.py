"""Patches of torch's compiler for captured steps, one file each, and the versions that need them.

Each file names the torch version, the upstream issue, and the test that runs torch without the patch: when that test fails,
the patch can go. Inductor is imported within functions: the import takes seconds, which a cached package saves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from hotloop.lowering.compile.inductor_patches.embedding_gradients import parallel_embedding_gradients
from hotloop.lowering.compile.inductor_patches.grouped_mm_strides import traceable_groups
from hotloop.lowering.compile.inductor_patches.index_simplification import patch_stride_simplify
from hotloop.lowering.compile.inductor_patches.mutation_order import patch_mutation_deps
from hotloop.lowering.compile.inductor_patches.output_strides import use_real_output_strides
from hotloop.lowering.compile.inductor_patches.rng_layout import keep_rng_layout
from hotloop.lowering.rewrites import fx_nodes, mm_by_onednn

INDUCTOR_PATCH_VERSION = 4
"""Version of all patches. A program that was compiled with another version is never read from a cache."""


@contextmanager
def inductor_patches(device: torch.device) -> Iterator[None]:
    """Applies all patches while a step is compiled for a device, and registers hotloop's operators."""
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
