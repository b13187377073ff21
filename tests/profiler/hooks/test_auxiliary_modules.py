"""Modules that are no networks: transforms that make samples, augmentation of a batch, metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hotloop.core.records.profile import Profile
from hotloop.core.records.profile_terms import Phase
from hotloop.profiler.base.call_sites import CallSites
from hotloop.profiler.base.phases import HostClock, Timeline
from hotloop.profiler.detectors import diagnose
from hotloop.profiler.session import ProfilerSession, make_observers
from hotloop.profiler.summary import summarize

BATCH = 16


class Seen:
    """A watch, and in which phases the modules were called."""

    def __init__(self) -> None:
        self.watch = ProfilerSession(24, CallSites(), lambda facts: None, lambda watch: make_observers(watch, None))
        self.phases: defaultdict[str, set[Phase]] = defaultdict(set)
        self.watch.install()
        try:
            training(self)
        finally:
            self.watch.close()
            self.watch.remove()
        self.profile: Profile = summarize(self.watch.facts, "loop")


class Asks(nn.Module):
    """Asks for the phase in which it is called, and gives what it is given."""

    def __init__(self, seen: Seen, name: str) -> None:
        super().__init__()
        self._noted = lambda: (seen.watch.facts.anchor, seen.watch.timeline, seen.phases[name])

    def forward(self, *given: Tensor) -> Tensor:
        anchor, timeline, phases = self._noted()
        if anchor and timeline.on:  # before, nobody knows what the loop does
            phases.add(timeline.current)
        return given[0]


class Crop(Asks):
    def forward(self, *given: Tensor) -> Tensor:
        corner = int(torch.randint(0, 3, ()).item())
        return super().forward(given[0][corner : corner + 4])


class Accuracy(Asks):
    def forward(self, *given: Tensor) -> Tensor:
        outputs, wanted = given
        return super().forward((outputs.argmax(1) == wanted.argmax(1)).float().mean())


class Weight(Asks):
    def forward(self, *given: Tensor) -> Tensor:
        return 2 * super().forward(*given)


class Net(Asks):
    def __init__(self, seen: Seen) -> None:
        super().__init__(seen, "network")
        self.body = nn.Linear(4, 4)

    def forward(self, *given: Tensor) -> Tensor:
        return self.body(super().forward(*given))


class Pictures(Dataset):
    def __init__(self, transform: nn.Module) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 4 * BATCH

    def __getitem__(self, at: int) -> Tensor:
        with torch.no_grad():
            return self.transform(torch.arange(8.0))


def training(seen: Seen) -> None:
    collated = Asks(seen, "collating")
    data = Pictures(nn.Sequential(nn.Linear(8, 8), Crop(seen, "transform"), nn.Tanh(), Asks(seen, "transform")))
    loader = DataLoader(data, BATCH, collate_fn=lambda samples: collated(torch.stack(samples)))
    net, augment, accuracy, loss_of = Net(seen), Asks(seen, "augmentation"), Accuracy(seen, "metric"), nn.MSELoss()
    weighted, late = Weight(seen, "weighting"), Accuracy(seen, "late metric")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(15):
        for batch in loader:
            outputs = net(augment(batch))
            accuracy(outputs, batch)
            loss = loss_of(weighted(outputs), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            late(outputs.detach(), batch)


@pytest.fixture(scope="module")
def seen() -> Seen:
    return Seen()


def test_modules_that_make_samples_are_of_the_data(seen: Seen) -> None:
    assert seen.phases["transform"] == seen.phases["collating"] == {"data"}


def test_modules_beside_the_network_are_neither_forward_nor_loss(seen: Seen) -> None:
    assert seen.phases["network"] == {"forward"}
    assert seen.phases["augmentation"] == {"batch"}
    assert seen.phases["metric"] == seen.phases["late metric"] == {"logging"}
    assert seen.phases["weighting"] == {"forward"}


def test_what_comes_after_a_transform_is_no_loss(seen: Seen) -> None:
    """The sample's operators are the loader's, whatever module ran them."""
    made = [one for one in seen.profile.operators if one.name in ("aten::randint", "aten::tanh", "aten::arange")]
    assert {(one.phase, one.module) for one in made} == {("data", "")}
    assert {one.name for one in made} == {"aten::randint", "aten::tanh", "aten::arange"}


def test_transforms_stand_in_no_tree_of_modules(seen: Seen) -> None:
    kinds = [one.kind for one in seen.profile.modules]
    assert kinds.count("Linear") == kinds.count("Net") == 1 and {"Crop", "Tanh", "Sequential"}.isdisjoint(kinds)
    assert seen.profile.batch == [f"{BATCH}x4"]


def test_nothing_is_said_of_transforms_but_that_samples_are_slow(seen: Seen) -> None:
    said = [(one.cause, one.where) for one in diagnose(seen.profile).remedies]
    assert not [cause for cause, _ in said if "vmap" in cause or ".item()" in cause or "Python loop" in cause], said


def phases(began: Callable[[Timeline], None]) -> list[Phase]:
    """What a timeline goes through while data are had, after which a batch is made."""
    timeline = Timeline(HostClock())
    timeline.begin("python")
    began(timeline)
    for phase in SOME:
        timeline.enter(phase)
        timeline.turn("loss" if phase == "waiting" else phase)
        timeline.leave()
    timeline.load()
    timeline.leave()
    timeline.leave()
    timeline.turn("batch")
    return [phase for _, phase in timeline.end()]


SOME: tuple[Phase, ...] = ("copy", "waiting", "logging")


def test_a_timeline_gives_to_a_loader_whatever_makes_its_samples_but_meetings() -> None:
    around = ["python", "data", "waiting", "loss", "data", "python", "batch", "unattributed"]
    assert phases(Timeline.load) == around


def test_what_a_feed_does_beside_loading_is_its_own() -> None:
    inside = ["copy", "data", "waiting", "loss", "data", "logging", "data", "data", "data"]
    assert phases(lambda timeline: timeline.enter("data")) == [
        "python",
        "data",
        *inside,
        "python",
        "batch",
        "unattributed",
    ]
