"""torch's compiler reads masks of dropout after they are drawn, whatever loops it gives to those who read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import scheduler
from torch._inductor.dependencies import ReadWrites, StarDep, WeakDep
from torch.utils._ordered_set import OrderedSet

import hotloop
from hotloop.core.patches import Patches
from hotloop.lowering.compile import inductor_patches
from hotloop.lowering.compile.inductor_patches import patch_mutation_deps
from tests.support.eager_comparison import STEP
from tests.support.programs import a_task


class Block(nn.Module):
    """Norms of rows and dropout around each layer, as in a transformer: loops that the compiler makes one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(20, 32), nn.Linear(32, 3)
        self.norms = nn.ModuleList([nn.LayerNorm(32), nn.LayerNorm(32)])
        self.layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])
        self.dropout = nn.Dropout(0.1)

    def forward(self, words: Tensor) -> Tensor:
        x = self.dropout(self.table(words))
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + self.dropout(layer(norm(x)).relu())
        return self.out(x.mean(1))  # type: ignore[no-any-return]


Told = list[tuple[int, int]]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], AbstractContextManager[None]]], Told]:
    """Compiles a Block within a context, and tells of each operation that got other loops how many buffers it read that had
    another name by then, and how many of them by the name that they had before."""

    def compiled(within: Callable[[], AbstractContextManager[None]]) -> Told:
        found: Told = []

        def noting(recompute: Callable[..., None]) -> Callable[..., None]:
            def noted(node: Any, *given: Any, **named: Any) -> None:
                recompute(node, *given, **named)
                old = [one.name for one in node.read_writes.reads if one.name in node.mutation_renames]
                found.append((len(node.mutation_renames), len(old)))

            return noted

        @contextmanager
        def watched() -> Iterator[None]:
            patches = Patches()
            with within():
                patches.patch(scheduler.SchedulerNode, "recompute_size_and_body", noting)
                try:
                    yield
                finally:
                    patches.undo()

        monkeypatch.setattr(inductor_patches, "patch_mutation_deps", watched)
        words = torch.randint(20, (24, 16), generator=torch.Generator().manual_seed(0))
        with torch._inductor.config.patch(fx_graph_cache=False):
            hotloop.lower(a_task(model=Block, data=(words, words[:, 0] % 3)), STEP)
        return [one for one in found if one[0]]

    return compiled


@pytest.mark.more
def test_who_gets_other_loops_still_reads_what_was_drawn(
    reads: Callable[[Callable[[], AbstractContextManager[None]]], Told],
) -> None:
    found = reads(patch_mutation_deps)
    assert found and not any(old for _, old in found)


@pytest.mark.more
@pytest.mark.skipif(torch.__version__ >= "2.14", reason="a later torch may remember by itself")
def test_torch_forgets_it_by_itself(
    reads: Callable[[Callable[[], AbstractContextManager[None]]], Told],
) -> None:
    assert any(old for _, old in reads(nullcontext))


class Reads:
    """A node of the compiler's, as far as it is asked for what it reads."""

    def __init__(self, *reads: Any) -> None:
        self.mutation_renames = {"mask": "drawn"}
        self.set_read_writes(ReadWrites(OrderedSet(reads), OrderedSet(), OrderedSet()))

    def set_read_writes(self, read_writes: ReadWrites) -> None:
        self.read_writes = read_writes

    def recompute_size_and_body(self) -> None:
        """As torch 2.11 does it."""
        self.set_read_writes(ReadWrites(OrderedSet([StarDep("mask")]), OrderedSet(), OrderedSet()))


def test_who_must_come_first_is_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "SchedulerNode", Reads)
    node = Reads(StarDep("mask"), WeakDep("reader", "mask"))
    with patch_mutation_deps():
        node.recompute_size_and_body()
    assert node.read_writes.reads == {StarDep("drawn"), WeakDep("reader", "mask")}
    node.recompute_size_and_body()
    assert node.read_writes.reads == {StarDep("mask")}


def test_what_was_compiled_otherwise_is_not_taken_from_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    tags = []
    for version in (1, 2):
        monkeypatch.setattr(inductor_patches, "INDUCTOR_PATCH_VERSION", version)
        with inductor_patches.inductor_patches(torch.device("cpu")):
            tags.append(torch.compiler.config.cache_key_tag)
    assert len({*tags, torch.compiler.config.cache_key_tag}) == 3


def test_the_compiler_is_as_it_was_after_an_error() -> None:
    before = scheduler.SchedulerNode.recompute_size_and_body
    with pytest.raises(ValueError), patch_mutation_deps():
        raise ValueError
    assert scheduler.SchedulerNode.recompute_size_and_body is before
