"""Tasks whose losses look at a batch as a whole, ones that only seem to, and ones that are wrong by themselves."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import Dataset

import hotloop


def vectors(seed: int = 1) -> Tensor:
    return torch.randn(24, 6, generator=torch.Generator().manual_seed(seed))


def task(step: Callable[[nn.Module, Any], Tensor], **fields: Any) -> hotloop.Task:
    given: dict[str, Any] = dict(
        model=lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2)),
        step=step,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        data=(vectors(), vectors(2)),
        batch_size=8,
    )
    return hotloop.Task(**given | fields)


def padded(**fields: Any) -> hotloop.Task:
    """Sequences of different lengths, whose loss says nothing of the targets that it leaves out."""
    words = torch.randint(0, 7, (24, 5), generator=torch.Generator().manual_seed(0))
    targets = torch.where(torch.arange(5) < 1 + torch.arange(24).remainder(5)[:, None], words, -100)
    return hotloop.Task(
        model=lambda: nn.Embedding(7, 7),
        loss=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        data=(words, targets),
        batch_size=8,
        **fields,
    )


def summed() -> hotloop.Task:
    return task(lambda model, batch: (model(batch[0]) - batch[1]).square().sum())


def contrastive() -> hotloop.Task:
    def step(model: nn.Module, batch: Any) -> Tensor:
        scores = F.normalize(model(batch[0])) @ F.normalize(model(batch[1])).T
        return F.cross_entropy(scores, torch.arange(len(scores)))

    return task(step)


def a_root_of_a_mean() -> hotloop.Task:
    return task(lambda model, batch: F.mse_loss(model(batch[0]), batch[1]).sqrt())


WHOLE = {one.__name__: one for one in (padded, summed, contrastive, a_root_of_a_mean)}


def padded_with_a_weight() -> hotloop.Task:
    return padded(weight=lambda batch: (batch[1] != -100).sum())


def noise_and_times() -> hotloop.Task:
    """As diffusion models draw."""

    def step(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0]
        share = torch.randint(0, 10, (len(x), 1)) / 10
        return F.mse_loss(model(x * share + torch.randn_like(x)), batch[1])

    return task(step)


def layers_dropped_by_python() -> hotloop.Task:
    def step(model: nn.Module, batch: Any) -> Tensor:
        output = model(batch[0])
        return F.mse_loss(output * 2 if random.random() < 0.5 else output, batch[1])

    return task(step)


class Following(nn.Module):
    """A loss with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return F.mse_loss(output, target)


def a_loss_with_a_buffer() -> hotloop.Task:
    return task(None, loss=Following())  # type: ignore[arg-type]


def norms_without_statistics() -> hotloop.Task:
    return task(
        lambda model, batch: F.mse_loss(model(batch[0]), batch[1]),
        model=lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 6)),
    )


def draws_of_probabilities() -> hotloop.Task:
    """The ranks' own; all are of the same mean."""
    return task(lambda model, batch: F.mse_loss(model(batch[0] * torch.bernoulli(batch[0].sigmoid())), batch[1]))


def rows_mixed_in_the_step() -> hotloop.Task:
    def step(model: nn.Module, batch: Any) -> Tensor:
        other = torch.randperm(len(batch[0]))
        return F.mse_loss(model(batch[0] + batch[0][other]), batch[1])

    return task(step)


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


class Noisy(Dataset):
    """Samples with noise of a generator of its own: another at each read."""

    def __init__(self) -> None:
        self.rows, self.generator = list(zip(vectors(), vectors(2), strict=True)), torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.rows[index]
        return x + torch.randn(x.shape, generator=self.generator), y


def data_with_a_generator_of_its_own() -> hotloop.Task:
    return task(mean_square, data=Noisy())


class Named(Dataset):
    """Samples with a name each, which isn't cut with their rows."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, str, Tensor]:
        return vectors()[index], f"sample {index}", vectors(2)[index]


def data_with_names() -> hotloop.Task:
    return task(lambda model, batch: F.mse_loss(model(batch[0]), batch[2]), data=Named())


def spectral_norms() -> hotloop.Task:
    return task(
        mean_square,
        model=lambda: nn.Sequential(
            parametrizations.spectral_norm(nn.Linear(6, 6)), torch.nn.utils.spectral_norm(nn.Linear(6, 6))
        ),
    )


class Counting(nn.Linear):
    """A layer that is larger at its first call, as one that warms up."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


def a_layer_that_counts() -> hotloop.Task:
    return task(mean_square, model=lambda: Counting(6, 6))


def a_step_that_counts() -> hotloop.Task:
    calls = 0

    def step(model: nn.Module, batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return mean_square(model, batch) * calls

    return task(step)


def rows_drawn_by_numpy() -> hotloop.Task:
    def step(model: nn.Module, batch: Any) -> Tensor:
        share = torch.from_numpy(np.random.randint(0, 10, (len(batch[0]), 1))) / 10
        return F.mse_loss(model(batch[0] * share), batch[1])

    return task(step)


def noise_of_a_generator_of_its_own() -> hotloop.Task:
    def step(model: nn.Module, batch: Any) -> Tensor:
        weights = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
        return F.mse_loss(model(batch[0]) @ weights, batch[1])

    return task(step, model=lambda: nn.Linear(6, 6))


def rows_drawn_by_a_generator_of_its_own() -> hotloop.Task:
    def step(model: nn.Module, batch: Any) -> Tensor:
        noise = torch.randn(batch[0].shape, generator=torch.Generator().manual_seed(0))
        return F.mse_loss(model(batch[0] + noise), batch[1])

    return task(step, model=lambda: nn.Linear(6, 6))


def autocast_in_the_step() -> hotloop.Task:
    def step(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.mse_loss(model(batch[0]), batch[1])

    return task(step, model=lambda: nn.Sequential(nn.Linear(6, 64), nn.GELU(), nn.Linear(64, 6)))


def a_step_that_changes_its_batch() -> hotloop.Task:
    return task(lambda model, batch: F.mse_loss(model(batch[0].mul_(2)), batch[1]), data=Noisy())


def a_step_that_speaks_to_other_ranks() -> hotloop.Task:
    def step(model: nn.Module, batch: Any) -> Tensor:
        torch.distributed.all_reduce(torch.ones(1))
        return mean_square(model, batch)

    return task(step)


HONEST = {
    one.__name__: one
    for one in (
        padded_with_a_weight,
        noise_and_times,
        layers_dropped_by_python,
        a_loss_with_a_buffer,
        norms_without_statistics,
        draws_of_probabilities,
        rows_mixed_in_the_step,
        data_with_a_generator_of_its_own,
        data_with_names,
        spectral_norms,
        a_layer_that_counts,
        a_step_that_counts,
        rows_drawn_by_numpy,
        noise_of_a_generator_of_its_own,
        rows_drawn_by_a_generator_of_its_own,
        autocast_in_the_step,
        a_step_that_changes_its_batch,
        a_step_that_speaks_to_other_ranks,
    )
}

UNTRIED = {
    "rows_mixed_in_the_step": "it draws by randperm",
    "data_with_names": "a batch holds a str",
    "a_step_that_counts": "the same samples give another gradient each time",
    "rows_drawn_by_numpy": "it draws from NumPy's or Python's generator",
    "rows_drawn_by_a_generator_of_its_own": "it draws from a generator of its own",
}


def targets_of_another_shape() -> hotloop.Task:
    data = vectors(), vectors()[:, 0]
    return task(None, loss=F.mse_loss, model=lambda: nn.Linear(6, 1), data=data)  # type: ignore[arg-type]


def a_loss_for_each_sample() -> hotloop.Task:
    return task(lambda model, batch: (model(batch[0]) - batch[1]).square().mean(1))


WRONG = {
    targets_of_another_shape: "the loss got outputs of shape (4, 1) and targets of shape (4)",
    a_loss_for_each_sample: "the loss is a tensor of shape (4,)",
}
