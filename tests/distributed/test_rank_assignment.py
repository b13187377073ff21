"""What a rank works out by itself, without any other there: its rows, its draws, and its seat."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hotloop
from hotloop.data.order import DealtBatches, Order, RankRows, rank_bounds
from hotloop.distributed.fork_safety import check_cuda
from hotloop.distributed.join import LAUNCH_ID_PREFIX, RankEnv, RankSession, join_process_group, join_ranks
from hotloop.distributed.launch import launch, local_rank_count
from hotloop.distributed.world import SINGLE_RANK, World
from hotloop.distributed.wrappers.global_batch_rng import (
    BatchDimension,
    DrawPattern,
    DrawRecorder,
    GlobalBatchRng,
    RandomDraw,
)
from hotloop.errors import PlanError, TaskError
from hotloop.plan import Plan
from tests.support.tasks.rank_tasks import images

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "mine",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def test_more_ranks_than_there_is_memory_for_are_refused_before_any_is_started() -> None:
    with pytest.raises(PlanError, match=r"^100000 ranks, with .* of memory free; expected at most .* Use fewer"):
        launch(100_000, lambda: None, lambda line: None)


@pytest.mark.parametrize("samples", [1, 2, 3, 7, 128])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_rows_are_shared_without_gap_or_overlap(samples: int, ranks: int) -> None:
    rows = [list(range(*rank_bounds(samples, rank, ranks))) for rank in range(ranks)]
    assert [row for own in rows for row in own] == list(range(samples))
    assert max(map(len, rows)) - min(map(len, rows)) <= 1


def test_a_rank_without_rows_computes_along_on_the_first() -> None:
    order = Order(9, 4, seed=0)
    permutation = order.epoch(0)
    last = [RankRows(**vars(order), rank=rank, ranks=3).batch(permutation, 2).tolist() for rank in range(3)]
    assert last == [order.batch(permutation, 2).tolist()] * 3  # of a single sample, which the third rank has
    assert order.size(2) == 1 and order.size(0) == 4


def test_whole_batches_are_dealt_in_turn() -> None:
    order = Order(23, 4, seed=0, shuffle=False)
    hands = [DealtBatches(**vars(order), rank=rank, ranks=4) for rank in range(4)]
    assert [hand.batches for hand in hands] == [2, 2, 1, 1]
    dealt = [
        hand.batch(order.epoch(0), number).tolist() for number in range(2) for hand in hands if number < hand.batches
    ]
    assert dealt == [order.batch(order.epoch(0), number).tolist() for number in range(order.batches)]


def seen(*shapes: tuple[int, ...]) -> list[RandomDraw]:
    return [RandomDraw("bernoulli_", shape) for shape in shapes]


def test_what_is_drawn_for_each_sample_shows_on_two_sizes() -> None:
    few, more = seen((2, 5), (7, 4, 5), (6, 5)), seen((3, 5), (7, 6, 5), (6, 5))
    pattern = DrawPattern.from_draws(few, more, (2, 3))
    assert pattern == DrawPattern(frozenset({BatchDimension(2, 0, 1), BatchDimension(3, 1, 2)}), frozenset({(6, 5)}))
    assert pattern.has_draws and not pattern.odd
    assert not DrawPattern.from_draws([], [], (2, 3)).has_draws


@pytest.mark.parametrize(
    ("few", "more"),
    [
        (seen((2, 5)), seen((3, 5), (3, 5))),
        (seen((2, 2)), seen((3, 3))),
        (seen((4, 5)), seen((5, 5))),
        ([RandomDraw("bernoulli", (2, 5))], [RandomDraw("bernoulli", (3, 5))]),
    ],
)
def test_draws_that_cannot_be_told_apart_are_named(few: list[RandomDraw], more: list[RandomDraw]) -> None:
    assert DrawPattern.from_draws(few, more, (2, 3)).odd


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x[torch.randperm(len(x))],
        lambda x: torch.normal(x, x.abs()),
        lambda x: F.rrelu(x, training=True),
        lambda x: torch.empty_like(x).bernoulli_(x.sigmoid()),
    ],
    ids=["randperm", "normal", "rrelu_with_noise", "bernoulli_"],
)
def test_draws_for_each_sample_that_cannot_be_repeated_are_named(
    draw: Callable[[Tensor], Tensor], request: pytest.FixtureRequest
) -> None:
    def watched(samples: int) -> list[RandomDraw]:
        with DrawRecorder(torch.device("cpu")) as seen:
            draw(torch.randn(samples, 3, generator=torch.Generator().manual_seed(0)))
        return seen.drawn

    pattern = DrawPattern.from_draws(watched(2), watched(3), (2, 3))
    assert pattern.odd == request.node.callspec.id
    assert not pattern.has_draws


def test_a_permutation_that_has_nothing_to_do_with_samples_is_the_same_for_all() -> None:
    with DrawRecorder(torch.device("cpu")) as seen:
        torch.randperm(5)
    assert DrawPattern.from_draws(seen.drawn, seen.drawn, (2, 3)) == DrawPattern(single=frozenset({(5,)}))


def test_what_the_cpu_draws_for_a_gpu_is_seen_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "default_generators", (torch.Generator(),))
    with DrawRecorder(torch.device("cuda")) as seen:
        torch.randn(2, 5)
    assert [one.shape for one in seen.drawn] == [(2, 5)]


def test_rows_of_draws_are_those_of_the_whole_and_others_are_refused() -> None:
    pattern = DrawPattern(frozenset({BatchDimension(2, 0, 1)}))
    torch.manual_seed(0)
    whole = torch.rand(7, 5)
    parts = []
    for rank in range(3):
        first, last = rank_bounds(7, rank, 3)
        torch.manual_seed(0)
        with GlobalBatchRng(pattern, 7, rank, 3):
            parts.append(torch.rand(last - first, 5))
    assert torch.cat(parts).equal(whole)
    with GlobalBatchRng(pattern, 7, 0, 3), pytest.raises(TaskError, match=r"random numbers of shape \(9, 9, 9\)"):
        torch.rand(9, 9, 9)


def test_a_draw_for_all_that_is_of_the_same_shape_as_one_for_the_ranks_rows_is_told_from_it_by_its_place() -> None:
    few, more = seen((2, 5), (4, 5)), seen((3, 5), (4, 5))
    pattern = DrawPattern.from_draws(few, more, (2, 3))
    torch.manual_seed(0)
    whole, for_all = torch.rand(8, 5), torch.rand(4, 5)
    parts = []
    for rank in range(2):
        torch.manual_seed(0)
        with GlobalBatchRng(pattern, 8, rank, 2):
            parts.append(torch.rand(4, 5))
            assert torch.rand(4, 5).equal(for_all)
    assert torch.cat(parts).equal(whole)
    with (
        GlobalBatchRng(pattern, 8, 0, 2),
        pytest.raises(TaskError, match="may be for each sample, or the same for all"),
    ):
        torch.rand(4, 5), torch.rand(4, 5), torch.rand(4, 5)


def test_what_lies_turned_in_memory_is_drawn_in_the_order_of_memory() -> None:
    """As one process draws it, such as dropout behind an attention."""

    def turned(samples: int) -> Tensor:
        return torch.ones(4, samples, 8).transpose(0, 1)

    pattern = DrawPattern(batchwise=frozenset({BatchDimension(3, 0, 1, order=(1, 0, 2))}))
    for draw in (lambda x: F.dropout(x, 0.5), torch.randn_like, lambda x: x.clone().uniform_()):
        torch.manual_seed(0)
        whole = draw(turned(4))
        parts = []
        for rank in range(3):
            first, last = rank_bounds(4, rank, 3)
            torch.manual_seed(0)
            with GlobalBatchRng(pattern, 4, rank, 3):
                parts.append(draw(turned(last - first)))
        assert torch.cat(parts).equal(whole)


def test_a_seat_is_what_torchrun_says() -> None:
    assert RankEnv.from_env({}) is None
    seat = RankEnv.from_env(TORCHRUN)
    assert seat == RankEnv(
        3,
        4,
        1,
        2,
        "10.0.0.1",
        29500,
        launch="mine/2",
        restarts=2,
        outlives_launcher=True,
        is_elastic=True,
        is_watched=False,
    )
    own = RankEnv.from_env(TORCHRUN | {"TORCHELASTIC_RUN_ID": LAUNCH_ID_PREFIX + "1"})
    assert own is not None and own.is_watched
    without = RankEnv.from_env(TORCHRUN | {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert without is not None and without.serves_store and without.without_restarts and not seat.without_restarts
    # Each machine's agent counts for itself, and in a store of their own nobody else's names are in the way.
    fresh = RankEnv.from_env(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"})
    assert fresh is not None and fresh.launch == without.launch
    others = RankEnv.from_env({name: value for name, value in TORCHRUN.items() if "ELASTIC" not in name})
    assert others is not None and not others.is_elastic
    for broken in ({"MASTER_PORT": "x"}, {"WORLD_SIZE": ""}):
        with pytest.raises(PlanError, match="RANK and WORLD_SIZE are in the environment"):
            RankEnv.from_env(TORCHRUN | broken)


@pytest.mark.parametrize(
    ("restarts", "age_s", "theirs"),
    [(1, 10, True), (1, 1, True), (0, 10, True), (0, 1, False), (0, 1000, False), (1, 1000, False)],
)
def test_a_run_is_gone_on_with_if_ranks_that_torchrun_started_before_have_begun_it(
    tmp_path: Path, restarts: int, age_s: float, theirs: bool
) -> None:
    """Not one that was there before, nor this process' own; that machines came or went, torchrun doesn't count."""
    agent = time.time() - 100
    ranks = RankSession(restarts=restarts, started=(agent, time.time() - 5))
    assert ranks.cut_short_at(tmp_path) is None
    (tmp_path / "run.json").touch()
    made = time.time() - age_s
    os.utime(tmp_path / "run.json", (made, made))
    assert ranks.cut_short_at(tmp_path) == (pytest.approx(agent, abs=0.01) if theirs else None)
    assert (ranks.cut_short_at(tmp_path, theirs=True) is not None) is (theirs or restarts > 0)
    assert RankSession(restarts=restarts).cut_short_at(tmp_path) is None


def test_ranks_without_a_plan_for_them_and_the_other_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r"ranks, which `hotloop train` and `hotloop\.fit` start"):
        World.from_group(Plan(parallel="data"))
    assert World.from_group(Plan()) is SINGLE_RANK
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PlanError, match="4 ranks were started, and nothing says"), join_ranks(Plan(), print, None):
        pass
    with (
        pytest.raises(PlanError, match="ranks=2 in the plan, and 4 were"),
        join_ranks(Plan(parallel="data", ranks=2), print, 2),
    ):
        pass


def test_on_a_cpu_ranks_must_be_named() -> None:
    assert local_rank_count(Plan(parallel="data", ranks=5)) == 5
    with pytest.raises(PlanError, match="how many, at most the cores"):
        local_rank_count(Plan(parallel="data", device="cpu"))


def test_ranks_need_a_gpu_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    seat = RankEnv.from_env(TORCHRUN)
    assert seat is not None
    with (
        pytest.raises(PlanError, match=r"^2 ranks on a machine with 1 CUDA device; expected"),
        join_process_group(seat, "cuda", print),
    ):
        pass


def test_forks_are_not_asked_to_use_cuda_that_their_parent_has_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(PlanError, match=r"has used CUDA already; .* restart the notebook's kernel"):
        hotloop.fit(images(torch.float32), plan=Plan(parallel="data", ranks=2, device="cuda"), progress=False)
    check_cuda(Plan(parallel="data", ranks=2, device="cpu"))
