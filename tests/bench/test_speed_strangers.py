"""The bench of strangers: plans for networks that no rule was made with."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import auto_models
from hotloop.core.records.race import Timing, Verdict
from hotloop.plan import Plan
from hotloop.tuning.contenders import RaceSpec


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
    assert auto_models.slower(measured) == ["bert (auto): slower than the baseline"]


def start_that_is_not_won_back(model: str, rules: float = 2.0) -> dict:
    row = stranger(model, rules, None)
    row["verdict"]["plans"][1]["run_s"] = 80.0
    return row


def test_a_run_that_auto_makes_longer_is_named_though_its_steps_are_faster() -> None:
    measured = [stranger("vit", 2.0, None), start_that_is_not_won_back("bert")]
    told = "bert (auto): a run of 1m20s, and of 1m15s under the baseline"
    assert auto_models.longer(measured) == [told] and not auto_models.slower(measured)
    assert f"- {told}" in auto_models.markdown(measured)


def test_the_same_steps_timed_twice_are_no_longer_run() -> None:
    kept = start_that_is_not_won_back("bert")
    kept["verdict"]["plans"][1] |= {"plan": {}, "run_s": 76.0}
    assert auto_models.longer([kept]) == []
    kept["verdict"]["plans"][1]["run_s"] = 80.0  # it looked long for a plan that isn't there
    assert auto_models.longer([kept]) == ["bert (auto): a run of 1m20s, and of 1m15s under the baseline"]


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


ABOUT: dict[str, Any] = dict(task="bert", fingerprint="", steps=None, machine="", versions={}, seconds=1.0)
ALONE = Verdict(plans=[Timing(name="baseline", plan=Plan().model_dump())], baseline="baseline", winner=None, **ABOUT)


def test_strangers_are_searched_and_raced_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def race(loaded: object, contest: RaceSpec, *, say: Callable[[str], None], **_: Any) -> Verdict:
        asked.append(contest.devices)
        say("auto goes on eagerly: it's short")
        return ALONE

    monkeypatch.setattr("hotloop.tune", lambda task, *, device, **_: asked.append(device))
    monkeypatch.setattr("hotloop.tuning.race.race_loaded", race)
    auto_models.searched("bert", 1.0)
    assert auto_models.raced("bert", 1.0, Plan()).notes == ["auto goes on eagerly: it's short"]
    assert asked == ["cpu", ["cpu"]]


def test_without_a_search_the_table_is_of_auto_alone_and_says_why_it_left_plans_out(monkeypatch) -> None:
    calls: list[Plan | None] = []

    def alone(name: str, seconds: float, limit_s: float, plan: Plan | None = None, environment: Any = None) -> Verdict:
        calls.append(plan)
        auto = Timing(name="auto", plan=Plan().model_dump(), step_ms=1.0)
        return ALONE.model_copy(update={"plans": [*ALONE.plans, auto]})

    monkeypatch.setattr(auto_models, "in_own_process", alone)
    monkeypatch.setattr(auto_models, "until_measured", lambda race, seconds, until: race(seconds))
    assert auto_models.searched_and_raced("bert", 1.0, search=False)["searched"] is None
    assert calls == [Plan()]
    row = stranger("vit", 2.0, None) | {"searched": None}
    row["verdict"]["notes"] = ["auto leaves out compile=package: it's 0.92 times as fast", "the machine was busy"]
    text = auto_models.markdown([row])
    assert "found by tune" not in text and "busy" not in text
    assert "- vit, auto leaves out compile=package: it's 0.92 times as fast" in text


def test_a_race_of_strangers_finds_nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of the search before it nor of a shorter race."""
    kept: list[list[Path]] = []

    def run(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        if command[-1]:
            kept.append([Path(env[name]) for name in ("XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TMPDIR")])
            assert not [path for place in kept[-1] for path in place.rglob("*") if path.is_file()]
        return SimpleNamespace(stdout=json.dumps(ALONE.model_dump()))

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


def test_the_bench_of_strangers_fails_where_a_run_takes_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {key: value for key, value in start_that_is_not_won_back("bert").items() if key != "model"}
    monkeypatch.setattr(auto_models, "searched_and_raced", lambda name, seconds, search: row)
    monkeypatch.setattr("sys.argv", ["auto_models", "bert", "--journal", str(tmp_path / "journal.jsonl")])
    assert auto_models.main() == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_bench_of_strangers_fails_where_one_does_and_tries_it_again(kind: str, tmp_path: Path, monkeypatch) -> None:
    given = [{key: value for key, value in KINDS[each].items() if key != "model"} for each in (kind, "fine")]
    monkeypatch.setattr(auto_models, "searched_and_raced", lambda name, seconds, search: given.pop(0))
    monkeypatch.setattr("sys.argv", ["auto_models", "bert", "--journal", str(tmp_path / "journal.jsonl")])
    assert auto_models.main() == (kind != "fine")
    assert auto_models.main() == 0
    assert len(given) == (kind == "fine")
