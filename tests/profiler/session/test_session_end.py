"""However a watch ends, and wherever, it leaves nothing behind; and a step that never ends is no longer watched."""

from __future__ import annotations

import _thread
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace, TracebackType

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from hotloop.profiler import session, step_sequence
from hotloop.profiler.autograd_patterns import AutogradPatterns
from hotloop.profiler.base.call_sites import CallSites
from hotloop.profiler.base.steps import Kind, ProfileFacts
from hotloop.profiler.session import ProfilerSession, make_observers
from tests.profiler.session.test_clean_steps import STEPS, plain
from tests.support.profiler.profiled_steps import watched


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


def in_an_evaluation(kind: Kind) -> ProfilerSession:
    """A watch whose step of that kind is on, and in it an evaluation."""
    watch = ProfilerSession(STEPS, CallSites(), lambda facts: None, lambda watch: make_observers(watch, None))
    watch.install()
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    while watch._sequence.step is None or watch._sequence.step.kind != kind:
        plain(net, optimizer)
    net.eval()
    return watch


def abandoned(watch: ProfilerSession) -> None:
    watch.abandon()


def failed(watch: ProfilerSession) -> None:
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


def left(end: Callable[[ProfilerSession], None], kind: Kind) -> list[str]:
    """What a watch has left behind that ended within an evaluation in a step that is watched closely."""
    call, run = nn.Module.__call__, torch.autograd._engine_run_backward
    end(in_an_evaluation(kind))
    found = [] if nn.Module.__call__ is call else ["modules"]
    found += [] if torch.autograd._engine_run_backward is run else ["backward"]
    return found + ([] if sys.gettrace() is None else ["tracing"])


@pytest.mark.parametrize(("end", "kind"), ENDS)
def test_a_watch_that_ends_in_an_evaluation_in_any_way_leaves_nothing_behind(
    end: Callable[[ProfilerSession], None], kind: Kind
) -> None:
    assert left(end, kind) == []


class Numbers(Dataset):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(4)

    def __len__(self) -> int:
        return 4


def closed(watch: ProfilerSession) -> None:
    watch.close()
    watch.remove()


def broken(watch: ProfilerSession) -> None:
    watch._sequence.end_observers = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    closed(watch)
    assert "ZeroDivisionError" in watch.facts.notes[-1]


@pytest.mark.parametrize("kind", ["habits", "sampled"])
@pytest.mark.parametrize("end", [closed, failed, broken, abandoned])
def test_data_sets_caches_and_threads_are_as_before(end: Callable[[ProfilerSession], None], kind: Kind) -> None:
    threads = _thread._count()
    watch = ProfilerSession(STEPS, CallSites(), lambda facts: None, lambda watch: make_observers(watch, None))
    caches, samples = SimpleNamespace(fx_graph_cache=False), Numbers.__getitem__
    watch.compilations._caches = [(caches, "fx_graph_cache", True)]  # as when Inductor is listened to
    watch.install()
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    for inputs in (inputs for _ in range(100) for inputs in DataLoader(Numbers(), batch_size=2)):
        if watch._sequence.step is not None and watch._sequence.step.kind == kind:
            break
        net(inputs).pow(2).mean().backward()
        optimizer.step()
    assert (Numbers.__getitem__ is samples) == (kind != "habits")
    end(watch)
    assert Numbers.__getitem__ is samples and caches.fx_graph_cache
    if end is not abandoned:  # that happens in a fork, which has no threads
        until = time.monotonic() + 10
        while _thread._count() > threads and time.monotonic() < until:  # it may be about to end
            time.sleep(0.01)
        assert _thread._count() == threads
    watch._sequence.close()


def gone_on(steps: int | None, kind: Kind) -> ProfilerSession:
    """A watch with a step of that kind on, after enough others, while the script has gone on to another loop."""
    watch = ProfilerSession(steps, CallSites(), lambda facts: None, lambda watch: make_observers(watch, None))
    watch.install()
    net, other = nn.Linear(4, 1), nn.Linear(4, 2)
    optimizer, second = (torch.optim.SGD(one.parameters(), lr=0.01) for one in (net, other))
    while (
        watch._sequence.n_measured() < step_sequence.ENOUGH_STEPS
        or watch._sequence.step is None
        or watch._sequence.step.kind != kind
    ):
        plain(net, optimizer)
    for _ in range(step_sequence._MAX_STRAYS):
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
    monkeypatch.setattr(step_sequence, "_ABANDONED_S", -1.0)
    monkeypatch.setattr(step_sequence, "_ABANDONED_FACTOR", 0.0)
    with torch.no_grad():
        net(torch.ones(2, 4))
        assert (nn.Module.__call__ is call) and sys.gettrace() is None
    step = watch._sequence.step
    assert not watch.closed, watch.facts.notes
    assert step is not None and step.kind == "settling"
    monkeypatch.undo()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    while not watch.closed:
        plain(net, optimizer)
    watch.remove()
    assert watch._sequence.n_measured() == STEPS and nn.Module.__call__ is call


def test_facts_that_cannot_be_written_are_none_of_the_loops_trouble(monkeypatch) -> None:
    monkeypatch.setattr(session, "_PUBLISH_EVERY_S", 0.0)
    written: list[int] = []

    def publish(facts: ProfileFacts) -> None:
        written.append(len(facts.steps))
        if len(written) > 1:
            raise OSError("no space left")

    watch = ProfilerSession(STEPS, CallSites(), publish, lambda watch: [])
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
    monkeypatch.setattr(AutogradPatterns, "end_evaluation", lambda graphs: None)
    assert left(abandoned, "instrumented") == ["modules"]
