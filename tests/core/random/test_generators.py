"""Random generators that a Task's parts hold: a resumed run draws what an uninterrupted one draws."""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Subset

import hotloop
from hotloop.core.random.generators import OwnedGenerators, unset_generators
from hotloop.core.random.rng import seed_for
from hotloop.core.state import State, differing_paths
from hotloop.data.seeded_dataset import SeededDataset
from hotloop.data.sources import Samples
from hotloop.errors import PlanError
from hotloop.lowering.evaluation import evaluate
from hotloop.lowering.task_facts import task_facts
from tests.support.programs import advance
from tests.support.tasks.owned_generators import (
    HOLDERS,
    KINDS,
    Compose,
    Jitter,
    Noisy,
    NoisyModel,
    Plain,
    Rows,
    Slotted,
    Transformed,
    X,
    Y,
    after,
    lowered,
    noise,
    task_of,
)

STEPS, STOP = 9, 5
"""Four steps are an epoch: a resume in the second one, and an end in the third."""

Make = Callable[[], hotloop.Task]


def resumed(make: Make, stop: int = STOP) -> State:
    return after(make(), STEPS - stop, after(make(), stop))


def assert_resumes(make: Make) -> None:
    whole = after(make(), STEPS)
    assert differing_paths(whole, resumed(make)) == []
    assert task_facts(lowered(make()).parts).exact


# --- each kind of generator with each owner


def _augmenting(rng: Any) -> Any:
    return lambda x, draws: x + noise(rng)


def _collating(rng: Any) -> Any:
    def collate(items: list[Any]) -> Any:
        x, y = torch.utils.data.default_collate(items)
        return x + noise(rng), y

    return collate


def _stepping(rng: Any) -> Any:
    def step(model: nn.Module, batch: Any) -> Tensor:
        return ((model(batch[0]) - batch[1]) ** 2).mean() * noise(rng, 1).exp().squeeze()

    return step


class NoisyLoss(nn.Module):
    def __init__(self, rng: Any) -> None:
        super().__init__()
        self.rng = rng

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** 2).mean() * noise(self.rng, 1).exp().squeeze()


class Langevin(torch.optim.SGD):
    def __init__(self, parameters: Any, rng: Any) -> None:
        super().__init__(parameters, lr=0.05)
        self.rng = rng

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        with torch.no_grad():
            for value in self.param_groups[0]["params"]:
                value += 0.01 * noise(self.rng, value.numel()).view(value.shape)


OWNERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "data": lambda rng: {"data": Noisy(rng)},
    "collate": lambda rng: {"data": Plain(None), "collate": _collating(rng)},
    "augment": lambda rng: {"augment": _augmenting(rng)},
    "prepare": lambda rng: {"data": Plain(None), "prepare": lambda x: x + noise(rng)},
    "step": lambda rng: {"step": _stepping(rng)},
    "loss": lambda rng: {"loss": NoisyLoss(rng)},
    "model": lambda rng: {"model": lambda: NoisyModel(rng)},
    "optimizer": lambda rng: {"optimizer": lambda parameters: Langevin(parameters, rng)},
}


@pytest.mark.few("data-*", "*-PCG64", "*-torch.Generator")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("owner", OWNERS)
def test_a_resumed_run_draws_the_same(owner: str, kind: str) -> None:
    assert_resumes(lambda: task_of(**OWNERS[owner](KINDS[kind]())))


@pytest.mark.few("closure", "default argument", "class attribute")
@pytest.mark.parametrize("holder", HOLDERS)
def test_wherever_the_generator_is(holder: str) -> None:
    assert_resumes(lambda: task_of(data=Transformed(HOLDERS[holder]())))


@pytest.mark.parametrize("wrap", [lambda d: Subset(d, range(24)), lambda d: ConcatDataset([d]), DataLoader])
def test_in_data_sets_of_torch(wrap: Callable[[Any], Any]) -> None:
    assert_resumes(lambda: task_of(data=wrap(Noisy(np.random.default_rng(0))), batch_size=None))


def test_the_factory_of_the_model_draws_the_same_each_time() -> None:
    rng = torch.Generator().manual_seed(3)

    def build() -> nn.Module:
        layer = nn.Linear(4, 1)
        nn.init.normal_(layer.weight, generator=rng)
        return layer

    task = task_of(model=build)
    assert torch.equal(task.build_model().weight, task.build_model().weight)


def test_an_iterable_data_set_resumes() -> None:
    def make() -> hotloop.Task:
        return task_of(data=Rows(np.random.default_rng(0)))

    assert differing_paths(after(make(), STEPS), resumed(make)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_each_sample_of_each_epoch_has_draws_of_its_own(kind: str) -> None:
    seeded = SeededDataset(Samples(Noisy(KINDS[kind]())), seed=0)
    drawn = {(epoch, i): seeded[epoch, i][0] - X[i] for epoch in range(3) for i in range(24)}
    assert len({tuple(value.tolist()) for value in drawn.values()}) == len(drawn)
    values = torch.stack(list(drawn.values()))
    assert abs(float(values.mean())) < 0.25 and 0.8 < float(values.std()) < 1.2
    for key in reversed(drawn):
        assert torch.equal(seeded[key][0] - X[key[1]], drawn[key])


def test_generators_of_one_owner_draw_apart() -> None:
    seen: list[tuple[float, ...]] = []

    class Several(Plain):
        def __init__(self) -> None:
            self.one, self.other = np.random.default_rng(0), np.random.default_rng(0)
            self.all = [np.random.default_rng(0) for _ in range(3)]

        def __getitem__(self, index: int) -> Any:
            seen.append(tuple(rng.random() for rng in (self.one, self.other, *self.all)))
            return super().__getitem__(index)

    SeededDataset(Samples(Several()), seed=0)[0, 0]
    assert len(set(seen[0])) == 5


def test_a_shared_generator_stays_shared() -> None:
    shared = np.random.default_rng(0)
    task = task_of(data=Transformed(Compose(Slotted(shared), Slotted(shared))), augment=_augmenting(shared))
    data = task.roles.train.dataset  # type: ignore[union-attr]
    seeded = SeededDataset(task.roles.train, 0)  # type: ignore[arg-type]
    x, _ = seeded[0, 0]
    seeded.begin("sample", 0, 0)
    assert torch.equal(x, X[0] + noise(shared) + noise(shared))
    assert data.transform.steps[0].rng is data.transform.steps[1].rng is shared
    assert_resumes(
        lambda: task_of(
            data=Transformed(Compose(*[Slotted(rng := random.Random(0)), Slotted(rng)])), step=_stepping(rng)
        )
    )


def test_a_data_set_may_replace_its_generator_while_training() -> None:
    class Replacing(Noisy):
        def set_epoch(self, epoch: int) -> None:
            self.rng = np.random.default_rng(epoch)

    class Each(Noisy):
        def __getitem__(self, index: int) -> Any:
            self.rng = np.random.default_rng(index)
            return super().__getitem__(index)

    assert_resumes(lambda: task_of(data=Each(None)))
    data = Replacing(np.random.default_rng(0))
    seeded = SeededDataset(Samples(data), 0)
    first = seeded[1, 3][0]
    data.set_epoch(2)
    assert torch.equal(SeededDataset(Samples(Noisy(np.random.default_rng(5))), 0)[2, 3][0], seeded[2, 3][0])
    data.set_epoch(1)
    assert torch.equal(seeded[1, 3][0], first)


def test_validation_draws_the_same_in_each_epoch() -> None:
    task = task_of(
        data=Noisy(np.random.default_rng(0)),
        validation=Noisy(random.Random(0)),
        model=lambda: NoisyModel(torch.Generator()),
    )
    program = lowered(task)
    source = program.parts.splits.validation
    assert source is not None
    first = evaluate(program, source).values["loss"]
    state = program.state()
    advance(program, 5)
    other = evaluate(program, source).values["loss"]
    program.restore(state)
    assert evaluate(program, source).values["loss"] == first != other


@pytest.mark.more
def test_validation_is_the_same_in_a_resumed_run(tmp_path: Path) -> None:
    def make(epochs: int) -> hotloop.Task:
        return task_of(data=Noisy(np.random.default_rng(0)), validation=Noisy(np.random.RandomState(0)), epochs=epochs)

    whole = hotloop.fit(make(4), run=tmp_path / "whole", plan="baseline", progress=False)
    hotloop.fit(make(2), run=tmp_path / "parts", plan="baseline", progress=False)
    parts = hotloop.fit(make(4), run=tmp_path / "parts", resume=True, progress=False)
    assert [row["validation_loss"] for row in whole.epochs] == [row["validation_loss"] for row in parts.epochs]
    assert whole.record.facts.exact and not whole.record.facts.inexact


def test_what_a_model_draws_is_what_a_plain_loop_with_the_same_states_draws() -> None:
    rng = np.random.default_rng(0)
    task = task_of(model=lambda: NoisyModel(rng), data=(X, Y), shuffle=False)
    model = task.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    owned = OwnedGenerators({"model": model})
    owned.refresh()
    for step in range(4):
        owned.seed(seed_for(0, "step", step, 0))
        x, y = X[7 * step : 7 * step + 7], Y[7 * step : 7 * step + 7]
        optimizer.zero_grad()
        nn.MSELoss()(model(x), y).backward()
        optimizer.step()
    found = after(task, 4).parameters
    assert all(torch.equal(value, found[name]) for name, value in model.named_parameters())


# --- a data set that draws is not read into memory as if it were constant


def test_a_data_set_with_a_generator_is_not_read_into_memory() -> None:
    with pytest.raises(PlanError, match=r"draws from the random generator data\.rng"):
        lowered(task_of(data=Noisy(np.random.default_rng(0))), residency="host")


def test_unless_the_task_calls_it_deterministic() -> None:
    program = lowered(task_of(data=Noisy(np.random.default_rng(0)), deterministic=True), residency="host")
    table = program.parts.splits.train
    seeded = SeededDataset(Samples(Noisy(np.random.default_rng(9))), 0)
    assert torch.equal(table.columns[0], torch.stack([seeded[0, i][0] for i in range(24)]))  # type: ignore[union-attr]


# --- generators that can't be set are named


class Bits(np.random.PCG64):
    """A bit generator of the user's."""


class Weighted(random.Random):
    def random(self) -> float:
        return super().random() ** 2


class RNG:
    """Draws by numbers of its own, as those of a C extension do."""

    def __call__(self, x: Tensor) -> Tensor:
        return x


def _iterator() -> Any:
    return iter(np.random.default_rng(0).permutation(10))


UNSET: dict[str, tuple[Callable[[], Any], str]] = {
    "system": (random.SystemRandom, "random.SystemRandom"),
    "bit generator": (lambda: np.random.Generator(Bits(0)), "Bits"),
    "subclass": (lambda: Weighted(0), "Weighted"),
    "foreign": (RNG, "RNG"),
    "quasi-random": (lambda: torch.quasirandom.SobolEngine(2), "SobolEngine"),
    "array iterator": (_iterator, "iterator"),
    "generator": (lambda: (random.random() for _ in range(10)), "generator"),
    "itertools": (lambda: itertools.cycle(np.random.default_rng(0).permutation(10)), "itertools.cycle"),
    "map": (lambda: map(random.Random(0).uniform, [0.0], [1.0]), "map"),
    "set": (lambda: {random.Random(0), random.Random(1)}, "set"),
}


@pytest.mark.parametrize("owner", ["data", "model", "step", "augment"])
@pytest.mark.parametrize("kind", UNSET)
def test_what_cannot_be_set_is_named(kind: str, owner: str) -> None:
    make, name = UNSET[kind]
    rng = make()
    given: dict[str, Any] = {
        "data": {"data": Transformed(of_closure_without_draws(rng))},
        "model": {"model": lambda: Holding(rng)},
        "step": {"step": lambda model, batch, rng=rng: nn.functional.mse_loss(model(batch[0]), batch[1])},
        "augment": {"augment": lambda x, draws, rng=rng: x},
    }[owner]
    facts = task_facts(lowered(task_of(**given)).parts)
    assert not facts.exact
    assert len(facts.inexact) == 1
    assert name in facts.inexact[0] and facts.inexact[0].startswith(f"{owner}.") and "\n" not in facts.inexact[0]


def of_closure_without_draws(rng: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: x if rng is not None else x * 2


class Holding(nn.Module):
    def __init__(self, rng: Any) -> None:
        super().__init__()
        self.layer, self.rng = nn.Linear(4, 1), rng

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def _random_file(x: Tensor) -> Tensor:
    import os

    return x + os.urandom(1)[0] / 255


def _random_token(x: Tensor) -> Tensor:
    from secrets import randbelow

    return x + randbelow(10)


def _random_name(x: Tensor) -> Tensor:
    return x * len(uuid.uuid4().hex)


def _fresh(x: Tensor) -> Tensor:
    rng = np.random.default_rng()
    return x + noise(rng)


def _fresh_at_once(x: Tensor) -> Tensor:
    return x + np.random.RandomState().normal()


def _reseeded(x: Tensor) -> Tensor:
    torch.seed()
    return x + torch.rand(())


ENTROPY: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "os": (_random_file, "os.urandom()"),
    "secrets": (_random_token, "secrets.randbelow()"),
    "uuid": (_random_name, "uuid.uuid4()"),
    "fresh": (_fresh, "default_rng()"),
    "fresh at once": (_fresh_at_once, "RandomState()"),
    "reseeded": (_reseeded, "seed()"),
}


@pytest.mark.parametrize("kind", ENTROPY)
@pytest.mark.parametrize("nested", [False, True])
def test_numbers_of_the_operating_system_are_named(kind: str, nested: bool) -> None:
    transform, name = ENTROPY[kind]
    data = Transformed(Compose(lambda x: transform(x)) if nested else transform)
    lines = task_facts(lowered(task_of(data=data)).parts).inexact
    assert len(lines) == 1 and f"calls {name}, whose numbers don't follow from the seed" in lines[0]


def test_a_generator_that_an_object_keeps_is_none_of_them() -> None:
    class Late(Noisy):
        def __getitem__(self, index: int) -> Any:
            if self.rng is None:
                rng = np.random.default_rng()
                self.rng = rng
            return super().__getitem__(index)

        def reset(self) -> None:
            self.rng = np.random.default_rng()

    assert_resumes(lambda: task_of(data=Late(None)))


def test_too_many_are_named() -> None:
    one_each = [np.random.default_rng(i) for i in range(300)]
    assert "data[256]" in unset_generators({"data": one_each})[0]
    transforms = [Jitter(np.random.default_rng(i)) for i in range(300)]
    assert "data has more than 256 items" in unset_generators({"data": transforms})[0]


def test_global_generators_held_by_a_data_set_are_no_others() -> None:
    data = Noisy(np.random.mtrand._rand)
    assert unset_generators({"data": data, "more": [torch.default_generator, random.random, random._inst]}) == []
    assert_resumes(lambda: task_of(data=Noisy(np.random.mtrand._rand)))


def test_files_and_locks_are_no_generators(tmp_path: Path) -> None:
    import threading

    (tmp_path / "a.csv").write_text("1\n")
    with (tmp_path / "a.csv").open() as file:
        data = Plain(None)
        data.__dict__ |= {"file": file, "lock": threading.Lock(), "large": list(range(10**6)), "table": np.zeros(10)}
        assert unset_generators({"data": data}) == []


def test_a_generator_that_comes_into_being_in_a_step_is_said(tmp_path: Path) -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.rng = nn.Linear(4, 1), None

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.rng = self.rng or torch.Generator().manual_seed(0)
                x = x + torch.randn(x.shape, generator=self.rng)
            return self.layer(x)

    run = hotloop.fit(task_of(model=Lazy, epochs=1), run=tmp_path / "run", plan="baseline", progress=False)
    assert not run.record.facts.exact
    assert ["makes the random generator model.rng" in line for line in run.record.facts.inexact] == [True]


# --- compiled steps refuse what would be drawn once


@pytest.mark.parametrize("plan", [{"compile": "step"}, {"compile": "forward"}])
@pytest.mark.parametrize("kind", ["torch.Generator", "RandomState", "PCG64", "random.Random"])
def test_a_compiled_step_refuses_a_generator_of_the_model(kind: str, plan: dict[str, str]) -> None:
    with pytest.raises(PlanError) as caught:
        lowered(task_of(model=lambda: NoisyModel(KINDS[kind]())), **plan)
    assert "rng" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_branch_on_a_draw_is_refused_where_it_comes_out_alike_twice() -> None:
    class Coin(NoisyModel):
        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * (2 if self.rng.rand() < 2.0 else 1)

    with pytest.raises(PlanError, match="rng"):
        lowered(task_of(model=lambda: Coin(np.random.RandomState(0))), compile="forward")


def test_auto_trains_it_eagerly(tmp_path: Path) -> None:
    task = task_of(model=lambda: NoisyModel(torch.Generator()), epochs=2)
    run = hotloop.fit(task, run=tmp_path / "run", plan="auto", progress=False)
    assert run.plan.compile == "none" and run.record.facts.exact
