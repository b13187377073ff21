"""Linear layers split over ranks: what is split, that it comes to what one process comes to, and what can't be."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import RowwiseParallel

import hotloop
from hotloop.core.state import differing_paths
from hotloop.distributed.world import World, check_in_step
from hotloop.errors import PlanError
from hotloop.lowering.steps.splittable_layers import SplitGroup, find_splittable
from hotloop.plan import Plan
from tests.multi.distributed.test_ddp import come_to, distance
from tests.support.processes.rank_processes import of_ranks
from tests.support.tasks.rank_tasks import images

PLAN = Plan(parallel="tensor", ranks=2)
WIDTH, HEADS, WORDS = 8, 2, 11


class Attention(nn.Module):
    """Causal, with dropout of the weights; `plain` writes out what torch has a function for."""

    def __init__(self, dtype: torch.dtype, plain: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(4))
        self.register_buffer("mask", torch.ones(16, 16, dtype=torch.bool).tril())
        self.drop, self.plain = nn.Dropout(0.1), plain

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = (one(x).view(batch, time, HEADS, width // HEADS).transpose(1, 2) for one in (self.q, self.k, self.v))
        if self.plain:
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(WIDTH // HEADS)
            scores = scores.masked_fill(self.mask[:time, :time] == 0, -1e9)
            y = self.drop(torch.softmax(scores, -1)) @ v
        else:
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


class Gated(nn.Module):
    """Two layers side by side before a third, dropout between."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 12, bias=False, dtype=dtype) for _ in range(2))
        self.drop, self.down = nn.Dropout(0.2), nn.Linear(12, WIDTH, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(nn.functional.silu(self.gate(x)) * self.up(x)))


class Words(nn.Module):
    """A small transformer, with a batch norm; a forward that looks at numbers keeps it from being followed as a whole."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, dtype=dtype)
        self.blocks = nn.ModuleList([Attention(dtype, True), Gated(dtype), Attention(dtype, False)])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH, dtype=dtype) for _ in self.blocks])
        self.flat = nn.BatchNorm1d(WIDTH, dtype=dtype)
        self.scores = nn.Linear(WIDTH, 5, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > WORDS:
            raise ValueError("no such word")
        y = self.flat(self.words(x).transpose(1, 2)).transpose(1, 2)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            y = y + block(norm(y))
        return self.scores(y)


GROUPS = [
    SplitGroup(("blocks.0.q", "blocks.0.k", "blocks.0.v"), "blocks.0.out"),
    SplitGroup(("blocks.1.gate", "blocks.1.up"), "blocks.1.down"),
    SplitGroup(("blocks.2.q", "blocks.2.k", "blocks.2.v"), "blocks.2.out"),
]


def words(dtype: torch.dtype, **fields: Any) -> hotloop.Task:
    x = torch.randint(0, WORDS, (45, 7), generator=torch.Generator().manual_seed(2))
    y = (x + x.roll(1, 1)) % 5
    y[torch.rand(45, 7, generator=torch.Generator().manual_seed(3)) < 0.4] = -100
    given: dict[str, Any] = dict(
        model=lambda: Words(dtype),
        loss=lambda output, target: nn.functional.cross_entropy(output.flatten(0, 1), target.flatten()),
        weight=lambda batch: (batch[1] != -100).sum(),
        metrics={},
        optimizer=lambda p: torch.optim.Adam(p, 0.01),
        data=list(zip(x, y, strict=True)),
        validation=11,
        batch_size=8,
        clip_norm=0.5,
        epochs=6,
    )
    return hotloop.Task(**given | fields)


def refusals() -> dict[str, str]:
    """What is said of models that can't be split."""
    said = {}
    for name, task in {
        "alone": images(torch.float64, average=None),
        "average": images(torch.float64),
        "mistaken": words(torch.float64),
    }.items():
        with pytest.MonkeyPatch.context() as patch:
            if name == "mistaken":  # the sum over the ranks is left out
                own = staticmethod(lambda layouts, local, mod, outputs, mesh: outputs.to_local())
                patch.setattr(RowwiseParallel, "_prepare_output_fn", own)
            try:
                hotloop.lower(task, PLAN)
            except PlanError as error:
                said[name] = str(error)
    return said


def gone_back(world: World, say: Callable[[str], None]) -> Any:
    """States after 4 steps, once straight and once over that after 3; and how many numbers a rank holds."""
    program = hotloop.lower(words(torch.float64), PLAN, say)
    program.advance(3)
    then = program.state()
    program.advance(1)
    straight = program.state()
    program.restore(then)
    program.advance(1)
    check_in_step(world, straight)
    local = sum(getattr(value, "_local_tensor", value).numel() for value in program.model.parameters())
    return straight, program.state(), local


def compute(world: World) -> dict[str, Any]:
    lines: list[str] = []
    return {
        "equal": come_to(words(torch.float64), PLAN),
        "back": gone_back(world, lines.append),
        "refusals": refusals(),
        "lines": lines,
    }


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("tensor")
    return of_ranks(folder, PLAN, compute)


@pytest.fixture(scope="module")
def truth() -> Any:
    return come_to(words(torch.float64), Plan())


def test_it_comes_to_what_one_process_comes_to(seen: list[Any], truth: Any) -> None:
    for rank in seen:
        assert {path: value for path, value in distance(rank["equal"], truth).items() if value > 1e-10} == {}


@pytest.mark.more
def test_in_fp32_it_is_as_true_as_one_process(truth: Any, tmp_path: Path) -> None:
    noise = max(distance(come_to(words(torch.float32), Plan()), truth).values())
    for rank in of_ranks(tmp_path, PLAN, lambda world: come_to(words(torch.float32), PLAN)):
        assert max(distance(rank, truth).values()) <= 4 * noise


def test_all_ranks_hold_the_same_bits_and_each_a_part(seen: list[Any]) -> None:
    for rank in seen:
        straight, again, local = rank["back"]
        assert differing_paths(straight, again) == []
        assert differing_paths(straight, seen[0]["back"][0]) == []
        assert differing_paths(rank["equal"][0], seen[0]["equal"][0]) == []
        whole = sum(value.numel() for value in straight.parameters.values())
        spread_out = sum(
            straight.parameters[f"{name}.weight"].numel() for group in GROUPS for name in (*group.columns, group.rows)
        )
        assert whole - spread_out < local < whole - spread_out // 3


def test_what_is_split_is_told(seen: list[Any]) -> None:
    assert seen[0]["lines"] == ["split over the ranks: blocks.0.q, blocks.0.k, blocks.0.v and 8 more; whole on each"
                                " rank: scores"]  # fmt: skip


def test_what_cannot_be_split_is_named(seen: list[Any]) -> None:
    said = seen[0]["refusals"]
    assert said["alone"].startswith("parallel=tensor finds nothing to split: 'hidden' (Linear): ")
    assert "'unused' (Linear): no other linear layer follows it" in said["alone"]
    assert said["average"].startswith("parallel=tensor with an average of the weights")


def test_a_split_that_comes_to_something_else_is_refused(seen: list[Any]) -> None:
    assert "the model has another result with 'blocks.0.out'" in seen[0]["refusals"]["mistaken"]


def test_groups_are_found_wherever_the_forward_can_be_followed() -> None:
    found = find_splittable(Words(torch.float32), 2)
    assert found.groups == GROUPS
    assert list(found.unsplit_reasons) == ["scores"]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return hidden + self.second(hidden)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


def twice() -> nn.Module:
    one = nn.Linear(4, 4)
    return nn.Sequential(one, nn.ReLU(), one)


WHOLE = {
    "a width that doesn't divide": (lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)), "0", "5 columns"),
    "something beside": (Residual, "first", "is used by 'add', too"),
    "a norm between": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), "0", "no other linear layer follows",
    ),
    "tied weights": (tied, "0", "shares its weight"),
    "a layer that is called twice": (twice, "0", "more than once"),
    "torch's own attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8), "self_attn", "one packed weight"),
}  # fmt: skip


@pytest.mark.parametrize("case", WHOLE)
def test_what_stays_whole_has_a_reason(case: str) -> None:
    make, name, why = WHOLE[case]
    found = find_splittable(make(), 2)
    assert found.groups == []
    assert why in found.unsplit_reasons[name]


def test_of_three_in_a_row_the_first_two_are_split() -> None:
    found = find_splittable(nn.Sequential(*[one for _ in range(3) for one in (nn.Linear(4, 4), nn.ReLU())]), 2)
    assert found.groups == [SplitGroup(("0",), "2")]
    assert list(found.unsplit_reasons) == ["4"]
