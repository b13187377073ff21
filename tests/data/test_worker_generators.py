"""Random generators that a data set holds: any number of workers, forked or spawned, draws what one process draws."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

import hotloop
from hotloop.core.state import differing_paths
from tests.support.killed_training import Killed, at_step, kill
from tests.support.processes.resumed_training import disagreements
from tests.support.tasks.owned_generators import (
    HOLDERS,
    KINDS,
    Albumentation,
    Compose,
    Jitter,
    Noisy,
    Pipeline,
    Plain,
    Rows,
    Transformed,
    after,
    noise,
    task_of,
    with_noise,
)

STEPS = 6
"""Into the second epoch of four batches."""


class Collate:
    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __call__(self, items: list[Any]) -> Any:
        x, y = torch.utils.data.default_collate(items)
        return x + noise(self.rng), y


def loaded(data: Any, workers: int, **options: Any) -> DataLoader:
    return DataLoader(data, batch_size=7, shuffle=True, num_workers=workers, **options)


@pytest.mark.few("SFC64", "RandomState", "torch.Generator")
@pytest.mark.parametrize("kind", KINDS)
def test_two_workers_draw_what_one_process_draws(kind: str) -> None:
    none, two = (
        after(task_of(data=loaded(Noisy(KINDS[kind]()), workers, collate_fn=Collate(KINDS[kind]()))), STEPS)
        for workers in (0, 2)
    )
    assert differing_paths(none, two) == []


@pytest.mark.few("closure", "nested", "partial", "pipeline", "late and rare", "several of one*")
@pytest.mark.parametrize("holder", HOLDERS)
def test_wherever_the_generator_is(holder: str) -> None:
    none, two = (after(task_of(data=loaded(Transformed(HOLDERS[holder]()), workers)), STEPS) for workers in (0, 2))
    assert differing_paths(none, two) == []


def nested() -> Callable[[Tensor], Tensor]:
    """A pipeline with generators of three kinds; torch itself sends none of its own to a process that it spawns."""
    jitters = Compose(Jitter(np.random.RandomState(0), p=0.5), Jitter(random.Random(0), p=0.5))
    partial = functools.partial(with_noise, rng=np.random.default_rng(0))
    return Compose(jitters, partial, Pipeline([Albumentation(), Albumentation()]))


def test_a_run_with_two_workers_is_resumed_without_any() -> None:
    whole = after(task_of(data=loaded(Transformed(nested()), 0)), STEPS)
    start = after(task_of(data=loaded(Transformed(nested()), 2)), 3)
    assert differing_paths(whole, after(task_of(data=loaded(Transformed(nested()), 0)), STEPS - 3, start)) == []


@pytest.mark.more
def test_killed_and_resumed_it_ends_the_same(tmp_path: Path) -> None:
    def make(workers: int) -> hotloop.Task:
        validation = loaded(Noisy(np.random.default_rng(1)), workers)
        return task_of(data=loaded(Transformed(nested()), workers), validation=validation, batch_size=None, epochs=3)

    def fitted(path: Path, workers: int, **options: Any) -> None:
        options = {"checkpoint_every": "2", "progress": False, "plan": "baseline"} | options
        hotloop.fit(make(workers), run=path, **options)

    fitted(tmp_path / "whole", 0)
    with pytest.raises(Killed):
        fitted(tmp_path / "parts", 2, callbacks=[at_step(7, kill)])
    fitted(tmp_path / "parts", 2, resume=True, plan=None)
    assert disagreements(tmp_path / "whole", tmp_path / "parts") == []


@pytest.mark.more
def test_an_iterable_data_set_with_workers_resumes() -> None:
    def make() -> hotloop.Task:
        loader = DataLoader(Rows(np.random.default_rng(0)), batch_size=7, num_workers=2)
        return task_of(data=loader, batch_size=None)

    whole = after(make(), 9)
    assert differing_paths(whole, after(make(), 4, after(make(), 5))) == []


def reseeded(worker: int) -> None:
    """Seeds the generator of the data set, as PyTorch's documentation suggests."""
    info = get_worker_info()
    info.dataset.rng = np.random.default_rng(info.seed)  # type: ignore[union-attr]


def test_a_worker_may_replace_the_generator_when_it_starts() -> None:
    none = after(task_of(data=loaded(Noisy(np.random.default_rng(0)), 0)), STEPS)
    loader = loaded(Noisy(np.random.default_rng(0)), 2, worker_init_fn=reseeded)
    assert differing_paths(none, after(task_of(data=loader), STEPS)) == []


class Named(Plain):
    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is None or type(info.dataset) is Named
        return super().__getitem__(index)


def test_a_worker_finds_its_own_data_set() -> None:
    after(task_of(data=loaded(Named(None), 2)), 2)
