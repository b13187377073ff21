"""Losses that look at a batch as a whole are refused before ranks train towards something else; honest ones are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

import hotloop
from hotloop.data.feeds.rank_rows import uses_whole_batch
from hotloop.distributed.world import World
from hotloop.errors import HotloopError
from hotloop.plan import Plan
from tests.support.processes.rank_processes import of_ranks
from tests.support.tasks.batch_losses import HONEST, UNTRIED, WHOLE, WRONG, mean_square, task, vectors

PLANS = [Plan(parallel=parallel, ranks=2) for parallel in ("data", "sharded", "towers", "local")]


def outcome(make: Callable[[], hotloop.Task], plan: Plan) -> tuple[str, list[str], list[float]]:
    """The error of lowering it, what is said, and the buffers of the loss after a step, if there is no error."""
    lines: list[str] = []
    try:
        program = hotloop.lower(make(), plan, lines.append)
        program.advance(1)
    except HotloopError as error:
        return str(error), lines, []
    loss = program.parts.task.loss
    return "", lines, [float(value) for value in loss.buffers()] if isinstance(loss, nn.Module) else []


EVERYWHERE = ("padded_with_a_weight", "layers_dropped_by_python", "a_loss_with_a_buffer", "rows_mixed_in_the_step")
"""Of the honest losses those that each mode tries; `data` tries all of them."""


def plans_of(name: str) -> list[Plan]:
    return PLANS if name in WHOLE or name in EVERYWHERE else PLANS[:1]


def compute(world: World) -> dict[Any, Any]:
    cases = WHOLE | HONEST | {make.__name__: make for make in WRONG}
    found: dict[Any, Any] = {
        (plan.parallel, name): outcome(make, plan) for name, make in cases.items() for plan in plans_of(name)
    }
    modes = {again: mode_of_backward(again) for again in (False, True)}
    _, norm, _ = outcome(a_norm_over_ranks, Plan(parallel="towers"))
    fractions = {plan.parallel: sums(fractions_counted(), plan) for plan in PLANS[:3]}
    more = {"fractions": fractions, "nothing": after_nothing(), "rows": rows_of(sentences())}
    return found | {"augment": augmented(), "modes": modes, "norm": norm} | more


def sums(given: hotloop.Task, plan: Plan) -> dict[str, float]:
    program = hotloop.lower(given, plan)
    program.advance(9)
    return program.read_sums()


def fractions_counted() -> hotloop.Task:
    """Samples that count fractions; in the last batch, of one sample, the first rank has none."""
    data = vectors()[:3], vectors(2)[:3]
    return task(mean_square, data=data, batch_size=2, weight=lambda batch: 1.7 * torch.ones(len(batch[0])).sum())


def after_nothing() -> list[float]:
    """The weights after a step in which one rank's targets all are left out, as a weight in Python's numbers says."""
    counted = torch.arange(8) < 4

    def step(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]).mean(1) * batch[1]).sum() / batch[1].sum()

    data = vectors()[:8], counted.float()
    given = task(step, data=data, shuffle=False, weight=lambda batch: int(batch[1].sum()))
    program = hotloop.lower(given, PLANS[0])
    program.advance(1)
    return [value for parameter in program.model.parameters() for value in parameter.flatten().tolist()]


def sentences() -> hotloop.Task:
    """Of different lengths, each padded to the longest of its batch, before it; the model sees padding."""

    def collate(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        words = nn.utils.rnn.pad_sequence([words for words, _ in items], batch_first=True, padding_side="left")
        return words, torch.tensor([target for _, target in items])

    data = [(vectors()[number % 24].repeat(1 + number * 7 % 11), number % 2) for number in range(21)]

    def step(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0][:, :6]), batch[1])

    return task(step, data=data, collate=collate)


def rows_of(given: hotloop.Task, plan: Plan = PLANS[0]) -> tuple[list[Any], list[str]]:
    """The batches of an epoch, and what is said beforehand."""
    lines: list[str] = []
    return [batch for batch, _ in hotloop.lower(given, plan, lines.append).feed.epoch(0)], lines


def mode_of_backward(again: bool) -> str:
    """Which mode watches operators of a step's backward, where layers that draw are computed again, or aren't."""
    modes: list[str] = []

    def step(model: nn.Module, batch: Any) -> Tensor:
        output = checkpoint(model, batch[0], use_reentrant=False) if again else model(batch[0])
        output.register_hook(lambda _: modes.append(type(_get_current_dispatch_mode()).__name__))
        return F.mse_loss(output, batch[1])

    hotloop.lower(task(step), PLANS[0]).advance(1)
    return modes[-1]


def a_norm_over_ranks() -> hotloop.Task:
    class Model(nn.Linear):
        """A layer with a norm that only GPUs would reach."""

        def __init__(self) -> None:
            super().__init__(6, 6)
            self.norm = nn.SyncBatchNorm(6)

    return task(mean_square, model=Model)


def augmented() -> Tensor:
    """What torch.rand adds to the rank's rows of the first batch."""
    given = task(
        lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        augment=lambda x, draws: torch.rand(len(x)),
    )
    (noise, _), _ = next(hotloop.lower(given, PLANS[0]).feed.epoch(0))
    return noise  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder: Path = tmp_path_factory.mktemp("shares")
    return of_ranks(folder, PLANS[0], compute)


@pytest.mark.parametrize("parallel", ["data", "sharded", "towers"])
@pytest.mark.parametrize("name", WHOLE)
def test_a_loss_of_the_batch_as_a_whole_is_refused_on_all_ranks(seen: list[Any], parallel: str, name: str) -> None:
    for rank in seen:
        said, *_ = rank[parallel, name]
        assert said.startswith(f"parallel={parallel} changes the gradient of ")
        assert "the loss or a layer divides by a number that a piece counts differently" in said
        assert said.endswith("Use parallel=none, or give the Task a weight(batch): what its loss divides by")


@pytest.mark.parametrize("name", WHOLE)
def test_ranks_that_train_by_themselves_say_so(seen: list[Any], name: str) -> None:
    said, lines, _ = seen[0]["local", name]
    assert not said
    assert (
        "parallel=local: the loss or a layer computes with the whole batch, and each rank computes it on its own rows"
        in lines
    )


@pytest.mark.parametrize("name", HONEST)
def test_a_mean_over_samples_is_taken(seen: list[Any], name: str) -> None:
    for plan in plans_of(name):
        said, lines, _ = seen[0][plan.parallel, name]
        assert not said
        told = [line for line in lines if not line.startswith("each rank draws its own random numbers")]
        untried = "parallel={}: the comparison of the ranks' gradients with that of one process failed to run: {}"
        assert told == [untried.format(plan.parallel, why) for case, why in UNTRIED.items() if case == name]


@pytest.mark.parametrize("make", WRONG, ids=lambda make: make.__name__)
def test_what_is_wrong_with_the_loss_itself_is_left_to_the_first_step(seen: list[Any], make: Any) -> None:
    for plan in plans_of(make.__name__):
        said, lines, _ = seen[0][plan.parallel, make.__name__]
        assert said.startswith(WRONG[make])
        assert not lines


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.parallel)
def test_what_a_loss_keeps_stays_the_same_on_all_ranks(seen: list[Any], plan: Plan) -> None:
    first, second = (rank[plan.parallel, "a_loss_with_a_buffer"][2] for rank in seen)
    assert first == second != []


def test_what_an_augmentation_draws_by_torch_is_other_numbers_on_each_rank(seen: list[Any]) -> None:
    first, second = (rank["augment"] for rank in seen)
    assert len(first) == len(second) == 4
    assert not set(first.tolist()) & set(second.tolist())


@pytest.mark.parametrize("parallel", ["data", "sharded", "towers"])
def test_a_rank_without_rows_cuts_off_no_fraction(seen: list[Any], parallel: str) -> None:
    alone = sums(fractions_counted(), Plan())
    for rank in seen:
        assert rank["fractions"][parallel] == pytest.approx(alone)


def test_a_mean_of_nothing_is_left_out_whatever_number_says_so(seen: list[Any]) -> None:
    assert np.isfinite(seen[0]["nothing"]).all()


def test_what_is_padded_is_padded_as_in_one_process(seen: list[Any]) -> None:
    whole, _ = rows_of(sentences(), Plan())
    for (x, y), *parts in zip(whole, *(rank["rows"][0] for rank in seen), strict=True):
        assert torch.equal(x, torch.cat([part[0] for part in parts]))
        assert torch.equal(y, torch.cat([part[1] for part in parts]))
    said = "collate makes a sample's row depend on others (padding): each rank loads whole batches, and cuts them"
    assert seen[0]["rows"][1] == [said]


def stacked(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Takes its samples apart."""
    y = torch.stack([item.pop("y") for item in items])
    return {"x": torch.stack([item["x"] for item in items]), "y": y}


def along_the_second_dimension(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {"x": nn.utils.rnn.pad_sequence([item["x"] for item in items])}


def mixed(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    x = torch.stack([item["x"] for item in items])
    return {"x": x + x[torch.randperm(len(x))]}


def of_pairs(items: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    assert len(items) > 1
    return stacked(items)


@pytest.mark.parametrize(
    ("collate", "around"), [(stacked, False), (along_the_second_dimension, False), (mixed, True), (of_pairs, True)]
)
def test_whole_batches_are_loaded_only_where_rows_depend_on_others(collate: Any, around: bool) -> None:
    given = task(
        mean_square, data=[{"x": x, "y": y} for x, y in zip(vectors(), vectors(2), strict=True)], collate=collate
    )
    order = given.roles.order
    assert order is not None
    assert uses_whole_batch(given.roles.train, order) is around


def test_backward_is_watched_operator_by_operator_only_where_it_draws(seen: list[Any]) -> None:
    assert seen[0]["modes"] == {False: "NoneType", True: "GlobalBatchRng"}


def test_a_norm_that_looks_at_other_ranks_by_itself_cannot_be_tried(seen: list[Any]) -> None:
    assert [line.partition("failed to run: ")[2] for line in seen[0]["norm"]] == [
        "a SyncBatchNorm reads the batches of other ranks"
    ]
