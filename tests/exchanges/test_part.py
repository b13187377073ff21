"""A part is proven, then raced, then used; an exchange that an earlier run proved faster needs no race."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hotloop.exchanges import exchange_cache, races
from hotloop.exchanges import part as part_module
from hotloop.exchanges.exchange_cache import Decisions
from hotloop.exchanges.part import CallComparison, Part
from hotloop.tuning.races.statistics import Ratio
from tests.exchanges.conftest import set_clocks

EQUAL = CallComparison(True, 10)


class Calls:
    """Both forms of a part: calls advance a clock by the form's seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, original_s: float = 0.02, exchanged_s: float = 0.01) -> None:
        self.now, self.forms = 0.0, list[str]()
        self.seconds = {"original": original_s, "exchanged": exchanged_s}
        self.comparison = EQUAL
        set_clocks(monkeypatch, lambda: self.now)

    def form(self, name: str) -> Callable[[], str]:
        def call() -> str:
            self.now += self.seconds[name]
            self.forms.append(name)
            return name

        return call

    def compare(self) -> tuple[Any, CallComparison]:
        self.forms.append("compared")
        return "original", self.comparison

    def make(self, part: Part, count: int, *, enabled: bool = True) -> list[Any]:
        return [
            part.call(self.form("original"), self.form("exchanged"), self.compare, enabled=enabled)
            for _ in range(count)
        ]


@pytest.fixture
def changes() -> list[int]:
    return []


def part_of(changes: list[int], *exchanges: str, exact: bool = False, earlier: Any = None) -> Part:
    names = exchanges or ("fused",)
    return Part("optimizer", "SGD", names, exact=exact, changed=lambda: changes.append(1), earlier=earlier)


def test_proof_race_and_use(monkeypatch: pytest.MonkeyPatch, changes: list[int]) -> None:
    calls, part = Calls(monkeypatch), part_of(changes)
    assert calls.make(part, 3) == ["original"] * 3 and part.stage == "race"
    calls.make(part, 24)
    assert part.stage == "use" and calls.forms[3:].count("original") == calls.forms[3:].count("exchanged") == 12
    assert part.ratio is not None and part.ratio.median == pytest.approx(2.0)
    assert calls.make(part, 2) == ["exchanged"] * 2 and calls.make(part, 1, enabled=False) == ["original"]
    record = part.as_record(used=True)
    assert record["used"] and record["proof"] == "bitwise" and record["reason"] == "" and changes == [1]


@pytest.mark.parametrize("exchanged_s", [0.02, 0.03])
def test_an_exchange_that_is_not_faster_is_not_used(
    monkeypatch: pytest.MonkeyPatch, changes: list[int], exchanged_s: float
) -> None:
    calls, part = Calls(monkeypatch, exchanged_s=exchanged_s), part_of(changes)
    calls.make(part, 300)
    assert part.stage == "off" and "not faster" in part.reason
    assert set(calls.forms[-20:]) == {"original"}
    assert calls.forms.count("exchanged") <= 12, "twelve pairs exclude a gain"


def test_the_next_exchange_is_tried(monkeypatch: pytest.MonkeyPatch, changes: list[int]) -> None:
    calls, part = Calls(monkeypatch), part_of(changes, "fused", "foreach")
    calls.comparison = CallComparison(False, 10, "its error is large")
    calls.make(part, 1)
    assert (part.exchange, part.stage) == ("foreach", "proof")
    reason = part.as_record(used=True)["reason"]
    assert reason == "the script ended before a decision on foreach; fused: its error is large"
    calls.comparison = EQUAL
    calls.make(part, 27)
    assert part.stage == "use" and part.as_record(used=True)["reason"] == ""


def test_exact_needs_equal_bits_and_more_numbers(monkeypatch: pytest.MonkeyPatch, changes: list[int]) -> None:
    calls, part = Calls(monkeypatch), part_of(changes, exact=True)
    calls.make(part, 63)
    assert part.stage == "proof"
    calls.make(part, 1)
    assert part.stage == "race"
    large = part_of(changes, exact=True)
    calls.comparison = CallComparison(True, 2**14)
    calls.make(large, 3)
    assert large.stage == "race"
    other = part_of(changes, exact=True)
    calls.comparison = CallComparison(False, 10)
    calls.make(other, 1)
    assert other.stage == "off" and "not bitwise" in other.reason


def test_calls_that_can_not_be_compared_are_no_proof(monkeypatch: pytest.MonkeyPatch, changes: list[int]) -> None:
    calls, part = Calls(monkeypatch), part_of(changes)
    calls.comparison = CallComparison(False, 0)
    calls.make(part, 10)
    assert part.stage == "proof" and part.as_record(used=True)["reason"] == "the script ended before a decision"


def test_an_exchange_of_an_earlier_run_needs_a_proof_and_no_race(
    monkeypatch: pytest.MonkeyPatch, changes: list[int]
) -> None:
    calls = Calls(monkeypatch)
    part = part_of(changes, "fused", "foreach", earlier=("foreach", Ratio(2.0, 1.9, 2.1, 12)))
    assert part.exchange == "foreach"
    calls.make(part, 3)
    assert part.stage == "use" and calls.make(part, 1) == ["exchanged"]


def test_a_used_exchange_is_compared_again(monkeypatch: pytest.MonkeyPatch, changes: list[int]) -> None:
    monkeypatch.setattr(part_module, "RECHECK_CALLS", 10)
    calls = Calls(monkeypatch)
    part = part_of(changes, earlier=("fused", Ratio(2.0, 1.9, 2.1, 12)))
    calls.make(part, 3)
    calls.comparison = CallComparison(False, 10, "it differs")
    calls.make(part, 9)
    assert part.stage == "use"
    assert calls.make(part, 2) == ["original"] * 2 and part.stage == "off"
    assert part.notes == ["optimizer: SGD: the exchange fused was taken back: it differs"]


def test_stored_exchanges_are_those_of_the_script_and_the_machine(tmp_path: Path) -> None:
    key = exchange_cache.script_key("a digest")
    faster = {"optimizer: SGD": ("fused", Ratio(2.0, 1.9, 2.1, 12))}
    stored = Decisions(faster, {"module: Linear": "not faster"}, {"arguments": "nothing pays"})
    assert exchange_cache.write_decisions(tmp_path, key, stored) == []
    assert exchange_cache.read_decisions(tmp_path, key) == (stored, [])
    for other in ({"script": "other"}, {"torch": "1.0"}, {"threads": 99}, {"hotloop": "0"}, {"processor": "x"}):
        assert exchange_cache.read_decisions(tmp_path, {**key, **other}) == (Decisions(), [])
    exact = exchange_cache.script_key("a digest", is_exact=True)
    assert exchange_cache.read_decisions(tmp_path, exact) == (Decisions(), []), "fused is not for --exact"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"key": {}, "parts": {}}'])
def test_a_damaged_file_is_reported_and_raced_again(tmp_path: Path, text: str) -> None:
    key = exchange_cache.script_key("a digest")
    exchange_cache.write_decisions(tmp_path, key, Decisions())
    (file,) = (tmp_path / "exchanges").glob("*.json")
    file.write_text(text)
    found, (note,) = exchange_cache.read_decisions(tmp_path, key)
    assert found == Decisions() and "are raced again" in note


def test_a_gain_in_wall_time_alone_is_none(monkeypatch: pytest.MonkeyPatch, changes: list[int]) -> None:
    """Other programs slow the original's calls; the CPU time is equal."""
    calls, part = Calls(monkeypatch), part_of(changes)
    cpu_s = itertools.count()
    monkeypatch.setattr(part_module.time, "process_time", lambda: 0.02 * next(cpu_s))
    calls.make(part, 300)
    assert part.stage == "off" and part.reason.startswith("not faster: 1.00 times")


def test_a_result_of_a_busy_machine_has_no_interval(monkeypatch: pytest.MonkeyPatch, changes: list[int]) -> None:
    calls, part = Calls(monkeypatch), part_of(changes)
    monkeypatch.setattr(races.PairedTimes, "was_busy", lambda times: True)
    calls.make(part, 30)
    record = part.as_record(used=True)
    assert part.stage == "use" and record["was_busy"] and record["ratio"]["low"] is None


def test_the_cost_of_a_lost_race_is_known(monkeypatch: pytest.MonkeyPatch, changes: list[int]) -> None:
    calls, part = Calls(monkeypatch, exchanged_s=0.05), part_of(changes)
    calls.make(part, 300)
    assert part.stage == "off" and calls.forms.count("exchanged") <= 4, "given up early"
    assert part.cost_s == pytest.approx(0.03 * calls.forms.count("exchanged")) and "stopped after a loss" in part.reason


def test_many_comparisons_take_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch, changes: list[int]) -> None:
    calls, part = Calls(monkeypatch), part_of(changes, exact=True)
    compare = calls.compare

    def compare_slowly() -> tuple[Any, CallComparison]:
        calls.now += 0.1
        return compare()

    monkeypatch.setattr(calls, "compare", compare_slowly)
    calls.make(part, 1000)
    assert part.cost_s <= 0.3 + 0.1 + 0.01 * calls.now
