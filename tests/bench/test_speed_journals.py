"""The bench against peers: caches, journals and searches."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.speed import __main__ as bench
from bench.speed import caching
from bench.speed import sessions as bench_sessions
from bench.speed.caching import Filled, caches, filled, note_filled, own_cache, state
from bench.speed.data import ALPHABET, Data, lay_down, load
from bench.speed.journal import Journal
from bench.speed.lanes import OURS, PEERS, TUTORIAL, UNSEARCHED, Lane, ours
from bench.speed.limits import work_of
from bench.speed.running import Marked
from bench.speed.sessions import Bench
from bench.speed.summary import summary
from bench.speed.table import markdown
from bench.speed.turns import Session
from bench.speed.workloads import WORKLOADS
from hotloop.errors import HotloopError
from tests.support.bench.fake_peers import PEER, row


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
    lane: str | Lane = "tune",
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


@pytest.mark.more
def test_a_search_fills_the_cache_that_is_measured_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, begun_with = searched(tmp_path, monkeypatch, "plain")
    long = math.ceil(bench_sessions.STEPS * 64 / 60_000)
    ours_ = ("with_hotloop", long, ("tune",))
    assert begun_with == [ours_, ("tutorial", long, ()), ours_]
    one = made.journal.rows[0]["lanes"][OURS]
    assert one["windows"] and one["cache"] == "warm" and one["first_start"]["cache"] == "cold"
    assert one["first_start"]["peak_bytes"] > 1 << 20
    found = summary(made.journal.rows, {}, {}, OURS).line("W4", OURS)
    assert found is not None and found.startup_s.keys() == {"cold", "warm"}
    again = Bench(made.workloads, made.lanes, Journal(tmp_path / "other.jsonl", resume=True), lambda line: None)
    bench_sessions.searches(again)
    assert len(begun_with) == 3  # it's there


@pytest.mark.more
def test_a_search_that_is_cut_off_leaves_a_measurement_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, begun_with = searched(tmp_path, monkeypatch, "never")
    long = math.ceil(bench_sessions.STEPS * 64 / 60_000)  # with few epochs it would end before the bench does
    assert begun_with[-1] == ("with_hotloop", long, UNSEARCHED)
    one = made.journal.rows[0]["lanes"][OURS]
    assert one["windows"] and "first step within 4 s" in one["unsearched"]
    text = markdown(summary(made.journal.rows, {}, {}, OURS))
    assert "hotloop runs the plan of the rules, without a search: its search came to nothing" in text


@pytest.mark.more
def test_who_cannot_go_without_a_search_is_left_out_where_there_is_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, begun_with = searched(tmp_path, monkeypatch, "plain", lane="tune,precision=bf16", seconds=40)
    assert [module for module, *_ in begun_with] == ["tutorial"]
    assert "left to --search" in made.journal.rows[0]["lanes"][OURS]["failure"]


@pytest.mark.more
def test_who_compiles_in_seconds_is_measured_with_a_cold_cache_where_there_is_no_time_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jax = next(peer for peer in PEERS if peer.name == "jax-scan")
    made, begun_with = searched(tmp_path, monkeypatch, "plain", lane=replace(jax, needs=()), seconds=26)
    assert [module for module, *_ in begun_with] == ["tutorial", "with_jax"]
    one = made.journal.rows[0]["lanes"]["jax-scan"]
    assert one["windows"] and one["cache"] == "cold" and not one["unsearched"] and not one["failure"]


@pytest.mark.more
def test_and_with_a_warm_one_where_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jax = next(peer for peer in PEERS if peer.name == "jax-scan")
    made, begun_with = searched(tmp_path, monkeypatch, "plain", lane=replace(jax, needs=()))
    assert [module for module, *_ in begun_with] == ["with_jax", "tutorial", "with_jax"]
    assert made.journal.rows[-1]["lanes"]["jax-scan"]["cache"] == "warm"


def test_jax_finds_again_what_it_compiled_into_its_cache(tmp_path: Path) -> None:
    pytest.importorskip("jax", reason="needs jax (the bench extra)")
    script = "import jax; jax.jit(lambda x: x * 2)(jax.numpy.ones(3))"
    environment = {**os.environ, **caches(tmp_path)}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)
    assert any((tmp_path / "jax").iterdir())


@pytest.mark.more
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
