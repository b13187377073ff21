"""The summary of `hotloop run` says what was exchanged, in few lines."""

from __future__ import annotations

from hotloop.core.records.race import ExchangedPart, ScriptRun, SpeedRatio
from hotloop.report.script_run_page import script_run_page


def part(name: str, *, speed: float = 2.0, reason: str = "") -> ExchangedPart:
    ratio = SpeedRatio(median=speed, low=speed, high=speed, pairs=12)
    return ExchangedPart(kind="optimizer", name=name, exchange="fused", used=not reason, ratio=ratio, reason=reason)


def page(parts: list[ExchangedPart], notes: list[str] | None = None) -> list[str]:
    run = ScriptRun(source="train.py", exit_code=0, seconds=1.0, parts=parts, notes=notes or [])
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
