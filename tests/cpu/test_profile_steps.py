"""The step is found in loops as people write them, and each instant of it is in one phase."""

from __future__ import annotations

import io
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm.contrib import DummyTqdmFile

from hotloop.patches import Patches
from hotloop.profiles import SeldomUpdate
from hotloop.profiling import watcher
from hotloop.profiling.compose import profile_of
from hotloop.profiling.facts import Facts, StepFact
from hotloop.profiling.observing import observers
from hotloop.profiling.phases import Timeline, durations
from hotloop.profiling.schedule import order
from hotloop.profiling.steps import Event, Finder, ends_step
from tests.cpu.watching import watched

FILE = Path(__file__).name
PATCHED = [
    (torch.autograd, "_engine_run_backward"),
    (nn.Module, "__call__"),
    (nn.Module, "train"),
    (DataLoader, "__iter__"),
    (torch, "save"),
    (torch._C._nn, "mse_loss"),
    (torch.Tensor, "__float__"),
    (torch.optim.Optimizer, "zero_grad"),
]


def line_of(text: str) -> str:
    """`file:line` of the line of this file that holds a text as its comment."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f":{next(number for number, line in enumerate(lines, 1) if line.endswith(f'# {text}'))}"


def two_optimizers() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 1)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.01) for model in (one, other))
    for _ in range(120):
        loss = other(one(torch.randn(8, 4))).pow(2).mean()
        first.zero_grad()
        second.zero_grad()
        loss.backward()
        first.step()
        second.step()  # two optimizers


def many_optimizers() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(16)))
    optimizers = [torch.optim.SGD([value], lr=0.01) for value in model.parameters()]
    for _ in range(120):
        model(torch.randn(8, 4)).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()  # many optimizers


def one_more_often() -> None:
    one, other = nn.Linear(4, 4), nn.Linear(4, 1)
    first, second = (torch.optim.SGD(model.parameters(), lr=0.01) for model in (one, other))
    for step in range(120):
        other(one(torch.randn(8, 4))).pow(2).mean().backward()
        first.step()  # one more often
        if step % 5 == 4:
            second.step()


def closure() -> None:
    model = nn.Linear(4, 1)
    inputs, targets = torch.randn(20, 4), torch.randn(20, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss

    for _ in range(120):
        optimizer.step(evaluate)  # closure


def accumulated() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(480):
        model(torch.randn(8, 4)).pow(2).mean().backward()
        if step % 4 == 3:
            optimizer.step()  # accumulated
            optimizer.zero_grad()


def by_hand() -> None:
    weight = torch.randn(4, 1, requires_grad=True)
    for _ in range(120):
        loss = nn.functional.mse_loss(torch.randn(8, 4) @ weight, torch.zeros(8, 1))
        loss.backward()  # by hand
        with torch.no_grad():
            weight -= 0.01 * weight.grad
            weight.grad = None


def by_gradients() -> None:
    model = nn.Linear(4, 1)
    for _ in range(120):
        loss = model(torch.randn(8, 4)).pow(2).mean()
        found = torch.autograd.grad(loss, list(model.parameters()))  # by gradients
        for value, gradient in zip(model.parameters(), found, strict=True):
            value.data -= 0.01 * gradient


def inside_the_backward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizers = {value: torch.optim.SGD([value], lr=0.01) for value in model.parameters()}
    for value in model.parameters():
        value.register_post_accumulate_grad_hook(lambda value: optimizers[value].step())
    for _ in range(120):
        model(torch.randn(8, 4)).pow(2).mean().backward()  # inside the backward


def optimizers_made_anew() -> None:
    model = nn.Linear(4, 1)
    for _ in range(130):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model(torch.randn(8, 4)).pow(2).mean().backward()
        optimizer.step()  # optimizers made anew


LOOPS = [
    two_optimizers,
    many_optimizers,
    one_more_often,
    closure,
    accumulated,
    by_hand,
    by_gradients,
    inside_the_backward,
    optimizers_made_anew,
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_the_line_that_ends_a_step_is_found_and_phases_add_up(loop) -> None:
    before = [vars(owner).get(name) for owner, name in PATCHED]
    profile = watched(loop)
    assert profile.step_where.endswith(FILE + line_of(loop.__name__.replace("_", " ")))
    assert profile.steps == 24
    assert sum(profile.phases.values()) == pytest.approx(profile.step_ms)
    assert {"backward", "update"} <= profile.phases.keys()
    assert all(ms > 0 for ms in profile.phases.values())
    assert [vars(owner).get(name) for owner, name in PATCHED] == before


def test_an_error_of_the_watch_is_none_of_the_loops(monkeypatch) -> None:
    def broken(*arguments: object, **named: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(watcher.Loaders, "begin", broken)
    with pytest.raises(AssertionError, match="ZeroDivisionError: planted"):
        watched(two_optimizers)


def test_a_loop_that_goes_elsewhere_early_is_followed() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loop() -> None:
        for _ in range(5):
            model(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()
        for _ in range(80):
            model(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()  # the loop that counts

    assert watched(loop).step_where.endswith(line_of("the loop that counts"))


def test_an_evaluation_counts_in_whatever_step_it_falls() -> None:
    """Also in those that are looked at, and in those that go by before a clean one."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loop() -> None:
        for step in range(400):
            model(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()
            if step in range(30, 100, 10):
                model.eval()
                time.sleep(0.01)
                model.train()

    assert watched(loop).apart.evaluation_s > 7 * 0.01


@pytest.mark.parametrize("many", [5, 8, 40])
def test_many_backwards_to_an_update_are_one_step(many: int) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = DataLoader(TensorDataset(torch.randn(20_000, 4)), batch_size=2)

    def loop() -> None:
        for step, (inputs,) in enumerate(data):
            model(inputs).pow(2).mean().backward()
            if step % many == many - 1:
                optimizer.step()  # many backwards
                optimizer.zero_grad()

    profile = watched(loop)
    assert profile.step_where.endswith(line_of("many backwards"))
    assert profile.samples_per_step == 2 * many and profile.steps > 20
    assert not [note for note in profile.notes if "no optimizer" in note]
    assert profile.phases["update"] > 0


def test_several_backwards_in_a_line_before_an_update_are_one_step() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loop() -> None:
        for _ in range(80):
            for _ in range(6):
                model(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()  # after several

    assert watched(loop).step_where.endswith(line_of("after several"))


def test_samples_of_a_step_are_unknown_where_several_backwards_share_it_and_no_loader_tells() -> None:
    assert watched(accumulated).samples_per_step is None
    assert (watched(two_optimizers).samples_per_step, watched(closure).samples_per_step) == (8, 20)


@pytest.mark.parametrize(("parts", "many", "one"), [(1, 1, True), (4, 1, False), (4, 4, True)])
def test_all_samples_may_be_one_batch_or_the_batches_of_one_step(parts: int, many: int, one: bool) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = torch.randn(8, 4).chunk(parts)

    def loop() -> None:
        for step in range(60 * many):
            model(batches[step % parts]).pow(2).mean().backward()
            if step % many == many - 1:
                optimizer.step()

    assert watched(loop).one_batch is one


def test_updates_too_few_to_tell_steps_by_are_told_of() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loop() -> None:
        for step in range(60):
            model(torch.randn(8, 4)).pow(2).mean().backward()
            if step % 30 == 29:
                optimizer.step()

    profile = watched(loop)
    assert any("stepped only 2 times" in note for note in profile.notes)
    assert not [note for note in profile.notes if "no optimizer" in note]
    assert not [one for one in profile.optimizers if one.kind == "by hand"]


@pytest.mark.parametrize(("loop", "by_hand"), [(inside_the_backward, False), (by_hand, True)])
def test_an_update_inside_the_backward_is_none_by_hand(loop, by_hand: bool, own_optimizers: None) -> None:
    profile = watched(loop)
    said = " ".join(profile.notes)
    assert ("no optimizer stepped" in said, "inside the backward" in said) == (by_hand, not by_hand)
    assert [one.kind for one in profile.optimizers] == ["by hand"] * by_hand


def test_nothing_remains_of_a_loop_that_the_script_has_left() -> None:
    first, second = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), nn.Sequential(nn.Conv1d(1, 2, 3))
    one, other = torch.optim.Adam(first.parameters()), torch.optim.SGD(second.parameters(), lr=0.01)

    def loop() -> None:
        for inputs in DataLoader(torch.randn(40, 4), batch_size=2):
            first(inputs).pow(2).mean().backward(retain_graph=True)
            one.step()
        for inputs in DataLoader(torch.randn(600, 1, 16), batch_size=3):
            second(inputs).pow(2).mean().backward()
            other.step()  # the second loop

    profile = watched(loop, observers=lambda watch: observers(watch, None))
    assert profile.step_where.endswith(line_of("the second loop")) and profile.steps == 24
    assert {module.kind for module in profile.modules if module.kind} == {"Sequential", "Conv1d"}
    assert not [one.name for one in profile.operators if "addmm" in one.name or "tanh" in one.name]
    assert profile.operators and not profile.habits
    assert [use.kind for use in profile.optimizers] == ["SGD"]
    assert (profile.batch, profile.samples_per_step) == (["3x1x16"], 3)
    assert [use.batch_size for use in profile.loaders] == [3]


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


@pytest.mark.parametrize("every", [3, 4, 5])
def test_an_update_of_each_nth_step_is_told_of_apart_with_its_forward_and_backward(every: int) -> None:
    found = watched(lambda: seldom(every), steps=60, observers=lambda watch: observers(watch, None))
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
    found = profile_of(Facts(torch=True, trained=12, steps=steps, seldom=[rare]), "train.py")
    assert found.step_ms == 10.0 and found.phases == usual and found.apart.other_s == 0.0
    more = {"forward": 1.0, "backward": 3.0, "update": 1.0}
    assert found.apart.updates == [SeldomUpdate(kind="Adam", where="train.py:9", every=3.0, ms=5.0, phases=more)]


def test_optimizers_that_step_in_each_step_are_no_updates_now_and_then() -> None:
    assert watched(two_optimizers).apart.updates == []


def test_anomaly_detection_around_each_backward_is_a_habit() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loop(anomaly: bool) -> None:
        for _ in range(40):
            loss = model(torch.randn(8, 4)).pow(2).mean()
            optimizer.zero_grad()
            with torch.autograd.set_detect_anomaly(anomaly):
                loss.backward()
            optimizer.step()

    assert [habit.per_step for habit in watched(lambda: loop(True)).habits if habit.what == "hook"] == [1.0]
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
    """A clock that goes on by one whenever it is looked at."""

    def __init__(self) -> None:
        self.now = 0

    def mark(self, *, idle: bool = True) -> int:
        self.now += 1
        return self.now

    def ms(self, first: int, last: int) -> float:
        return last - first

    def idle_ms(self, first: int, last: int) -> float:
        return 0.25 * (last - first)

    def passed(self, mark: int) -> bool:
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
        finder.saw(Event("update", f"script.py:{number}", number))
    assert finder.anchor() is None
    assert not ends_step(Event("update", "script.py:1", 1), Event("update", "script.py:1", 2))


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
    first.put(Derived, "said", lambda before: lambda self: "first " + before(self))
    second.put(Derived, "said", lambda before: lambda self: "second " + before(self))
    assert Derived().said() == "second first base"
    second.undo()
    first.undo()
    assert Derived().said() == "base" and "said" not in vars(Derived)
    first.put(sys, "flags", lambda before: before)
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

    profile = watched(loop, observers=lambda watch: observers(watch, None))
    assert profile.steps == 0 and profile.step_ms is None
    assert "couldn't be told apart" in profile.notes[-1]
    assert {"forward", "backward", "update"} <= profile.phases.keys()
    assert {module.name for module in profile.modules} >= {"0", "1"}
    assert any(operator.name.startswith("aten::") for operator in profile.operators)
