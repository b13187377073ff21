"""The summary of `hotloop run` says what was exchanged, in few lines."""

from __future__ import annotations

from typing import Any

from hotloop.core.records.race import ExchangedPart, ScriptRun, SpeedRatio
from hotloop.report.script_run_page import script_run_page


def part(name: str, *, speed: float = 2.0, reason: str = "") -> ExchangedPart:
    ratio = SpeedRatio(median=speed, low=speed, high=speed, pairs=12)
    return ExchangedPart(kind="optimizer", name=name, exchange="fused", used=not reason, ratio=ratio, reason=reason)


def page(parts: list[ExchangedPart], notes: list[str] | None = None, **fields: Any) -> list[str]:
    run = ScriptRun(source="train.py", exit_code=0, **{"seconds": 1.0} | fields, parts=parts, notes=notes or [])
    return script_run_page(run).splitlines()


def test_equal_parts_are_one_line() -> None:
    folds = [part("Adam", speed=2.0 + fold) for fold in range(5)]
    slow = [part("SGD", reason=f"not faster: 0.9{fold} times the speed") for fold in range(3)]
    lines = page([*folds, part("AdamW"), *slow, part("SGD", reason="another reason")], ["a note", "a note"])[1:]
    assert [line.partition(":")[0].strip() for line in lines].count("exchanged optimizer") == 2
    assert len(lines) == 5 and lines[0].startswith("  exchanged optimizer: Adam: fused, 2.00 times as fast")
    assert lines[0].endswith("; 4 more alike") and lines[2].endswith("; 2 more alike")
    assert lines[1].endswith("without a proof") and lines[3].endswith("another reason") and lines[4] == "  a note"


def test_an_exchange_that_was_taken_back_is_no_run_as_under_python() -> None:
    off = part("Adam", reason="its results are wrong")
    assert page([off])[0].endswith("ran as under python")
    assert (
        page([off], ["Adam: the exchange fused was taken back"])[0]
        == "hotloop: no exchange was in use at the script's end"
    )


def test_a_run_without_exchanges_is_one_line() -> None:
    reasons = [part(f"network {number}", reason="not faster") for number in range(8)]
    assert page(reasons) == ["hotloop: nothing was exchanged, and the script ran as under python"]


def test_a_race_that_changed_bits_is_named() -> None:
    option = ExchangedPart(kind="process", name="numbers below 1.2e-38", exchange="flushed to zero", used=False)
    raced = option.model_copy(update={"pairs": 5, "proof": "fp32-equivalent", "reason": "the script ended"})
    lines = page([raced, part("Adam", reason="not faster")])
    assert "ran as under python" not in lines[0] and "within rounding" in lines[0]
    assert lines[1:] == ["  not exchanged process: numbers below 1.2e-38: the script ended"]
    assert "ran as under python" in page([raced.model_copy(update={"proof": "bitwise"})])[0]
    assert "ran as under python" in page([raced.model_copy(update={"pairs": 0})])[0]


def test_a_slower_run_is_said_to_be_slower() -> None:
    off, on = part("Adam", reason="not faster"), part("Adam")
    lost = page([off], seconds=40.0, own_work_s=2.1)
    assert lost[0].endswith("; the run took about 2.1 s longer: too short for what was tried")
    stored = page([off], seconds=40.0, own_work_s=2.1, is_stored=True)
    assert stored[0].endswith("too short for what was tried; the next run starts without it")
    ratio = SpeedRatio(median=1.2, low=1.1, high=1.3, pairs=12)
    used = page([on], seconds=40.0, own_work_s=2.1, gained_s=0.6, ratio=ratio, is_stored=True)
    assert used[0].endswith(
        "took about 1.5 s longer: too short for what was tried; the next run starts with the exchanges"
    )
    assert "longer" not in page([on], seconds=40.0, own_work_s=2.1, gained_s=3.0, ratio=ratio)[0]
    assert "longer" not in page([off], seconds=40.0, own_work_s=0.3)[0]
    assert "longer" not in page([on], seconds=40.0, own_work_s=2.1)[0], "the gain is unknown"


def test_a_busy_machine_is_one_line() -> None:
    busy = part("Adam").model_copy(update={"was_busy": True, "ratio": SpeedRatio(median=2.0, pairs=12)})
    lines = page([busy, busy.model_copy(update={"name": "SGD"})])
    assert lines[-1] == "  the machine was busy in 2 races: not sure, and not stored for the next run"
