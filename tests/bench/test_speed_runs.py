"""The bench against peers: whole runs, with an empty cache and with what earlier runs have left there."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench.speed import whole as module
from bench.speed.journal import Journal
from bench.speed.lanes import PEERS, TUTORIAL, Lane
from bench.speed.running import Marked
from bench.speed.whole import lanes_of, whole_runs, whole_table, whole_targets
from bench.speed.workloads import WORKLOADS
from tests.support.bench.fake_peers import PEER

SAID = {
    "c": "tune: compile=package, 1.50 times as fast as the baseline",
    "r": "tune: compile=package, stored as the fastest that is proven equal",
    "x": "tune: nothing proven equal is faster",
}


def whole(path: Path, monkeypatch: pytest.MonkeyPatch, says: str, *, rounds: int = 1, plan: str = "tune") -> list[str]:
    """Lanes of whole runs in order, each of hotloop's with what it says."""

    def command(module: str, workload: str, options: object, epochs: int, device: str) -> list[str]:
        return [sys.executable, "-c", PEER, workload, "plain", "--epochs", str(epochs)]

    def run(script: Sequence[str], folder: Path, limit_s: float) -> Marked:
        marked = real(script, folder, limit_s)
        return replace(marked, said=[SAID[next(said)]] if "hotloop" in folder.name else [])

    real, said = module.run_once, iter(says)
    monkeypatch.setattr(module, "command", command)
    monkeypatch.setattr(module, "run_once", run)
    journal = Journal(path / "journal.jsonl", resume=True)
    key = {"kind": "whole", "workload": "W4", "lane": TUTORIAL, "round": 0}
    if not journal.has(key):
        journal.add(key, epochs=3, **asdict(Marked(total_s=1.0, startup_s=0.5, test_accuracy=0.9)))
    peers = [Lane(TUTORIAL, "tutorial"), *lanes_of([], [plan])]
    whole_runs(WORKLOADS["W4"], peers, 1.0, rounds, path, journal, lambda line: None)
    monkeypatch.undo()
    assert all(row["total_s"] > 0 and row["test_accuracy"] == 0.9 for row in journal.rows)
    assert all(row["lane"] in whole_table(journal.rows) for row in journal.rows)
    return [row["lane"].removeprefix(f"hotloop {plan}, ") for row in journal.rows]


def test_the_second_run_is_warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert whole(tmp_path, monkeypatch, "cr") == [TUTORIAL, "cold", "warm"]


def test_a_plan_that_is_named_is_warm_in_its_second_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert whole(tmp_path, monkeypatch, "xx", plan="compile=package") == [TUTORIAL, "cold", "warm"]


def test_whole_runs_of_a_round_are_the_other_way_about_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert whole(tmp_path, monkeypatch, "crcr", rounds=2) == [TUTORIAL, "cold", "warm", "cold", "warm", TUTORIAL]


def test_whole_runs_that_were_stopped_before_the_warm_one_begin_with_an_empty_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole(tmp_path, monkeypatch, "cr")
    path = tmp_path / "journal.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    (mark := next((tmp_path / "cache").rglob("tmp")) / "mark").touch()
    assert whole(tmp_path, monkeypatch, "cr") == [TUTORIAL, "cold", "cold", "warm"] and not mark.exists()
    assert whole(tmp_path, monkeypatch, "") == [TUTORIAL, "cold", "cold", "warm"]  # nothing is left to do


def test_whole_runs_that_failed_are_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole(tmp_path, monkeypatch, "cr")
    path = tmp_path / "journal.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()[:-1]]
    rows[-1] |= {"failure": "out of luck"}
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert whole(tmp_path, monkeypatch, "") == [TUTORIAL, "cold"]


def test_whole_runs_of_all_who_compile_are_cold_and_warm() -> None:
    jax = next(peer for peer in PEERS if peer.name == "jax-scan")
    assert [name for name, _ in module._states(jax, Path("nowhere"), Marked)] == ["jax-scan, cold", "jax-scan, warm"]
    failed = module._states(jax, Path("nowhere"), lambda: Marked(failure="out of luck"))
    assert [name for name, _ in failed] == ["jax-scan, cold"]


def test_whole_runs_are_held_against_their_targets() -> None:
    def run(lane: str, seconds: float) -> dict:
        return {"workload": "W4", "lane": lane, "round": 0, "epochs": 3, **asdict(Marked(total_s=seconds))}

    found = [run(TUTORIAL, 120.0), run("hotloop tune, cold", 100.0), run("hotloop tune, warm", 40.0)]
    verdicts = {one.where: one.verdict for one in whole_targets(found, "cpu")}
    assert verdicts["W4, whole run over tutorial, hotloop tune, cold"] == "missed by 20%"
    assert verdicts["W4, whole run over tutorial, hotloop tune, warm"] == "met"
    assert len(verdicts) == 2  # there is no mean of one network
    everywhere = [row | {"workload": name} for name in ("W1", "W2", "W3", "W5") for row in found]
    everywhere += [run(TUTORIAL, 120.0), run("hotloop tune, cold", 10.0), run("hotloop tune, warm", 40.0)]
    means = {one.where: one.reached for one in whole_targets(everywhere, "cpu") if "mean" in one.where}
    assert means == {
        "W1 to W5, whole run, mean over tutorial, hotloop tune, cold": pytest.approx((1.2**4 * 12) ** 0.2),
        "W1 to W5, whole run, mean over tutorial, hotloop tune, warm": pytest.approx(3.0),
    }


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
