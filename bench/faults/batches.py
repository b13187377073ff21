"""Faults of what a step gets and reports: random draws, batches, the sum of losses."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from bench.faults.planting import Planted, a_factor, around, each
from hotloop.data.batch_tree import map_tensors
from hotloop.lowering.program import Program

# ---------------------------------------------------------------- draws


def mask_repeated(program: Program, draws: random.Random) -> Planted:
    """The same draws for so many steps."""
    if not _draws(program):
        return None
    every = draws.choice((2, 4, 16, 1_000_000))
    around(program._step.draws, "seed", lambda seed: lambda step: seed(step - step % every))
    return f"for {every} steps", None


def draws_of_another_step(program: Program, draws: random.Random) -> Planted:
    if not _draws(program):
        return None
    around(program._step.draws, "seed", lambda seed: lambda step: seed(step + 1))
    return "the draws", None


def _draws(program: Program) -> bool:
    return program.parts.task.step is not None or any(
        isinstance(module, nn.Dropout) and module.p for module in program.model.modules()
    )


# ---------------------------------------------------------------- batches


def _of_batches(change: Callable[[Any, int], Any]) -> Callable[[Program, random.Random], Planted]:
    """Another batch at each so many steps."""

    def plant(program: Program, draws: random.Random) -> Planted:
        turn, every = each(draws)

        def make(compute: Callable) -> Callable:
            return lambda batch: compute(change(batch, len(batch[0])) if turn() else batch)

        step = program._step
        around(step, "_compute", make)
        return f"each {every} steps", 1 / every

    return plant


def input_changed(program: Program, draws: random.Random) -> Planted:
    """The batch is changed in place, before or after it is used."""
    turn, every = each(draws)
    early = draws.random() < 0.5

    def change(batch: Any) -> None:
        first = batch[0]
        first.mul_(1.5) if first.is_floating_point() else first.clamp_(max=3)

    def make(compute: Callable) -> Callable:
        def mutating(batch: Any) -> Any:
            now = turn()
            if now and early:
                change(batch)
            out = compute(batch)
            if now and not early:
                with torch.no_grad():
                    change(map_tensors(Tensor.detach, batch))
            return out

        return mutating

    around(program._step, "_compute", make)
    return f"{'before' if early else 'after'} its use, each {every} steps", 1 / every


def _rows(order: Callable[[int], list[int]]) -> Callable[[Any, int], Any]:
    return lambda batch, count: map_tensors(lambda value: value[order(count)], batch)


counted_twice = _of_batches(_rows(lambda count: [*range(count), 0]))
another_repeated = _of_batches(_rows(lambda count: [*range(count - 1), 0]))
sample_dropped = _of_batches(_rows(lambda count: list(range(count - 1))))
labels_shifted = _of_batches(lambda batch, count: (batch[0], *(value.roll(1, 0) for value in batch[1:])))


def scalar_of_the_whole_batch(program: Program, draws: random.Random) -> Planted:
    """An incomplete batch is averaged as if it were padded to the size of the others."""
    full = program.parts.splits.order.batch_size if program.parts.splits.order else 0

    def make(compute: Callable) -> Callable:
        def padded(batch: Any) -> Any:
            computed = compute(batch)
            share = len(batch[0]) / full
            return computed if share == 1 else computed._replace(loss=computed.loss * share)

        return padded

    around(program._step, "_compute", make)
    return "the last batch", None


def last_batch_dropped(program: Program, draws: random.Random) -> Planted:
    return _of_feed(program, lambda batches: batches[:-1], "the last batch")


def batches_in_another_order(program: Program, draws: random.Random) -> Planted:
    return _of_feed(program, lambda batches: [*batches[1::-1], *batches[2:]], "the first two of an epoch")


def batches_of_the_first_epoch(program: Program, draws: random.Random) -> Planted:
    around(program.feed, "epoch", lambda epoch: lambda number, start=0: epoch(0, start))
    return "each epoch", None


def _of_feed(program: Program, change: Callable[[list], list], where: str) -> Planted:
    def make(epoch: Callable) -> Callable:
        def changed(number: int, start: int = 0) -> Iterator[Any]:
            return iter(change(list(epoch(number, 0)))[start:])

        return changed

    around(program.feed, "epoch", make)
    return where, None


def counted_wrongly(program: Program, draws: random.Random) -> Planted:
    """The sum of the losses, which is what a user sees of training."""
    factor, size = a_factor(draws)
    around(program._step, "_add", lambda add: lambda loss, *rest: add(loss * factor, *rest))
    return "the reported loss", size


FAULTS: dict[str, Callable[[Program, random.Random], Planted]] = {
    "repeated dropout mask": mask_repeated,
    "draws of another step": draws_of_another_step,
    "input buffer changed": input_changed,
    "sample counted twice": counted_twice,
    "sample in place of another": another_repeated,
    "sample dropped": sample_dropped,
    "labels shifted": labels_shifted,
    "last batch averaged as if padded": scalar_of_the_whole_batch,
    "last batch dropped": last_batch_dropped,
    "batches in another order": batches_in_another_order,
    "batches of the first epoch": batches_of_the_first_epoch,
    "reported loss off": counted_wrongly,
}
