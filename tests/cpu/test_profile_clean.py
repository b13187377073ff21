"""What a clean step is spared: backwards that tell nothing, and caches that are cold from the step before."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace, TracebackType

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hotloop.profiles import Phase
from hotloop.profiling import course, stretch, watcher
from hotloop.profiling.course import Course
from hotloop.profiling.facts import Facts
from hotloop.profiling.habits import Graphs
from hotloop.profiling.observing import observers
from hotloop.profiling.schedule import CLOSE, Kind, order
from hotloop.profiling.sites import Sites
from hotloop.profiling.steps import Event
from hotloop.profiling.watcher import Watch
from tests.cpu.watching import watched

STEPS = 24
DISTURBING = {*CLOSE, "clocked"}


class Quiet:
    """A stage on which nothing happens.

    Attributes:
        kinds: how each step was watched; one after which a clean step begins anew is one that settles.
    """

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def begin(self, kind: Kind) -> Phase:
        self.kinds.append(kind)
        return "python"

    def again(self) -> None:
        assert self.kinds[-1] == "clean"
        self.kinds.insert(-1, "settling")

    def ready(self) -> None: ...
    def flags(self) -> list[str]:
        return []

    def end(self, *, usual: bool = True) -> None: ...
    def anew(self) -> None: ...
    def between(self) -> None: ...


class Even:
    """A clock by which all steps take the same time: it goes on whenever it is looked at."""

    def __init__(self, ms: float) -> None:
        self._each_ms, self._now_ms = ms, 0.0

    def mark(self, *, idle: bool = True) -> float:
        self._now_ms += self._each_ms
        return self._now_ms

    def ms(self, first: float, last: float) -> float:
        return last - first

    def idle_ms(self, first: float, last: float) -> float:
        return 0.0

    def passed(self, mark: float) -> bool:
        return True


def taken(ms: float, *, steps: int = STEPS, in_step: bool = False) -> list[str]:
    """How all steps are watched, each of so many milliseconds."""
    stage = Quiet()
    one = Course(steps, stage, list, found=False, in_step=in_step)
    one.timeline.clock = Even(ms)
    while not one.over:
        one.boundary()
    assert [step.kind for step in one.facts.steps if step.kind == "clean"] == ["clean"] * stage.kinds.count("clean")
    return stage.kinds


def kinds(ms: float, steps: int = STEPS) -> list[str]:
    """Those after the warm-up."""
    return [kind for kind in taken(ms, steps=steps) if kind != "warm-up"]


def cold(found: list[str]) -> list[tuple[str, str]]:
    """Clean steps right after one that was disturbed."""
    return [pair for pair in pairwise(found) if pair[0] in DISTURBING and pair[1] == "clean"]


def test_no_short_clean_step_follows_a_disturbed_one() -> None:
    found = kinds(1.0)
    assert cold(found) == []
    planned = order(STEPS)
    assert [kind for kind in found if kind != "settling"] == [kind for kind in planned if kind != "settling"]


def settled(found: list[str]) -> int:
    """The least number of steps between one that was disturbed and the next clean one."""
    since, least = [], []
    for kind in found:
        if kind == "clean" and since:
            least.append(since.index(next(one for one in since if one in DISTURBING)))
        since = [kind, *since]
    return min(least)


@pytest.mark.parametrize(("ms", "steps"), [(0.1, 4), (1.0, 4), (4.0, 2), (8.0, 1), (50.0, 0)])
def test_short_steps_settle_for_longer(ms: float, steps: int) -> None:
    assert settled(kinds(ms)) == steps


@pytest.mark.parametrize(("ms", "steps"), [(0.1, 64), (1.0, 10), (4.0, 2)])
def test_short_steps_settle_for_longest_once_enough_are_measured(ms: float, steps: int) -> None:
    found = kinds(ms, 2 * STEPS)
    enough = [at for at, kind in enumerate(found) if kind in ("clean", "instrumented")][stretch._ENOUGH]
    assert settled(found[enough:]) == steps


def test_long_steps_need_not_settle() -> None:
    assert kinds(50.0) == order(STEPS)


def test_steps_that_do_not_settle_are_seen(monkeypatch) -> None:
    monkeypatch.setattr(stretch, "_SETTLED_MS", 0.0)
    assert cold(kinds(1.0))


def test_of_ranks_no_clock_decides_how_a_step_is_watched(monkeypatch) -> None:
    """Each has its own, and all must watch each step in the same way; what disturbed one must not make others wait."""
    found = taken(1.0, in_step=True)
    assert found == taken(50.0, in_step=True) != taken(50.0)
    assert not [pair for pair in pairwise(found) if pair[0] in DISTURBING and pair[1] in ("clean", "instrumented")]
    for name in ("LONGEST_S", "_WARM_S"):
        monkeypatch.setattr(course, name, -1.0)
    assert found == taken(1.0, in_step=True) != taken(1.0)


@pytest.mark.parametrize(("steps", "measured"), [(STEPS, STEPS), (None, course.SETTLED)])
def test_so_many_steps_as_were_asked_for_take_as_long_as_they_take(
    steps: int | None, measured: int, monkeypatch
) -> None:
    monkeypatch.setattr(course, "LONGEST_S", -1.0)
    one = Course(steps, Quiet(), list, found=False)
    while not one.over:
        one.boundary()
    assert one.measured() == measured


def test_warm_up_is_that_of_the_loop_that_is_measured(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(course, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    one = Course(STEPS, Quiet(), list, found=True)
    one.timeline.clock = Even(1.0)

    def train(where: str, steps: int) -> None:
        for _ in range(steps):
            now[0] += 1.0
            one.trains()
            one.happened(Event("update", where))

    train("first.py:1", 6)
    first_s = now[0]
    train("second.py:1", 20)
    assert one.facts.anchor == "second.py:1"
    assert 0.0 < one.facts.warm_up_s < first_s


def plain(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.randn(8, 4)).pow(2).mean().backward()
    optimizer.step()


def by_hand(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.randn(8, 4)).pow(2).mean().backward()
    with torch.no_grad():
        for value in net.parameters():
            value -= 0.01 * value.grad


def inside(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    other = torch.optim.SGD([net.bias], lr=0.01)  # updates while the backward is on, which ends no step
    handle = net.bias.register_post_accumulate_grad_hook(lambda value: other.step())
    plain(net, optimizer)
    handle.remove()


def evaluating(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net.eval()  # until the next backward, since nobody says that it is over
    plain(net, optimizer)


Steps = Callable[[nn.Module, torch.optim.Optimizer], None]


def heard(step: Steps, monkeypatch) -> set[str]:
    """Kinds of steps of which a backward is heard."""
    found: set[str] = set()
    began = Watch.backward_began

    def noted(watch: Watch, args: tuple, kwargs: dict) -> object:
        found.add(watch._course.step.kind if watch._course.step is not None else "")
        return began(watch, args, kwargs)

    def loop() -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(150):
            step(net, optimizer)

    monkeypatch.setattr(Watch, "backward_began", noted)
    assert watched(loop).steps == STEPS
    return found


def test_backwards_of_clean_steps_tell_nothing(monkeypatch) -> None:
    found = heard(plain, monkeypatch)
    assert "instrumented" in found and not found & {"clean", "settling", "clocked"}


@pytest.mark.parametrize("step", [by_hand, inside, evaluating], ids=lambda step: step.__name__)
def test_backwards_that_tell_something_are_heard_in_clean_steps(step: Steps, monkeypatch) -> None:
    assert {"clean", "instrumented"} <= heard(step, monkeypatch)


def test_hearing_all_backwards_is_seen(monkeypatch) -> None:
    monkeypatch.setattr(Watch, "hears_backwards", Watch.mine)
    assert "clean" in heard(plain, monkeypatch)


def test_hearing_none_but_those_that_are_watched_closely_is_seen(monkeypatch) -> None:
    monkeypatch.setattr(nn.Module, "__call__", nn.Module.__call__)  # put back: the fault leaves an evaluation open
    monkeypatch.setattr(Watch, "hears_backwards", lambda watch: watch._close and watch.mine())
    assert not [step for step in (inside, evaluating) if "clean" in heard(step, monkeypatch)]


def test_a_watch_that_ends_in_an_evaluation_leaves_nothing_behind() -> None:
    call = nn.Module.__call__

    def loop() -> None:
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(12):
            plain(net, optimizer)
        net.eval()

    watched(loop)
    assert nn.Module.__call__ is call


def in_an_evaluation(kind: Kind) -> Watch:
    """A watch whose step of that kind is on, and in it an evaluation."""
    watch = Watch(STEPS, Sites(), lambda facts: None, lambda watch: observers(watch, None))
    watch.install()
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    while watch._course.step is None or watch._course.step.kind != kind:
        plain(net, optimizer)
    net.eval()
    return watch


def abandoned(watch: Watch) -> None:
    watch.abandon()


def failed(watch: Watch) -> None:
    watch.fail(ZeroDivisionError().with_traceback(trace()))
    watch.remove()


def trace() -> TracebackType | None:
    try:
        raise ZeroDivisionError
    except ZeroDivisionError as error:
        return error.__traceback__


ENDS = [
    *((abandoned, kind) for kind in ("instrumented", "clocked")),  # a profiler goes on in the process that it began in
    *((failed, kind) for kind in ("instrumented", "clocked", "traced")),
]


def left(end: Callable[[Watch], None], kind: Kind) -> list[str]:
    """What a watch has left behind that ended within an evaluation in a step that is watched closely."""
    call, run = nn.Module.__call__, torch.autograd._engine_run_backward
    end(in_an_evaluation(kind))
    found = [] if nn.Module.__call__ is call else ["modules"]
    found += [] if torch.autograd._engine_run_backward is run else ["backward"]
    return found + ([] if sys.gettrace() is None else ["tracing"])


@pytest.mark.parametrize(("end", "kind"), ENDS)
def test_a_watch_that_ends_in_an_evaluation_in_any_way_leaves_nothing_behind(
    end: Callable[[Watch], None], kind: Kind
) -> None:
    assert left(end, kind) == []


class Numbers(Dataset):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(4)

    def __len__(self) -> int:
        return 4


def closed(watch: Watch) -> None:
    watch.close()
    watch.remove()


def broken(watch: Watch) -> None:
    """It fails while it closes."""
    watch._course.end_close_watch = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    closed(watch)
    assert "ZeroDivisionError" in watch.facts.notes[-1]


@pytest.mark.parametrize("kind", ["habits", "sampled"])
@pytest.mark.parametrize("end", [closed, failed, broken, abandoned])
def test_data_sets_caches_and_threads_are_as_before(end: Callable[[Watch], None], kind: Kind) -> None:
    watch = Watch(STEPS, Sites(), lambda facts: None, lambda watch: observers(watch, None))
    caches, samples = SimpleNamespace(fx_graph_cache=False), Numbers.__getitem__
    watch.compilations._caches = [(caches, "fx_graph_cache", True)]  # as when Inductor is listened to
    watch.install()
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for inputs in (inputs for _ in range(100) for inputs in DataLoader(Numbers(), batch_size=2)):
        if watch._course.step is not None and watch._course.step.kind == kind:
            break
        net(inputs).pow(2).mean().backward()
        optimizer.step()
    assert (Numbers.__getitem__ is samples) == (kind != "habits")
    end(watch)
    assert Numbers.__getitem__ is samples and caches.fx_graph_cache
    sampling = [thread for thread in threading.enumerate() if thread.name == "hotloop-sampler"]
    if end is not abandoned:  # that happens in a fork, which has no threads
        assert sampling == []
    watch._course.close()


def gone_on(steps: int | None, kind: Kind) -> Watch:
    """A watch with a step of that kind on, after enough others, while the script has gone on to another loop."""
    watch = Watch(steps, Sites(), lambda facts: None, lambda watch: observers(watch, None))
    watch.install()
    net, other = nn.Linear(4, 1), nn.Linear(4, 2)
    optimizer, second = (torch.optim.SGD(one.parameters(), lr=0.01) for one in (net, other))
    while watch._course.measured() < course.SETTLED or watch._course.step is None or watch._course.step.kind != kind:
        plain(net, optimizer)
    for _ in range(course._STRAYED):
        other(torch.randn(8, 4)).pow(2).mean().backward()
        second.step()
    return watch


@pytest.mark.parametrize("kind", ["clean", "clocked", "instrumented", "sampled"])
@pytest.mark.parametrize("steps", [None, STEPS])
def test_a_script_that_goes_on_to_another_loop_is_not_watched_closely_there(steps: int | None, kind: Kind) -> None:
    call = nn.Module.__call__
    watch = gone_on(steps, kind)
    assert nn.Module.__call__ is call and watch.closed == (steps is None)
    closed(watch)


@pytest.mark.parametrize("kind", ["habits", "instrumented", "sampled", "traced"])
def test_a_step_that_never_ends_is_watched_closely_no_more(kind: Kind, monkeypatch) -> None:
    call = nn.Module.__call__
    watch = in_an_evaluation(kind)
    net = nn.Linear(4, 1).eval()
    net(torch.ones(2, 4))
    assert nn.Module.__call__ is not call
    monkeypatch.setattr(course, "_LOST_S", -1.0)
    monkeypatch.setattr(course, "_LOST", 0.0)
    with torch.no_grad():
        net(torch.ones(2, 4))
        assert (nn.Module.__call__ is call) and sys.gettrace() is None
    step = watch._course.step
    assert not watch.closed, watch.facts.notes
    assert step is not None and step.kind == "settling"
    monkeypatch.undo()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    while not watch.closed:
        plain(net, optimizer)
    watch.remove()
    assert watch._course.measured() == STEPS and nn.Module.__call__ is call


def test_facts_that_cannot_be_written_are_none_of_the_loops_trouble(monkeypatch) -> None:
    monkeypatch.setattr(watcher, "_PUBLISHED_S", 0.0)
    written: list[int] = []

    def publish(facts: Facts) -> None:
        written.append(len(facts.steps))
        if len(written) > 1:
            raise OSError("no space left")

    watch = Watch(STEPS, Sites(), publish, lambda watch: [])
    watch.install()
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for _ in range(30):
        plain(net, optimizer)
    watch.close()
    watch.remove()
    assert len(written) == 3 and "OSError: no space left" in watch.facts.notes[0]


def test_a_wrapper_that_nobody_takes_away_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "__call__", nn.Module.__call__)  # put back: the fault leaves a wrapper
    monkeypatch.setattr(Graphs, "end_evaluation", lambda graphs: None)
    assert left(abandoned, "instrumented") == ["modules"]
