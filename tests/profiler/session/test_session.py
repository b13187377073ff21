"""What lies apart from a step, what it does out of habit, and how a watch times it, plans it and leaves."""

from __future__ import annotations

import io
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm.contrib import DummyTqdmFile

from hotloop.core.patches import Patches
from hotloop.core.records.profile import RareUpdate
from hotloop.profiler.base.phases import Timeline, durations
from hotloop.profiler.base.steps import Finder, ProfileFacts, StepFact, TrainingEvent, is_end, order
from hotloop.profiler.session import make_observers
from hotloop.profiler.summary import summarize
from hotloop.report.profile import profile_page
from tests.profiler.base.test_step_detection import two_optimizers
from tests.support.profiler.profiled_steps import watched


def line_of(text: str) -> str:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f":{next(number for number, line in enumerate(lines, 1) if line.endswith(f'# {text}'))}"


@pytest.mark.more
def test_evaluation_and_checkpoints_lie_apart_and_a_habit_of_every_step_doesnt(tmp_path) -> None:
    data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loop(every: int) -> None:
        for step, (inputs, targets) in enumerate(batch for _ in range(8) for batch in DataLoader(data, batch_size=8)):
            model.train()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            if step % every == 0:
                model.eval()
                with torch.no_grad():
                    for others, _ in DataLoader(TensorDataset(torch.randn(99, 4), torch.randn(99)), batch_size=3):
                        model(others)
                torch.save(model.state_dict(), tmp_path / "model.pt")

    seldom, always = watched(lambda: loop(10)), watched(lambda: loop(1))
    assert seldom.apart.evaluation_s > 0 and seldom.apart.checkpoint_s > 0
    assert always.apart.evaluation_s == always.apart.checkpoint_s == 0
    assert always.phases["logging"] > 0 and "logging" not in seldom.phases
    assert seldom.loaders[0].batch_size == 8
    assert seldom.samples_per_step == 8


def seldom(every: int, steps: int = 600) -> None:
    """As a GAN whose critic is updated in each step, its generator and what encodes for it in each n-th."""
    generator, encoder, critic = (nn.Linear(64, 64) for _ in range(3))
    others = [torch.optim.RMSprop(one.parameters()) for one in (generator, encoder)]
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        critic(torch.randn(8, 64)).mean().backward()
        optimizer.step()
        if step % every == 0:
            for _ in range(20):
                critic(generator(encoder(torch.randn(64, 64)))).mean().backward()
            others[0].step()  # now and then
            others[1].step()


@pytest.mark.more
@pytest.mark.parametrize("every", [3, *(pytest.param(every, marks=pytest.mark.more) for every in (4, 5))])
def test_an_update_of_each_nth_step_is_told_of_apart_with_its_forward_and_backward(every: int) -> None:
    found = watched(lambda: seldom(every), steps=60, observers=lambda watch: make_observers(watch, None))
    (update,) = found.apart.updates
    assert update.kind == "RMSprop" and update.where.endswith(line_of("now and then"))
    assert update.every == pytest.approx(every, rel=0.05)
    assert update.ms is not None and found.step_ms is not None and update.ms > found.step_ms
    assert {"forward", "backward", "update"} <= set(update.phases)
    assert sum(update.phases.values()) == pytest.approx(update.ms)
    assert found.attributed is not None and found.attributed > 0.95
    assert [one.kind for one in found.modules if not one.name.startswith("(")] == ["Linear"]


def test_what_an_update_now_and_then_takes_is_none_of_the_step_and_no_other_work() -> None:
    usual = {"forward": 4.0, "backward": 6.0}
    longer = {"forward": 5.0, "backward": 9.0, "update": 1.0}
    steps = [
        StepFact(kind, ms=sum(phases.values()), phases=phases, flags=flags)
        for number in range(6)
        for kind in ("clean", "instrumented")
        for phases, flags in [(usual, []) if number % 3 else (longer, ["update 1"])]
    ]
    rare = {"kind": "Adam", "where": "train.py:9", "flag": "update 1", "every": 3.0}
    found = summarize(ProfileFacts(torch=True, trained=12, steps=steps, seldom=[rare]), "train.py")
    assert found.step_ms == 10.0 and found.phases == usual and found.apart.other_s == 0.0
    more = {"forward": 1.0, "backward": 3.0, "update": 1.0}
    assert found.apart.updates == [RareUpdate(kind="Adam", where="train.py:9", every=3.0, ms=5.0, phases=more)]


def test_optimizers_that_step_in_each_step_are_no_updates_now_and_then() -> None:
    assert watched(two_optimizers).apart.updates == []


@pytest.mark.parametrize("forward", [True, False])
def test_anomaly_detection_is_a_habit_that_takes_longer_around_forwards(forward: bool) -> None:
    """There it remembers for each node who made it."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loop(anomaly: bool) -> None:
        for _ in range(40):
            with torch.autograd.set_detect_anomaly(anomaly and forward):
                loss = model(torch.randn(8, 4)).pow(2).mean()
            optimizer.zero_grad()
            with torch.autograd.set_detect_anomaly(anomaly):
                loss.backward()
            optimizer.step()

    (habit,) = watched(lambda: loop(True)).habits
    assert (habit.what, habit.per_step) == ("hook", 1.0) and bool(habit.ms) is forward
    assert not watched(lambda: loop(False)).habits


def test_habits_are_seen_and_their_absence_too() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept: list[torch.Tensor] = []

    def good() -> None:
        for _ in range(40):
            loss = model(torch.randn(8, 4)).pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def bad() -> None:
        for step in range(40):
            inputs = torch.randn(8, 4)
            loss = model(inputs).pow(2).mean()
            model(inputs)  # wasted forward
            optimizer.zero_grad()
            loss.backward(retain_graph=True)  # retained graph
            kept.append(loss)
            optimizer.step()
            if step % 10 == 0:
                model.eval()
                model(inputs)  # autograd in evaluation
                model.train()

    assert watched(good).habits == []
    # By what is seen most: a step that is looked at may hold an evaluation, whose forward is wasted as well.
    found = {habit.what: habit for habit in sorted(watched(bad).habits, key=lambda habit: habit.per_step)}
    assert found.keys() == {"kept graph", "retained graph", "wasted forward", "autograd in evaluation"}
    for what in ("wasted forward", "retained graph", "autograd in evaluation"):
        assert found[what].where.endswith(line_of(what))
    assert found["wasted forward"].per_step == pytest.approx(1.0, abs=0.3)


class _Counting:
    def __init__(self) -> None:
        self.now = 0

    def mark(self, *, idle: bool = True) -> int:
        self.now += 1
        return self.now

    def ms(self, first: int, last: int) -> float:
        return last - first

    def idle_ms(self, first: int, last: int) -> float:
        return 0.25 * (last - first)

    def has_passed(self, mark: int) -> bool:
        return True


def test_a_timeline_puts_each_instant_into_one_phase() -> None:
    clock = _Counting()
    timeline = Timeline(clock)
    timeline.enter("data")  # no step is on
    timeline.begin("python")
    timeline.enter("data")
    timeline.leave()
    timeline.turn("batch")
    timeline.enter("forward")
    timeline.leave()
    timeline.leave()  # of what began before the step
    marks = timeline.end()
    spent = durations(marks, clock)
    assert sum(spent.values()) == marks[-1][0] - marks[0][0]
    assert spent == {"python": 1.5, "data": 1, "batch": 1.5, "forward": 1, "unattributed": 1}
    assert timeline.current == "unattributed"


def test_nothing_is_found_in_what_never_repeats() -> None:
    finder = Finder()
    for number in range(20):
        finder.record(TrainingEvent("update", f"script.py:{number}", number))
    assert finder.anchor() is None
    assert not is_end(TrainingEvent("update", "script.py:1", 1), TrainingEvent("update", "script.py:1", 2))


def test_no_traced_step_follows_another() -> None:
    kinds = order(60)
    assert kinds.count("clean") == kinds.count("instrumented") == 30
    assert "traced" in kinds
    assert all("traced" not in pair or pair[0] != pair[1] for pair in pairwise(kinds))


def test_a_few_long_steps_have_some_of_everything() -> None:
    kinds = order(60)
    assert {"clean", "instrumented", "traced", "clocked", "habits", "sampled"} <= set(kinds[:8])


def test_patches_are_taken_back_in_any_order() -> None:
    class Base:
        def said(self) -> str:
            return "base"

    class Derived(Base):
        pass

    first, second = Patches(), Patches()
    first.patch(Derived, "said", lambda before: lambda self: "first " + before(self))
    second.patch(Derived, "said", lambda before: lambda self: "second " + before(self))
    assert Derived().said() == "second first base"
    second.undo()
    first.undo()
    assert Derived().said() == "base" and "said" not in vars(Derived)
    first.patch(sys, "flags", lambda before: before)
    first.undo()


@pytest.mark.parametrize("steps", range(1, 10))
def test_as_many_steps_are_measured_as_were_asked_for(steps: int) -> None:
    kinds = order(steps)
    assert kinds.count("clean") + kinds.count("instrumented") == steps and "instrumented" in kinds


def test_output_that_a_progress_bar_has_redirected_arrives_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stdout", DummyTqdmFile(stream))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loop() -> None:
        for step in range(30):
            model(torch.randn(8, 4)).sum().backward()
            optimizer.step()
            print(step)

    assert watched(loop).phases["logging"] > 0
    assert stream.getvalue().split() == [str(step) for step in range(30)]
    assert "write" not in vars(stream) and "write" not in object.__getattribute__(sys.stdout, "__dict__")


def test_where_no_step_is_found_a_while_of_training_is_watched_as_a_whole() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    names = {"model": model, "optimizer": optimizer, "torch": torch}

    def loop() -> None:
        for step in range(40):  # each on a line of its own
            text = "\n" * step + "model(torch.randn(8, 4)).sum().backward(); optimizer.step()"
            exec(compile(text, "made.py", "exec"), names)

    profile = watched(loop, observers=lambda watch: make_observers(watch, None))
    assert profile.steps == 0 and profile.step_ms is None
    assert "no steps were found" in profile.notes[-1]
    assert {"forward", "backward", "update"} <= profile.phases.keys()
    assert {module.name for module in profile.modules} >= {"0", "1"}
    assert any(operator.name.startswith("aten::") for operator in profile.operators)


def test_the_bar_and_the_tables_agree_about_the_update() -> None:
    """The optimizers' own times and the line for the rest, such as clipping, add up to the bar."""
    phases: dict[Any, float] = {"forward": 6.0, "update": 4.0}
    steps = [StepFact("clean", ms=10.0) for _ in range(9)] + [StepFact("instrumented", 10.0, phases) for _ in range(9)]
    group = dict(name="0", tensors=3, numbers=9, settings=0, ms=1.0)
    used = [
        dict(kind=kind, where="t.py:1", implementation="forloop", groups=[group], steps=1.0, ms=ms)
        for kind, ms in (("Adam", 1.0), ("SGD", 0.6))
    ]
    model = dict(name="", kind="Net", calls=1, forward_ms=6.0, backward_ms=0.0, share=0.6)
    found = summarize(
        ProfileFacts(torch=True, trained=9, updates=9, steps=steps, optimizers=used, modules=[model]), "t.py"
    )
    assert found.phases["update"] == pytest.approx(4.0)
    assert [one.ms for one in found.optimizers] == [pytest.approx(1.0), pytest.approx(0.6)]
    assert [group.ms for one in found.optimizers for group in one.groups] == [pytest.approx(1.0)] * 2
    text = io.StringIO()
    Console(file=text, width=120).print(profile_page(found))
    assert "The rest of the update (zero_grad, clipping, schedules): 2.4 ms a step." in text.getvalue()
