"""Keeps torch's compiler from forgetting, on a CPU, what is written before it is read.

A buffer that is drawn into, or updated in place, has another name from then on, and who reads it by that name comes later.
Where the compiler gives an operation other loops so that it fuses with its neighbour, it reads what that reads anew, by the old names
(torch 2.13; 2.11 also forgets who must have read before something is written). When it then orders operations by the memory
that they need, a mask of dropout may be read before it is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hotloop.patches import patched


@contextmanager
def kept_mutations() -> Iterator[None]:
    """Meanwhile an operation of other loops waits for what it waited for before."""
    from torch._inductor import scheduler  # the compiler, which takes seconds to import

    with patched(scheduler.SchedulerNode, "recompute_size_and_body", _keeping):
        yield


def _keeping(recompute: Callable[..., None]) -> Callable[..., None]:
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch.utils._ordered_set import OrderedSet

    def recomputed(node: Any, *given: Any, **named: Any) -> None:
        waited = OrderedSet(one for one in node.read_writes.reads if isinstance(one, StarDep | WeakDep))
        recompute(node, *given, **named)
        node.set_read_writes(node.read_writes.with_read(waited).rename(node.mutation_renames))

    return recomputed
