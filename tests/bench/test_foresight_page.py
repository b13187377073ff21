"""The README of the record of predictions."""

from __future__ import annotations

import pytest

from bench.foresight.claim_page import page

MACHINE = {"processor": {"model": "a CPU", "allowed_cores": 2}}
VERSIONS = {"python": "3.11", "torch": "2.13", "hotloop": "0.1"}


def record(error: float) -> dict:
    row = {
        "set": "mpt", "name": "MPT", "fitted_on": "other sizes", "runs": 3, "statistic": "mean", "error": error, "must": 0.09,
        "coverage": 0.9, "base": "none", "within_20": 1.0, "taken": "2026-01-01T10:00:00+00:00", "commit": None,
    }  # fmt: skip
    everything = {name: value for name, value in row.items() if name != "set"}
    return {"command": "c", "threads": "t", "machine": MACHINE, "versions": VERSIONS, "results": [row, everything]}


@pytest.mark.parametrize(("error", "goal"), [(0.0912, "9%, missed"), (0.09, "9%")])
def test_a_missed_goal_is_stated(error: float, goal: str) -> None:
    assert f"| MPT | 3 | mean {error:.2%} | {goal} | 90% |" in page(record(error))


def test_sets_without_a_row_are_stated() -> None:
    missing = page(record(0.05)).split("## Not in this record")[1]
    assert "- `cpu`:" in missing and "- `memory`:" in missing and "- `mpt`:" not in missing


def test_a_row_without_intervals_has_no_coverage() -> None:
    without = record(0.05)
    without["results"][0]["coverage"] = None
    assert "| no interval |" in page(without)


def test_estimates_of_torch_are_stored_for_runs_of_the_record() -> None:
    from bench.foresight.__main__ import newest_record
    from bench.foresight.torch_estimator import stored_ms

    judged = {run[0] for run in newest_record()[1]["neusight_seen"]}
    assert len(stored_ms()) >= 5 and stored_ms().keys() <= judged
    assert all(1 < ms < 10_000 for ms in stored_ms().values())


def test_runs_on_several_gpus_are_predicted_by_the_advisor(monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.foresight import megatron, mosaic
    from bench.foresight.transformers import fused
    from hotloop.advisor.estimate import estimate
    from hotloop.advisor.parallel_ways import Split
    from hotloop.advisor.rates import shipped

    costs = fused(768, 12, 12, mosaic.VOCABULARY, 64, 1024)
    sharded = mosaic.Row("125m", "A100 SXM4 40GB", 16, 1024, 2, 2, 1.0, costs)
    split = Split(data=16, is_sharded=True, pieces=2)
    direct = estimate(costs, "A100 SXM4 40GB", "bf16", split=split, network=mosaic.NETWORK)
    assert mosaic.predicted_s(sharded, shipped()) == pytest.approx(direct.step_ms / 1e3)
    mixed = megatron.Row(8, 16, 2, 1024, 16, 24, 1024, 2, 2, 2, 1.0)
    calls = []
    monkeypatch.setattr(megatron, "estimate", lambda *given, **named: calls.append(named["split"]) or direct)
    values = dict(zip(megatron.NAMES, megatron.START, strict=True))
    assert megatron.predicted_s(mixed, shipped(), values) == direct.step_ms / 1e3
    assert calls == [Split(2, 2, 2, pieces=4)]


def test_a_row_that_was_judged_before_a_change_says_so() -> None:
    earlier, later = record(0.05), record(0.05)
    earlier["results"][0]["taken"], later["results"][0]["taken"] = "2026-11-28T10:00:00", "2026-11-28T12:00:00"
    assert "before the bench called `estimate`" in page(earlier)
    assert "before the bench called `estimate`" not in page(later)
