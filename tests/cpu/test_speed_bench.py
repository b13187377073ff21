"""The bench against peers: turns, journals and tables, with peers that compute nothing."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench import auto_models
from bench.speed import __main__ as bench
from bench.speed import caching, turns
from bench.speed import sessions as bench_sessions
from bench.speed.caching import Filled, caches, filled, note_filled, own_cache, state
from bench.speed.data import ALPHABET, Data, lay_down, load
from bench.speed.job import Job
from bench.speed.journal import Journal
from bench.speed.lanes import OURS, PEERS, TUTORIAL, UNSEARCHED, Lane, ours
from bench.speed.limits import work_of
from bench.speed.marks import Marks
from bench.speed.picture import draw
from bench.speed.ratios import geometric_mean, ratio
from bench.speed.running import Marked, Peer
from bench.speed.sessions import Bench
from bench.speed.summary import summary
from bench.speed.table import markdown, targets_table
from bench.speed.targets import targets
from bench.speed.timetable import Timetable
from bench.speed.turns import WARMING, Session, grouped, in_turns
from bench.speed.whole import lanes_of, whole_runs, whole_table, whole_targets
from bench.speed.workloads import WORKLOADS
from hotloop.errors import HotloopError
from hotloop.measuring.statistics import Ratio
from hotloop.plan import Plan
from hotloop.verdicts import Timing, Verdict

PEER = """
import os, sys, time
from bench.speed.job import main

kind = sys.argv[2]
at_once = {"spans": 3, "long spans": 60}.get(kind, 1)

def train(job):
    if kind == "never":
        time.sleep(600)
    for number in range(100_000 if job.marks.in_turns else 10):
        if kind == "breaks" and number == 3:
            raise ValueError("out of luck")
        if kind == "hangs" and number == 3:
            os.closerange(3, 64)
            time.sleep(600)
        time.sleep(1e-3)
        if not job.marks.step(at_once):
            break
    if kind == "lies":
        raise ValueError("not judged")
    return lambda: (0.5, 0.9)

main(train)
"""


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


def test_who_breaks_or_never_starts_is_left_out_and_named() -> None:
    found = session(["plain", "breaks", "never"], budget_s=6)
    assert "out of luck" in (found["breaks"].failure or "")
    assert "first step within" in (found["never"].failure or "")
    assert found["plain"].windows and found["plain"].failure is None


def test_a_peer_that_never_starts_leaves_the_others_their_allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_START_S", 0.0)
    found = in_turns(["plain", "never", "other"], begun, Session(12, rounds=4, window_s=0.01))
    assert "first step within" in (found["never"].failure or "")
    assert all(found[name].windows and not found[name].failure for name in ("plain", "other"))


def test_searches_that_fit_beside_everybodys_windows_are_made_and_others_left_out() -> None:
    searches = {("W1", OURS): 40.0, ("W6", OURS): 900.0, ("W8", OURS): 15.0}
    table = Timetable(200, {"W1": 50, "W6": 50, "W8": 30}, searches)
    assert table.left_out == {("W6", OURS): 900.0}
    assert table.search_s("W1", OURS) == pytest.approx(200 - 130 - 15, abs=1)
    assert table.session_s("W1") == 75  # of what is left over not all, lest one peer that hangs takes it
    assert table.session_s("W6") == 75 and table.session_s("W8") == 45
    free = Timetable(None, {"W6": 50}, searches)
    assert not free.left_out and free.search_s("W6", OURS) is None and free.session_s("W6") == 50


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
    assert "the loss of hotloop is far above" in markdown(summary(rows, {}, {}, OURS))


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


def lanes(**seconds: float) -> dict[str, dict]:
    """Marked windows of eight rounds, all of one length, of a step that takes so many seconds."""
    made = {}
    for name, step_s in seconds.items():
        windows = [(10, 10 * step_s)] * 8
        marked = Marked(1.0, windows, 80, 10**9, 0.5, 0.9, plan="compile=step" if name == OURS else None)
        made[name] = asdict(marked)
    return made


def row(workload: str = "W4", **seconds: float) -> dict:
    return {"kind": "session", "workload": workload, "session": 0, "group": 0, "lanes": lanes(**seconds)}


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
    drawn: list[int] = []
    monkeypatch.setattr(jax.random, "split", lambda *given, split=jax.random.split: drawn.append(1) or split(*given))
    for options in (("step",), ("scan",)):
        drawn.clear()
        with_jax.train(Job(WORKLOADS["W4"], 3, ordered(tmp_path / "orders", 4, 4), options))
        assert len(drawn) == 3  # the weights of two layers


def test_ratios_are_of_windows_that_lie_side_by_side() -> None:
    """The second session was on a machine of a quarter of the speed; that must not show."""
    rows = [row(tutorial=4e-3, hotloop=1e-3), row(tutorial=16e-3, hotloop=4e-3)]
    found = ratio(rows, TUTORIAL, OURS)
    assert found is not None and found.median == pytest.approx(4) and found.pairs == 16
    assert ratio([row(tutorial=1.0), row(hotloop=1.0)], TUTORIAL, OURS) is None


def test_steps_are_those_that_the_ratios_beside_them_make_of_one_anchor() -> None:
    """Lightning was measured in another group, on a machine of a quarter of the speed."""
    rows = [row(tutorial=4e-3, hotloop=1e-3), row(hotloop=4e-3, lightning=8e-3)]
    found = summary(rows, {}, {}, OURS)
    step_ms = {line.name: line.step_ms for line in found.lines["W4"]}
    assert step_ms == {TUTORIAL: pytest.approx(4), OURS: pytest.approx(1), "lightning": pytest.approx(2)}
    without = summary([row(tutorial=4e-3, lightning=8e-3)], {}, {}, OURS)
    assert [line.step_ms for line in without.lines["W4"]] == [pytest.approx(4), pytest.approx(8)]


def test_the_table_shows_steps_where_not_everybody_was_judged_after_as_many() -> None:
    rows = [row(tutorial=4e-3, hotloop=1e-3)]
    assert "after steps" not in markdown(summary(rows, {}, {}, OURS))
    rows[0]["lanes"][OURS]["steps"] = 9000
    text = markdown(summary(rows, {}, {}, OURS))
    assert "| after steps |" in text and "| 9,000 |" in text


def test_each_target_is_met_or_says_by_how_much_it_was_missed() -> None:
    rows = [row(name, tutorial=4e-3, hotloop=1e-3, lightning=3e-3) for name in ("W1", "W2", "W3", "W4", "W5", "W6")]
    found = summary(rows, {"W1": {"data_bytes": 0, "least_ms": None}}, {}, OURS)
    kept = {one.where: one for one in targets(found, "cpu")}
    assert kept["W1 to W5, step, mean over lightning (floor)"].verdict == "met"
    assert kept["W1 to W5, step, mean over lightning (goal)"].verdict == "missed by 25%"
    assert kept["W6 to W9, step, mean over tutorial"].verdict == "not measured"  # one of four
    assert kept["W4, step over the best peer (lightning)"].reached == pytest.approx(3)
    assert kept["W1, memory of the host beyond the tutorial's"].met
    on_gpu = {one.where: one.verdict for one in targets(found, "cuda")}
    assert on_gpu["W1, step over lightning"] == "missed by 85%"
    assert on_gpu["W1, an epoch of 7500 steps"] == "missed by 2400%"
    text = targets_table(targets(found, "cpu"))
    assert "| at least 4x | 3x | **missed by 25%** |" in text


def test_memory_of_a_search_is_shown_beside_that_of_a_start_that_needs_none() -> None:
    rows = [row(tutorial=4e-3, hotloop=1e-3)]
    rows[0]["lanes"][OURS] |= {"cache": "warm", "first_start": asdict(Filled(60.0, "cold", 3 * 10**9))}
    text = markdown(summary(rows, {}, {}, OURS))
    assert "3000 MB cold, 1000 MB warm" in text
    assert "W4, memory: 2000 MB cold more than the tutorial's loop" in text


def test_a_geometric_mean_counts_each_workload_once() -> None:
    found = geometric_mean([Ratio(8, 8, 8, 20), Ratio(2, 2, 2, 8)])
    assert found is not None and found.value == pytest.approx(4) and found.of == 2
    wide = geometric_mean([Ratio(3, 2.5, 3.6, 12)])
    assert wide is not None and (wide.low, wide.high) == (pytest.approx(2.5), pytest.approx(3.6))
    both = geometric_mean([Ratio(3, 2.5, 3.6, 12)] * 4)
    assert both is not None and both.low == pytest.approx(3 * (2.5 / 3) ** 0.5)


def test_where_a_ratio_has_no_interval_the_mean_and_the_picture_have_none(tmp_path: Path) -> None:
    rows = [row(name, tutorial=4e-3, hotloop=1e-3) for name in ("W1", "W4")]
    for lane in rows[1]["lanes"].values():
        lane["windows"] = lane["windows"][:5]
    found = summary(rows, {}, {}, OURS)
    assert "| tutorial | 4.00 (too few pairs), 2 of them |" in markdown(found)
    draw(found, tmp_path / "speed.html")
    assert '"array":[0.0,null],"arrayminus":[0.0,null]' in (tmp_path / "speed.html").read_text().replace(" ", "")


def test_the_mean_over_jax_is_over_the_faster_of_its_ways() -> None:
    rows = [row("W1", hotloop=1e-3, **{"jax-scan": 2e-3, "jax-step": 4e-3})]
    rows += [row("W3", hotloop=1e-3, **{"jax-scan": 66e-3, "jax-step": 2e-3})]
    text = markdown(summary(rows, {}, {}, OURS))
    assert "| jax (the faster of jax-scan, jax-step) | 2.00 (2.00 to 2.00), 2 of them |" in text


def test_best_is_who_is_ahead_of_all_that_know_the_network() -> None:
    peers = dict.fromkeys(("lightning", "accelerate", "skorch", "keras-torch", "transform", "torch.compile"), 0.003)
    jax = {"jax-scan": 2e-3, "keras-jax": 3e-3}
    every = row("W4", tutorial=4e-3, hotloop=1e-3, **peers, **jax)
    verdict = {one.where: one for one in targets(summary([every], {}, {}, OURS), "cpu")}
    assert verdict["W4, step over the best peer (jax-scan)"].verdict == "met"
    for name in ("jax-scan", "torch.compile"):
        del every["lanes"][name]
    (one,) = (one for one in targets(summary([every], {}, {}, OURS), "cpu") if "W4, step over the best" in one.where)
    assert one.verdict == "ahead of those that ran (not run: jax, torch.compile)" and one.met is None
    every["lanes"][OURS] = lanes(hotloop=3e-3)[OURS]
    (one,) = (one for one in targets(summary([every], {}, {}, OURS), "cpu") if "W4, step over the best" in one.where)
    assert one.verdict == "missed by 17%"
    on_gpu = {
        one.where: one.verdict
        for one in targets(summary([row("W6", tutorial=4e-3, hotloop=1e-3)], {}, {}, OURS), "cuda")
    }
    assert on_gpu["W6, step over tutorial, bf16 allowed"] == "not measured: no lane allows it"


def test_the_table_says_where_hotloop_is_behind() -> None:
    rows = [row(tutorial=4e-3, hotloop=1e-3, lightning=8e-3, **{"jax-scan": 5e-4})]
    rows[0]["lanes"]["lightning"]["train_loss"] = 2.0
    rows[0]["lanes"][TUTORIAL]["peak_bytes"] = 9 * 10**8
    missing = {("W4", "skorch"): "skorch isn't installed"}
    limits = {"W4": {"least_ms": 0.5, "flops": 1e9, "bytes": 1e6}}
    found = summary(rows, limits, missing, OURS)
    text = markdown(found)
    best = found.best_peer("W4")
    assert best is not None and best.name == "jax-scan"
    assert "jax-scan is 2.00 times as fast" in text and "100 MB more than the tutorial's loop" in text
    assert "not run: skorch: skorch isn't installed" in text
    assert "the loss of lightning is far above" in text and "hotloop ran `compile=step`" in text
    assert "reaches 50% of it" in text and "no limit" not in text
    exceeded = markdown(summary(rows, {"W4": limits["W4"] | {"least_ms": 0.8}}, {}, OURS))
    assert "reaches 80% of it. It is no limit: faster were jax-scan in 0.5 ms" in exceeded
    # A run of two minutes: start-up, and the steps that the tutorial's loop does meanwhile.
    line = found.line("W4", OURS)
    assert line is not None and line.run_s == {"": pytest.approx(1 + 120 / 4)}


def test_starts_with_an_empty_and_a_filled_cache_are_told_apart() -> None:
    rows = [row(tutorial=4e-3, hotloop=1e-3, compiled=1e-3) for _ in range(3)]
    for number, one in enumerate(rows):
        one["lanes"][OURS] |= {"cache": "warm" if number else "cold", "startup_s": 10.0 if number else 60.0}
        one["lanes"]["compiled"] |= {"cache": "warm" if number else "cold", "startup_s": 20.0}
    text = markdown(summary(rows, {}, {}, OURS))
    assert "60.0 s cold, 10.0 s warm" in text and "90 s cold, 40 s warm" in text and "its cache was empty" in text
    assert "run of 2 min: compiled 50 s cold, hotloop 90 s cold" in text
    assert "compiled 50 s warm" not in text
    assert "run of 2 min: tutorial" not in text  # 121 s


def test_a_cache_is_warm_when_a_start_went_through_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = own_cache(tmp_path, "W1", "with_hotloop", "compile=step,threads=1")
    assert state(folder) == "cold"
    caches(folder)
    assert state(folder) == "cold"  # empty folders
    (folder / "inductor").mkdir()
    (folder / "inductor" / "kernel.so").touch()
    assert state(folder) == "half-warm"
    note_filled(folder, Filled(60.0, "half-warm"))
    assert state(folder) == "warm" and filled(folder) == Filled(60.0, "half-warm")
    assert state(own_cache(tmp_path, "W2", "with_hotloop", "tune")) == "cold"
    assert caching.begun(folder)[1] == "warm"
    monkeypatch.setattr("bench.speed.caching._asked", lambda: "of another version")
    assert filled(folder) is None
    assert caching.begun(folder)[1] == "cold" and not (folder / "inductor").exists()


def test_a_cache_of_other_sources_or_of_another_jax_is_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {caching._asked()}
    for name, other in (("sources", "another hotloop"), ("versions_of_peers", {"jax": "another"})):
        with monkeypatch.context() as patch:
            patch.setattr(caching, name, lambda other=other: other)
            asked.add(caching._asked())
    assert len(asked) == 3


def test_nothing_is_behind_where_hotloop_is_ahead() -> None:
    found = summary([row(tutorial=4e-3, hotloop=1e-3)], {}, {}, OURS)
    assert "Nowhere, in what was measured." in markdown(found)


def test_the_length_of_the_run_that_hotloop_planned_for_stands_above_the_table(tmp_path: Path) -> None:
    found = summary([row(tutorial=4e-3, hotloop=1e-3)], {}, {}, OURS)
    journal = Journal(tmp_path / "journal.jsonl", resume=False)
    assert bench.tables(found, journal).startswith("hotloop planned for a run of 10,000,000 steps")
    assert bench.tables(None, journal) == whole_table([])  # whole runs are planned for as long as they are


def test_a_peer_that_failed_is_listed_with_the_reason() -> None:
    rows = [row(tutorial=4e-3, hotloop=1e-3)]
    rows[0]["lanes"]["skorch"] = asdict(Marked(failure="ended with 1: no luck"))
    assert "not run: skorch: ended with 1: no luck" in markdown(summary(rows, {}, {}, OURS))


def test_a_journal_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "journal.jsonl"
    first = Journal(path, resume=True, setup={"torch": "1"})
    first.add({"workload": "W1", "session": 0}, lanes={})
    with path.open("a") as file:
        file.write('{"workload": "W2", "sess')  # killed while it wrote
    again = Journal(path, resume=True, setup={"torch": "1"})
    assert again.has({"workload": "W1", "session": 0}) and not again.has({"workload": "W2"})
    again.add({"workload": "W2", "session": 0}, lanes={})
    assert [one["workload"] for one in Journal(path, resume=True).rows] == ["W1", "W2"]
    with pytest.raises(HotloopError, match="holds 2 measurements already"):
        Journal(path, resume=False, setup={"torch": "1"})
    assert Journal(path, resume=False, fresh=True, setup={"torch": "1"}).rows == []


def test_a_journal_of_other_versions_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    Journal(path, resume=True, setup={"torch": "1"})
    with pytest.raises(HotloopError, match="--fresh"):
        Journal(path, resume=True, setup={"torch": "2"})


def test_a_bench_that_asks_for_other_peers_does_not_go_on_in_silence(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    asked = ["W4", "--full", "--journal", str(path)]
    bench.opened(bench.parsed([*asked, "--peers", "lightning"]))
    bench.opened(bench.parsed([*asked, "--peers", "tutorial,lightning"]))  # the same
    with pytest.raises(HotloopError) as error:
        bench.opened(bench.parsed([*asked, "--peers", "lightning,skorch"]))
    assert "peers=['tutorial', 'lightning']" in str(error.value)
    assert "processor" not in str(error.value)
    with pytest.raises(HotloopError, match="rounds=24"):
        bench.opened(bench.parsed([*asked, "--peers", "lightning", "--rounds", "3"]))


def measured(names: list[str], journal: Journal, together: int, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The groups in which a session of such lanes is measured, with memory for so many."""
    seen: list[list[str]] = []

    def in_turns_(group: list[str], begin: object, session: Session, *_: object) -> dict[str, Marked]:
        seen.append(group)
        return {name: Marked() for name in group}

    monkeypatch.setattr(bench_sessions, "in_turns", in_turns_)
    monkeypatch.setattr(type(WORKLOADS["W4"]), "together", lambda self, free: together)
    made = Bench([WORKLOADS["W4"]], [Lane(name, name) for name in names], journal, lambda line: None)
    bench_sessions.sessions(made, rounds=4, count=1, seconds=None, share=1.0)
    return seen


def test_no_peer_is_lost_where_a_session_goes_on_with_more_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [TUTORIAL, OURS, "a", "b", "c"]
    journal = Journal(tmp_path / "journal.jsonl", resume=True)
    assert measured(names, journal, 3, monkeypatch) == [[TUTORIAL, OURS, "a"], [OURS, "b", "c"]]
    stopped = Journal(tmp_path / "stopped.jsonl", resume=True)
    stopped.add(journal.rows[0])
    assert measured(names, stopped, 9, monkeypatch) == [[OURS, "b", "c"]]
    assert measured(names, stopped, 9, monkeypatch) == []
    assert [row["group"] for row in stopped.rows] == [0, 1]


def searched(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    *,
    lane: str | Lane = "auto",
    seconds: float | None = None,
) -> tuple[Bench, list[tuple[str, int, object]]]:
    """A bench of W4 with the tutorial's loop and a lane that searches, whose process is of that kind; with the epochs and
    options of each process that was begun."""
    begun_with: list[tuple[str, int, object]] = []

    def command(module: str, workload: str, options: object, epochs: int, device: str) -> list[str]:
        begun_with.append((module, epochs, options))
        alone = kind if module == "with_hotloop" and sum(one == module for one, *_ in begun_with) == 1 else "plain"
        return [sys.executable, "-c", PEER, workload, alone]

    monkeypatch.setattr(bench_sessions, "HOME", tmp_path)
    monkeypatch.setattr(bench_sessions, "samples", lambda data: 60_000)
    monkeypatch.setattr(bench_sessions, "command", command)
    monkeypatch.setattr("bench.speed.searching.LONGEST_S", 4.0)
    journal = Journal(tmp_path / "journal.jsonl", resume=True, fresh=True)
    made = Bench(
        [WORKLOADS["W4"]],
        [Lane(TUTORIAL, "tutorial"), lane if isinstance(lane, Lane) else ours(lane)],
        journal,
        lambda line: None,
    )
    bench_sessions.sessions(made, rounds=3, count=1, seconds=seconds, share=0.2)
    return made, begun_with


def test_a_search_fills_the_cache_that_is_measured_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, begun_with = searched(tmp_path, monkeypatch, "plain")
    long = math.ceil(bench_sessions.STEPS * 64 / 60_000)
    ours_ = ("with_hotloop", long, ("auto",))
    assert begun_with == [ours_, ("tutorial", long, ()), ours_]
    one = made.journal.rows[0]["lanes"][OURS]
    assert one["windows"] and one["cache"] == "warm" and one["first_start"]["cache"] == "cold"
    assert one["first_start"]["peak_bytes"] > 1 << 20
    found = summary(made.journal.rows, {}, {}, OURS).line("W4", OURS)
    assert found is not None and found.startup_s.keys() == {"cold", "warm"}
    again = Bench(made.workloads, made.lanes, Journal(tmp_path / "other.jsonl", resume=True), lambda line: None)
    bench_sessions.searches(again)
    assert len(begun_with) == 3  # it's there


def test_a_search_that_is_cut_off_leaves_a_measurement_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, begun_with = searched(tmp_path, monkeypatch, "never")
    long = math.ceil(bench_sessions.STEPS * 64 / 60_000)  # with few epochs it would end before the bench does
    assert begun_with[-1] == ("with_hotloop", long, UNSEARCHED)
    one = made.journal.rows[0]["lanes"][OURS]
    assert one["windows"] and "first step within 4 s" in one["unsearched"]
    text = markdown(summary(made.journal.rows, {}, {}, OURS))
    assert "hotloop runs what `auto` takes without a search: its search came to nothing" in text


def test_who_cannot_go_without_a_search_is_left_out_where_there_is_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, begun_with = searched(tmp_path, monkeypatch, "plain", lane="tune", seconds=40)
    assert [module for module, *_ in begun_with] == ["tutorial"]
    assert "left to --search" in made.journal.rows[0]["lanes"][OURS]["failure"]


def test_who_compiles_in_seconds_is_measured_with_a_cold_cache_where_there_is_no_time_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jax = next(peer for peer in PEERS if peer.name == "jax-scan")
    made, begun_with = searched(tmp_path, monkeypatch, "plain", lane=replace(jax, needs=()), seconds=26)
    assert [module for module, *_ in begun_with] == ["tutorial", "with_jax"]
    one = made.journal.rows[0]["lanes"]["jax-scan"]
    assert one["windows"] and one["cache"] == "cold" and not one["unsearched"] and not one["failure"]
    made, begun_with = searched(tmp_path, monkeypatch, "plain", lane=replace(jax, needs=()))
    assert [module for module, *_ in begun_with] == ["with_jax", "tutorial", "with_jax"]
    assert made.journal.rows[-1]["lanes"]["jax-scan"]["cache"] == "warm"


def test_whole_runs_go_on_where_they_were_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun_runs = []

    def command(module: str, workload: str, options: object, epochs: int, device: str) -> list[str]:
        begun_runs.append(module)
        return [sys.executable, "-c", PEER, workload, "plain", "--epochs", str(epochs)]

    monkeypatch.setattr("bench.speed.whole.command", command)
    journal = Journal(tmp_path / "journal.jsonl", resume=True)
    peers = [Lane(TUTORIAL, "tutorial"), *(Lane(f"hotloop auto, {state}", "ours") for state in ("cold", "warm"))]
    key = {"kind": "whole", "workload": "W4", "lane": TUTORIAL, "round": 0}
    journal.add(key, epochs=3, **asdict(Marked(total_s=1.0, startup_s=0.5, test_accuracy=0.9)))
    whole_runs(WORKLOADS["W4"], peers, 1.0, 1, tmp_path, journal, lambda line: None)
    assert begun_runs == ["ours", "ours"]  # the cold run fills the cache of the warm one
    assert [one["lane"] for one in journal.rows] == [TUTORIAL, "hotloop auto, cold", "hotloop auto, warm"]
    assert journal.rows[2]["total_s"] > 0 and journal.rows[2]["test_accuracy"] == 0.9
    assert "hotloop auto, warm" in whole_table(journal.rows)


def test_whole_runs_of_all_who_compile_are_cold_and_warm() -> None:
    jax, tutorial = (next(peer for peer in PEERS if peer.name == name) for name in ("jax-scan", TUTORIAL))
    names = [lane.name for lane in lanes_of([tutorial, jax], ["auto"])]
    assert names == [TUTORIAL, "jax-scan, cold", "jax-scan, warm", "hotloop auto, cold", "hotloop auto, warm"]


def test_whole_runs_are_held_against_their_targets() -> None:
    def run(lane: str, seconds: float) -> dict:
        return {"workload": "W4", "lane": lane, "round": 0, "epochs": 3, **asdict(Marked(total_s=seconds))}

    found = [run(TUTORIAL, 120.0), run("hotloop auto, cold", 100.0), run("hotloop auto, warm", 40.0)]
    verdicts = {one.where: one.verdict for one in whole_targets(found, "cpu")}
    assert verdicts["W4, whole run over tutorial, hotloop auto, cold"] == "missed by 20%"
    assert verdicts["W4, whole run over tutorial, hotloop auto, warm"] == "met"


def test_jax_finds_again_what_it_compiled_into_its_cache(tmp_path: Path) -> None:
    pytest.importorskip("jax", reason="needs jax (the bench extra)")
    script = "import jax; jax.jit(lambda x: x * 2)(jax.numpy.ones(3))"
    environment = {**os.environ, **caches(tmp_path)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
    assert any((tmp_path / "jax").iterdir())


def test_whole_runs_that_failed_are_named_and_the_others_shown() -> None:
    def run(lane: str, number: int, **marked: object) -> dict:
        done = {"startup_s": 2.0, "total_s": 10.0, "test_accuracy": 0.9, **marked}
        return {"workload": "W4", "lane": lane, "round": number, "epochs": 3, **asdict(Marked(**done))}

    broken = {"startup_s": None, "total_s": None, "test_accuracy": None, "failure": "out of luck"}
    found = [run(lane, 0, total_s=seconds) for lane, seconds in ((TUTORIAL, 10.0), ("cold", 5.0))]
    found += [run(TUTORIAL, 1), run("cold", 1, **broken), run("never", 0, **broken)]
    text = whole_table(found)
    assert "| cold | 5.0 s | 2.00 (1 pairs) | 2.0 s | 0.9000 |  |" in text and "| never |  |  |  |  |  |" in text
    assert "- **failed**: cold, run 1: out of luck" in text


def test_products_of_an_lstm_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and twice as much backward: gates of a letter's 64 and the state's 256 numbers, and the letter that follows."""
    lay_down("text-64", tmp_path)
    monkeypatch.setattr("bench.speed.data.load", lambda kind: load(kind, tmp_path))
    letters = work_of(WORKLOADS["W8"]).flops / (3 * 2 * 64 * 64 * (4 * 256 * (64 + 256) + 256 * len(ALPHABET)))
    assert letters == pytest.approx(1, abs=0.02)


def test_data_are_laid_down_once_and_read_back(tmp_path: Path) -> None:
    lay_down("text-64", tmp_path)
    first = load("text-64", tmp_path)
    (tmp_path / "data" / "text-64" / "x.npy").touch()
    assert first.x.shape == first.y.shape and (first.x[:, 1:] == first.y[:, :-1]).all()
    images = Data(
        np.arange(256, dtype=np.uint8).reshape(1, 16, 16), np.zeros(1), np.zeros((1, 16, 16), np.uint8), np.zeros(1)
    )
    prepared = images.prepared().x
    assert prepared.shape == (1, 1, 16, 16) and abs(prepared.mean()) < 1e-6 and abs(prepared.std() - 1) < 1e-6


def test_each_workload_names_who_cannot_run_it() -> None:
    jax = next(peer for peer in PEERS if peer.name == "jax-scan")
    skorch = next(peer for peer in PEERS if peer.name == "skorch")
    assert skorch.missing(WORKLOADS["W6"], short=True) and not skorch.missing(WORKLOADS["W6"])
    assert jax.missing(WORKLOADS["W6"]) and not jax.missing(WORKLOADS["W1"])
    assert WORKLOADS["W9"].together(17e9) == 4 and WORKLOADS["W9"].together(1e9) == 2
    small = [workload for workload in WORKLOADS.values() if workload.grey]
    needs_s = sum(one.budget_s for one in WORKLOADS.values()) + sum(one.search_s for one in small)
    assert needs_s <= bench.MOST_S == 28 * 60


def timing(name: str, plan: dict, ratio: float | None, width: float = 0.1) -> dict:
    bounds = {"ratio_low": None, "ratio_high": None}
    if ratio is not None:
        bounds = {"ratio_low": ratio - width, "ratio_high": ratio + width}
    figures = {
        "name": name,
        "windows": 5 if ratio is None else 12,
        "plan": plan,
        "step_ms": 1.0,
        "run_s": 75.0,
        "ratio": ratio,
        "verdict": "slower",
        "parity": None,
    }
    return {**figures, **bounds, "failure": None}


def stranger(model: str, rules: float, found: float | None) -> dict:
    """A network with what a race found of the rules' plan, and of what `tune` found, if that isn't the baseline."""
    plans = [timing("baseline", {}, 1.0), timing("auto", {"optimizer": "fused"}, rules)]
    plans += [] if found is None else [timing("threads=1", {"threads": 1}, found)]
    searched = [timing("baseline", {}, 1.0), timing("threads=1", {"threads": 1}, found), timing("lost", {}, 0.7)]
    winner = "baseline" if found is None else "threads=1"
    return {
        "model": model,
        "plan": winner,
        "verdict": {"baseline": "baseline", "plans": plans},
        "searched": {"baseline": "baseline", "winner": winner, "plans": searched},
    }


def test_the_gain_on_strangers_counts_kept_baselines_as_one() -> None:
    measured = [stranger("bert", 0.5, 4.0), stranger("vit", 2.0, None)]
    value, low, high = auto_models.geometric_mean(measured, auto_models.FOUND)
    assert value == pytest.approx(2) and low < value < high
    text = auto_models.markdown([*measured, {"model": "t5", "failure": "it broke"}])
    assert "vit, lost: 0.70" in text and "t5: it broke" in text and "1m15s" in text
    assert auto_models.slower(measured) == ["bert (auto)"]


@pytest.mark.parametrize("plan", [{}, {"optimizer": "fused"}], ids=["while it was lowered", "after"])
def test_an_auto_that_fails_is_no_kept_baseline(plan: dict) -> None:
    row = stranger("bert", 2.0, None)
    failed = timing("auto", plan, None) | {"failure": "no such kernel", "step_ms": None, "run_s": None}
    row["verdict"]["plans"][1] = failed
    assert math.isnan(auto_models.gain(row, auto_models.RULES)[0])
    assert auto_models.failures([row]) == ["bert (auto): no such kernel"]
    assert auto_models.failures([stranger("vit", 2.0, None)]) == []
    text = auto_models.markdown([row])
    assert "failed" in text and "no such kernel" in text


def unknown(model: str) -> dict:
    """A network whose last race had too few pairs for an interval."""
    row = stranger(model, 2.0, None)
    row["verdict"]["plans"][1] |= {"ratio_low": None, "ratio_high": None, "windows": 5}
    return row


def test_a_plan_with_too_few_pairs_is_named_and_counted() -> None:
    measured = [stranger("vit", 2.0, None), unknown("bert")]
    assert auto_models.unmeasured(measured) == ["bert (auto): not measured, 5 pairs"]
    text = auto_models.markdown(measured)
    assert "- bert (auto): not measured, 5 pairs" in text and ", 1 of 2 |" in text and ", 2 of 2 |" in text


def test_strangers_are_searched_and_raced_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    timing_ = SimpleNamespace(plan={}, failure=None, ratio_low=1.0)
    verdict = SimpleNamespace(winner=None, baseline="b", plan=lambda name: timing_, plans=[timing_], model_dump=dict)
    monkeypatch.setattr("hotloop.tune", lambda task, *, device, **_: asked.append(device) or verdict)
    monkeypatch.setattr("hotloop.race", lambda task, rivals, *, devices, **_: asked.append(devices) or verdict)
    auto_models.searched("bert", 1.0)
    auto_models.raced("bert", 1.0, Plan())
    assert asked == ["cpu", ["cpu"]]


def test_a_race_of_strangers_finds_nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the search before it nor of a shorter race."""
    about: dict[str, Any] = dict(task="bert", fingerprint="", steps=None, machine="", versions={}, seconds=1.0)
    alone = Verdict(
        plans=[Timing(name="baseline", plan=Plan().model_dump())], baseline="baseline", winner=None, **about
    )
    kept: list[list[Path]] = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        if command[-1]:
            kept.append([Path(env[name]) for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TMPDIR")])
            assert not [path for place in kept[-1] for path in place.rglob("*") if path.is_file()]
        return SimpleNamespace(stdout=json.dumps(alone.model_dump()))

    monkeypatch.setattr("subprocess.run", run)
    monkeypatch.setattr(auto_models, "until_measured", lambda race, seconds, until: [race(seconds), race(seconds)][1])
    assert auto_models.searched_and_raced("bert", 1.0)["plan"] == "baseline"
    assert len({path for places in kept for path in places}) == 6
    assert not any(path.exists() for places in kept for path in places)


def test_a_race_gets_more_time_until_there_are_pairs_enough() -> None:
    tried: list[float] = []

    def race(seconds: float) -> Any:
        tried.append(seconds)
        low, pairs = (1.0, 8) if len(tried) == 3 else (None, len(tried))
        return SimpleNamespace(plans=[SimpleNamespace(failure=None, ratio_low=low, windows=pairs)])

    auto_models.until_measured(race, 10, time.monotonic() + 600)
    assert tried == [10, 100, 500]  # after one pair, and after two
    tried.clear()
    auto_models.until_measured(race, 10, time.monotonic() - 1)
    assert tried == [10]


KINDS = {"fails": {"failure": "it broke"}, "too few": unknown("bert"), "fine": stranger("bert", 2.0, None)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_bench_of_strangers_fails_where_one_does_and_tries_it_again(kind: str, tmp_path: Path, monkeypatch) -> None:
    given = [{key: value for key, value in KINDS[each].items() if key != "model"} for each in (kind, "fine")]
    monkeypatch.setattr(auto_models, "searched_and_raced", lambda name, seconds: given.pop(0))
    monkeypatch.setattr("sys.argv", ["auto_models", "bert", "--journal", str(tmp_path / "journal.jsonl")])
    assert auto_models.main() == (kind != "fine")
    assert auto_models.main() == 0
    assert len(given) == (kind == "fine")
