"""Stored predictions: measured by later runs, scored, and used to correct later predictions."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hotloop.advisor.ledger import (
    correction,
    ledger_folder,
    load_predictions,
    measure_prediction,
    prediction_key,
    store_prediction,
)
from hotloop.core.records.advice import Correction, Score
from hotloop.plan import Plan

CHIP = "RTX 4090"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def key(name: str = "t", size: int = 8, plan: Plan | None = None) -> dict:
    return prediction_key(name, size, None, plan or Plan())


def store(name: str = "t", ms: float = 1.0) -> None:
    store_prediction(key(name), CHIP, (ms, 0.7 * ms, 1.4 * ms), (ms, 0.7 * ms, 1.4 * ms))


def test_a_later_run_states_both_figures() -> None:
    store(ms=1.1)
    line = measure_prediction(key(), CHIP, 1.24)
    assert line == "predicted 1.1 ms a step (0.77 to 1.54), measured 1.24"


@pytest.mark.parametrize(
    "other",
    [
        (key("another"), CHIP),
        (key(size=16), CHIP),
        (key(plan=Plan(compile="step")), CHIP),
        (key(plan=Plan(precision="bf16")), CHIP),
        (key(), "H100 SXM5 80GB"),
    ],
    ids=["Task", "batch", "compiled", "precision", "chip"],
)
def test_another_task_plan_or_chip_has_no_prediction(other) -> None:
    store()
    assert measure_prediction(*other, 1.0) is None


def test_other_axes_of_the_plan_have_the_same_prediction() -> None:
    store()
    assert measure_prediction(key(plan=Plan(optimizer="fused", threads=1, precision="fp32")), CHIP, 1.0)


def test_a_planted_wrong_prediction_is_corrected() -> None:
    factors = [1.0]
    for number in range(3):
        store(f"t{number}", ms=1.0)
        measure_prediction(key(f"t{number}"), CHIP, 3.0)
        factors.append(correction(load_predictions()[0], CHIP).factor)
    assert factors == sorted(factors) and factors[1] > 1.5 and 2.4 < factors[-1] < 3.0
    assert correction(load_predictions()[0], "Tesla T4") == Correction()


def test_a_corrected_interval_narrows_with_measurements() -> None:
    spreads = []
    for number in range(4):
        store(f"t{number}")
        measure_prediction(key(f"t{number}"), CHIP, 1.1)
        spreads.append(correction(load_predictions()[0], CHIP).spread)
    assert spreads == sorted(spreads, reverse=True) and math.isfinite(spreads[0])


def test_a_measured_prediction_stays_for_the_score() -> None:
    store(ms=1.0)
    measure_prediction(key(), CHIP, 2.0)
    store(ms=2.0)
    store(ms=1.9)  # replaces the prediction that no run has measured
    found = Score.from_predictions(load_predictions()[0])
    assert len(found.predictions) == 2 and found.measured == 1
    assert found.median_error == 0.5 and found.coverage == 0.0
    measure_prediction(key(), CHIP, 2.0)
    found = Score.from_predictions(load_predictions()[0])
    assert found.measured == 2 and found.coverage == 0.5


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 1}', "\x00"])
def test_a_damaged_file_is_one_line(content: str) -> None:
    store("a")
    store("b")
    damaged = next(ledger_folder().glob("*.json"))
    damaged.write_text(content)
    found, notes = load_predictions()
    assert len(found) == 1 and len(notes) == 1 and str(damaged) in notes[0] and "\n" not in notes[0][:-1]


def test_a_file_under_another_name_does_not_count() -> None:
    store()
    path = next(ledger_folder().glob("*.json"))
    path.rename(path.with_name("0123456789abcdef-0.json"))
    found, notes = load_predictions()
    assert found == [] and len(notes) == 1
