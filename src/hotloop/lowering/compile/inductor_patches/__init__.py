"""Patches of torch's compiler for captured steps, one file each, and the versions that need them.

Each file names the torch version, the upstream issue, and the test that runs torch without the patch: when that test fails,
the patch can go. Inductor is imported within functions: the import takes seconds, which a cached package saves.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

from hotloop.core.files.user_folders import cache_folder, foreign_access, make_private_folder
from hotloop.core.reporter import Say
from hotloop.errors import RunError
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
