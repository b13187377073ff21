"""The bench against peers: ratios, tables, pictures and targets."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest

from bench.speed import __main__ as bench
from bench.speed.caching import Filled
from bench.speed.journal import Journal
from bench.speed.lanes import BASELINE, OURS, REDUCED, TUTORIAL
from bench.speed.picture import draw
from bench.speed.ratios import geometric_mean, ratio
from bench.speed.running import Marked
from bench.speed.summary import summary
from bench.speed.table import markdown, targets_table
from bench.speed.targets import targets
from bench.speed.whole import whole_table
from hotloop.tuning.races.statistics import Ratio
from tests.support.bench.fake_peers import lanes, row


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


@pytest.mark.parametrize(("own_s", "verdicts"), [(2e-3, ["missed by 50%"]), (5e-4, ["met"])])
def test_a_plan_that_is_slower_than_the_baseline_beside_it_misses_its_target(own_s: float, verdicts: list[str]) -> None:
    def judged(**others: float) -> list[str]:
        found = targets(summary([row("W1", tutorial=4e-3, hotloop=own_s, **others)], {}, {}, OURS), "cpu")
        return [one.verdict for one in found if "own baseline" in one.where]

    assert judged(**{BASELINE: 1e-3}) == verdicts
    assert judged() == []


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
    jax = {"jax-scan": 2e-3, "jax-step": 5e-3, "keras-jax": 3e-3}
    every = row("W4", tutorial=4e-3, hotloop=1e-3, **peers, **jax)
    verdict = {one.where: one for one in targets(summary([every], {}, {}, OURS), "cpu")}
    assert verdict["W4, step over the best peer (jax-scan)"].verdict == "met"
    for name in ("jax-scan", "torch.compile"):  # of JAX's two ways the faster may be the one that wasn't run
        del every["lanes"][name]
    (one,) = (one for one in targets(summary([every], {}, {}, OURS), "cpu") if "W4, step over the best" in one.where)
    assert one.verdict == "ahead of those that ran (not run: jax-scan, torch.compile)" and one.met is None
    every["lanes"][OURS] = lanes(hotloop=3e-3)[OURS]
    (one,) = (one for one in targets(summary([every], {}, {}, OURS), "cpu") if "W4, step over the best" in one.where)
    assert one.verdict == "missed by 17%"


@pytest.mark.parametrize(
    ("own", "verdict"),
    [
        ({}, "not measured: see --plans auto/tune,precision=bf16"),
        ({f"{OURS}:{REDUCED}": 2e-3}, "missed by 33%"),
        ({f"{OURS}:{REDUCED}": 4e-4}, "met"),
    ],
)
def test_what_may_take_fewer_bits_has_a_lane_and_a_target_of_its_own(own: dict[str, float], verdict: str) -> None:
    limits = {"W6": {"least_ms": 0.5, "least_bf16_ms": 0.25, "flops": 1e9, "bytes": 1e6, "data_bytes": 0}}
    found = summary([row("W6", tutorial=4e-3, hotloop=1e-3, **own)], limits, {}, OURS)
    on_gpu = {one.where: one.verdict for one in targets(found, "cuda")}
    assert on_gpu["W6, step over tutorial, bf16 allowed"] == verdict
    assert on_gpu["W6, step over tutorial, in default precision"] == "met"
    assert "It is no limit" not in markdown(found), "which is one in fp32"
    share = [f"reaches {2.5e-4 / step_s:.0%} of that" for step_s in own.values()]
    assert [text for text in share if f"in bf16 it allows 0.25 ms: {OURS}:{REDUCED} {text}" in markdown(found)] == share


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
    assert "the loss of lightning isn't" in text and "hotloop ran `compile=step`" in text
    assert "reaches 50% of it" in text and "no limit" not in text
    exceeded = markdown(summary(rows, {"W4": limits["W4"] | {"least_ms": 0.8}}, {}, OURS))
    assert "reaches 80% of it. It is no limit: faster were jax-scan in 0.5 ms" in exceeded
    # A run of two minutes: start-up, and the steps that the tutorial's loop does meanwhile.
    line = found.line("W4", OURS)
    assert line is not None and line.run_s == {"": pytest.approx(1 + 120 / 4)}


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
