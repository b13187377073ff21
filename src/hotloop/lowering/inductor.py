"""What torch's compiler, Inductor, has to know of captured steps. Its import takes seconds, which a kept package does without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from hotloop.lowering.fallbacks import drawn_as_laid, laid_as_computed
from hotloop.lowering.grouped import traceable_groups
from hotloop.lowering.mutations import kept_mutations
from hotloop.lowering.rewrites import laid_out, mm_by_onednn
from hotloop.lowering.strides import quick_strides
from hotloop.lowering.threads import embeddings_in_parallel

MENDED = 4
"""Counts up with each change of what is mended of the compiler: what was compiled before is not taken from a cache any more."""


@contextmanager
def ready_to_compile(device: torch.device) -> Iterator[None]:
    """Around whatever is compiled for a device."""
    mm_by_onednn.known_to_inductor()
    laid_out.known_to_inductor()
    config = torch.compiler.config  # a module to which torch gives `patch` when it is imported
    with ExitStack() as stack:
        tag = f"{config.cache_key_tag} hotloop {MENDED} {torch.backends.mkldnn.enabled}"
        stack.enter_context(config.patch(cache_key_tag=tag))  # type: ignore[attr-defined]
        for mending in (quick_strides, kept_mutations, traceable_groups, laid_as_computed, drawn_as_laid):
            stack.enter_context(mending())
        stack.enter_context(embeddings_in_parallel(device))
        yield
