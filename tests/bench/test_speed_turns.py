"""The bench against peers: turns, with peers that compute nothing, and what peers' windows count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.speed import start, turns
from bench.speed.data import Data
from bench.speed.job import Job
from bench.speed.lanes import OURS, TUTORIAL
from bench.speed.marks import Marks
from bench.speed.running import Marked, Peer
from bench.speed.summary import summary
from bench.speed.table import markdown
from bench.speed.timetable import Timetable
from bench.speed.turns import WARMING, Session, grouped, in_turns
from bench.speed.workloads import WORKLOADS
from tests.support.bench.fake_peers import PEER, row


def begun(kind: str, *, in_turns: bool = True) -> Peer:
    return Peer([sys.executable, "-c", PEER, "W4", kind], {}, in_turns=in_turns)


def session(names: list[str], **options: float) -> dict[str, Marked]:
    return in_turns(names, begun, Session(**{"budget_s": 60, "rounds": 4, "window_s": 0.01, **options}))


def test_all_peers_train_the_same_steps_in_each_window() -> None:
    found = session(["plain", "other"])
    steps = [[steps for steps, _ in found[name].windows] for name in ("plain", "other")]
    assert steps[0] == steps[1] and len(steps[0]) == 4 and len(set(steps[0])) == 1
    assert found["plain"].train_loss == 0.5 and found["plain"].test_accuracy == 0.9
    assert all(one.failure is None and one.peak_bytes and one.startup_s for one in found.values())
    # The first step, and the windows that warm up or find how long windows are, are trained, and count nowhere else.
    assert found["other"].steps == found["plain"].steps > 1 + (WARMING + 4) * steps[1][0]


@pytest.mark.more
def test_a_peer_that_runs_several_steps_at_once_does_not_run_ahead() -> None:
    # Windows longer than what the peer runs at once, also where a sleep takes ten times what it should.
    found = session(["plain", "spans"], window_s=0.2)
    assert found["plain"].windows[0][0] > 3
    assert found["plain"].steps == found["spans"].steps


def test_windows_are_long_enough_for_whoever_takes_many_steps_at_once() -> None:
    found = session(["plain", "long spans"], window_s=5e-3)
    assert all(steps >= 60 for steps, _ in found["plain"].windows)
    assert found["plain"].steps == found["long spans"].steps


def test_a_process_that_closed_its_pipes_and_hangs_is_waited_for_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.speed.running._GONE_S", 0.2)
    found = session(["plain", "hangs"])
    assert "didn't end" in (found["hangs"].failure or "") and len(found["plain"].windows) == 4


def test_a_window_may_take_what_the_last_one_lets_expect_also_when_the_time_is_over() -> None:
    peer: Any = SimpleNamespace(last=(10, 8.0))
    assert turns._limit_s(peer, 10, time.monotonic() - 1) == 32
    assert turns._limit_s(peer, 5, time.monotonic() - 1) == 16


@pytest.mark.more
def test_who_breaks_or_never_starts_is_left_out_and_named() -> None:
    found = session(["plain", "breaks", "never"], budget_s=6)
    assert "out of luck" in (found["breaks"].failure or "")
    assert "first step within" in (found["never"].failure or "")
    assert found["plain"].windows and found["plain"].failure is None


def test_searches_that_fit_beside_everybodys_windows_are_made_and_others_left_out() -> None:
    searches = {("W1", OURS): 40.0, ("W6", OURS): 900.0, ("W8", OURS): 15.0}
    table = Timetable(200, {"W1": 50, "W6": 50, "W8": 30}, searches)
    assert table.left_out == {("W6", OURS): 900.0}
    assert table.search_s("W1", OURS) == pytest.approx(200 - 130 - 15, abs=1)
    assert table.session_s("W1") == 75  # of what is left over not all, lest one peer that hangs takes it
    assert table.session_s("W6") == 75 and table.session_s("W8") == 45
    free = Timetable(None, {"W6": 50}, searches)
    assert not free.left_out and free.search_s("W6", OURS) is None and free.session_s("W6") == 50


def test_a_session_leaves_to_the_searches_to_come_what_they_take_on_a_slower_machine() -> None:
    table = Timetable(200, {"W1": 50, "W5": 60}, {("W5", OURS): 60.0})
    assert table.session_s("W1") == pytest.approx(200 - 60 - 1.3 * 60, abs=1)
    assert table.search_s("W5", OURS) == pytest.approx(200 - 60, abs=1)


def test_some_windows_are_measured_where_starting_took_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_ENDING_S", 100.0)
    told: list[str] = []
    found = in_turns(["plain", "other"], begun, Session(20, rounds=8, window_s=0.01), told.append)
    assert [len(marked.windows) for marked in found.values()] == [turns.LEAST] * 2
    assert f"{turns.LEAST} windows of each in place of 8: no time left for more" in told


def test_a_peer_that_fails_after_its_windows_is_shown_to_have_failed() -> None:
    found = session(["plain", "lies"])
    assert found["lies"].windows and "not judged" in (found["lies"].failure or "")
    rows = [{**row(), "lanes": {TUTORIAL: asdict(found["plain"]), OURS: asdict(found["lies"])}}]
    text = markdown(summary(rows, {}, {}, OURS))
    assert "**failed** meanwhile: hotloop: ended with 1" in text and "isn't known" in text
    assert "W4: hotloop failed: ended with 1" in text and "Nowhere" not in text


def test_the_result_is_of_the_last_session_that_was_judged() -> None:
    rows = [row(tutorial=4e-3, hotloop=1e-3), row(tutorial=4e-3, hotloop=1e-3)]
    rows[0]["lanes"][OURS]["train_loss"] = 9.0
    rows[1]["lanes"][OURS] |= {"train_loss": None, "failure": "gone"}
    assert "the loss of hotloop isn't" in markdown(summary(rows, {}, {}, OURS))


def test_a_process_answers_for_its_own_memory_alone() -> None:
    """Linux counts what a process held before exec, the parent's memory, as its own in `ru_maxrss`."""
    child = "from bench.speed.marks import peak_bytes; print(peak_bytes())"
    parent = (
        "import subprocess, sys\n"
        "held = b'x' * (400 << 20)\n"
        f"print(subprocess.run([sys.executable, '-c', {child!r}], check=True, capture_output=True, text=True).stdout)"
    )
    done = subprocess.run([sys.executable, "-c", parent], check=True, capture_output=True, text=True, env=os.environ)
    assert 1 << 20 < int(done.stdout) < 200 << 20


def test_whoever_holds_a_workload_alone_is_compared_with_us_in_each_group() -> None:
    names = [TUTORIAL, "a", "b", OURS, "last"]
    assert grouped(names, 12, OURS) == [names]
    assert grouped(names, 3, OURS) == [[TUTORIAL, "a", OURS], ["b", OURS, "last"]]


def test_marks_wait_for_the_device_before_they_look_at_the_clock(tmp_path: Path) -> None:
    waited = []
    orders = tmp_path / "orders"
    orders.write_text('{"steps": 2}\n{}\n')
    with orders.open() as given, (tmp_path / "reports").open("w") as reports:
        marks = Marks(reports, given, sync=lambda: waited.append(marks.done))
        assert [marks.step() for _ in range(3)] == [True, True, False]
    assert waited == [1, 3]
    events = [json.loads(line)["event"] for line in (tmp_path / "reports").read_text().splitlines()]
    assert events == ["first", "window"]


def ordered(path: Path, *steps: int) -> Marks:
    """Marks that are asked for windows of so many steps, and then to end."""
    path.write_text("".join(f'{{"steps": {count}}}\n' for count in steps) + "{}\n")
    return Marks((path.parent / "reports").open("w"), path.open())


def test_keras_is_counted_without_waiting_for_each_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    keras = pytest.importorskip("keras", reason="needs keras (the examples extra)")
    from bench.peers.with_keras import counting

    marks = ordered(tmp_path / "orders", 2)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer="adam", loss="mse")
    callbacks = [counting(marks)]
    assert keras.callbacks.CallbackList(callbacks)._async_train  # a callback on each batch's end turns that off
    model.fit(np.ones((4, 3)), np.ones((4, 1)), batch_size=2, epochs=9, callbacks=callbacks, verbose=0)
    # The window ends with the third step, and Keras does the one that it has begun.
    assert marks.done == 4 == int(model.optimizer.iterations)


def test_a_window_of_keras_on_jax_ends_with_what_jax_has_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX takes containers that it doesn't know, such as Keras's own, for values that are there."""
    from bench.peers.with_keras import waiting

    class Tracked(list):
        pass

    class TrackedKinds(dict):
        pass

    waited: list[str] = []

    def wait_for(tree: Any) -> None:
        if type(tree) is list:
            for value in tree:
                wait_for(value)
        elif type(tree) is str:
            waited.append(tree)

    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(block_until_ready=wait_for))
    model = SimpleNamespace(_jax_state=TrackedKinds(weights=Tracked(["w", "b"]), moments=Tracked(["m"])))
    waiting(model)()
    assert waited == ["w", "b", "m"]
    waiting(SimpleNamespace())()


def test_jax_draws_nothing_outside_of_what_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax", reason="needs jax (the bench extra)")
    from bench.peers import with_jax

    images = np.arange(512 * 784, dtype=np.uint8).reshape(512, 28, 28)
    data = Data(images, np.zeros(512, np.int64), images, np.zeros(512, np.int64))
    monkeypatch.setattr(with_jax, "load", lambda kind: data)
    monkeypatch.setattr(start, "orders_file", lambda samples, home: tmp_path / f"{samples}.npy")
    monkeypatch.setattr(start, "weights_file", lambda name, home: tmp_path / f"{name}.npz")
    start.lay_down_start(WORKLOADS["W4"], 512)
    drawn: list[int] = []
    monkeypatch.setattr(jax.random, "split", lambda *given, split=jax.random.split: drawn.append(1) or split(*given))
    for options in (("step",), ("scan",)):
        drawn.clear()
        with_jax.train(Job(WORKLOADS["W4"], 3, ordered(tmp_path / "orders", 4, 4), options))
        assert not drawn
