"""Keeps the dependencies of Inductor's nodes when the scheduler changes their loops (torch 2.13).

Without it a dropout mask may be read before it is drawn. Upstream: pytorch/pytorch#185509 and #177631.
Test without the patch: `test_torch_forgets_it_by_itself`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hotloop.core.patches import patch_attribute


@contextmanager
def patch_mutation_deps() -> Iterator[None]:
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
