"""Results of races in the user's cache folder: what is found again, what isn't, and what is passed over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotloop import kept, remembering
from hotloop.choosing import known
from hotloop.kept import best, recall, remember
from hotloop.plan import Plan
from hotloop.records import SourceRecord
from hotloop.taskfile import Loaded
from hotloop.verdicts import TRUSTED, Timing, Verdict
from hotloop.wanted import Wanted
from tests.cpu.programs import a_task

VERSIONS = {"hotloop": "1", "torch": "2", "python": "3"}
FUSED, COMPILED, WRONG = Plan(optimizer="fused"), Plan(compile="step"), Plan(precision="bf16")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    monkeypatch.setattr(kept, "folder", lambda: tmp_path / "races")
    yield tmp_path / "races"


def timing(plan: Plan, ratio: float, **more: Any) -> Timing:
    figures: dict[str, Any] = dict(ratio=ratio, ratio_low=ratio - 0.01, ratio_high=ratio + 0.01, windows=20)
    figures |= dict(step_ms=10 / ratio, startup_s=1.0, compile_s=0.0, parity="bitwise", verdict="faster")
    return Timing(name=plan.brief(), plan=plan.model_dump(), **figures | more)


def verdict(*plans: Timing, **more: Any) -> Verdict:
    base = timing(Plan(), 1.0, verdict="no difference")
    given: dict[str, Any] = dict(task="t", fingerprint="f", machine="m", versions=VERSIONS, seconds=1.0, steps=100)
    return Verdict(plans=[base, *plans], baseline="baseline", winner=None, **given | more)


def found(**where: Any) -> dict[str, Timing]:
    known, notes = recall(**dict(fingerprint="f", machine="m", versions=VERSIONS) | where)
    assert notes == []
    return {one.timing.name: one.timing for one in known}


def test_what_was_kept_is_found_again() -> None:
    one = verdict(timing(FUSED, 1.3), timing(COMPILED, 2.0, compile_s=30.0))
    assert remember(one) == []
    assert found() == {plan.name: plan for plan in one.plans}


ELSEWHERE: dict[str, dict[str, Any]] = {
    "another Task": dict(fingerprint="g"),
    "another machine": dict(machine="n"),
    "another torch": dict(versions=VERSIONS | {"torch": "3"}),
    "another hotloop": dict(versions=VERSIONS | {"hotloop": "2"}),
    "another driver": dict(versions=VERSIONS | {"nvidia_driver": "580"}),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_was_found_elsewhere_does_not_count(name: str) -> None:
    remember(verdict(timing(FUSED, 1.3)))
    assert found(**ELSEWHERE[name]) == {}


def test_the_newest_result_of_a_plan_counts() -> None:
    remember(verdict(timing(FUSED, 1.3), timing(COMPILED, 2.0)))
    remember(verdict(timing(FUSED, 0.7, verdict="slower")))
    assert found()[FUSED.brief()].verdict == "slower" and found()[COMPILED.brief()].ratio == 2.0


def test_a_race_without_proofs_leaves_what_was_proven() -> None:
    remember(verdict(timing(FUSED, 1.3, parity="fp32-equivalent", parity_reason="so it is")))
    remember(verdict(timing(FUSED, 1.5, parity=None)))
    kept = found()[FUSED.brief()]
    assert (kept.ratio, kept.parity, kept.parity_reason) == (1.5, "fp32-equivalent", "so it is")


def test_failures_are_kept() -> None:
    remember(verdict(Timing(name="c", plan=COMPILED.model_dump(), failure="can't be captured")))
    assert found()["c"].failure == "can't be captured"


def test_ratios_against_anything_else_are_not_kept() -> None:
    other = verdict(timing(COMPILED, 2.0))
    base = other.plans[0].model_copy(update={"plan": FUSED.model_dump()})
    assert remember(other.model_copy(update={"plans": [base, *other.plans[1:]]})) == []
    short = other.plans[0].model_copy(update={"ratio_low": None})
    assert remember(other.model_copy(update={"plans": [short, *other.plans[1:]]})) == []
    assert found() == {}


BEST: dict[str, tuple[list[Timing], int | None, Plan | None]] = {
    "the fastest": ([timing(FUSED, 1.3), timing(COMPILED, 2.0)], 10_000, COMPILED),
    "in a short run": ([timing(FUSED, 1.3), timing(COMPILED, 2.0, compile_s=30.0)], 100, FUSED),
    "in a long run": ([timing(FUSED, 1.3), timing(COMPILED, 2.0, compile_s=30.0)], 100_000, COMPILED),
    "by steps alone": ([timing(FUSED, 1.3), timing(COMPILED, 2.0, compile_s=30.0)], None, COMPILED),
    "not what isn't trusted": ([timing(FUSED, 1.3), timing(WRONG, 9.0, parity="reduced-precision")], 100, FUSED),
    "not what was never proven": ([timing(FUSED, 1.3, parity=None)], 100, None),
    "not what made no difference": ([timing(FUSED, 1.3, verdict="no difference")], 100, None),
    "not what failed": ([Timing(name="c", plan=COMPILED.model_dump(), failure="no")], 100, None),
}


@pytest.mark.parametrize("name", BEST)
def test_the_best_of_what_is_kept(name: str) -> None:
    plans, steps, plan = BEST[name]
    remember(verdict(*plans))
    known, _ = recall("f", "m", VERSIONS)
    chosen = best(known, steps)
    assert (None if chosen is None else Plan(**chosen.timing.plan)) == plan


@pytest.mark.parametrize("content", ["", "{", '{"version": 1}', "\x00\xff", "of another key"])
def test_a_file_that_cannot_be_read_is_passed_over_and_said(content: str, folder: Path) -> None:
    remember(verdict(timing(FUSED, 1.3)))
    remember(verdict(timing(COMPILED, 2.0), fingerprint="other"))
    [torn] = [path for path in folder.rglob("*.json") if "fused" in path.read_text()]
    if content == "of another key":
        [other] = [path for path in folder.rglob("*.json") if '"compile":"step"' in path.read_text().replace(" ", "")]
        content = other.read_text()
    torn.write_bytes(content.encode("latin-1"))
    known, notes = recall("f", "m", VERSIONS)
    assert [one.timing.name for one in known] == ["baseline"]
    assert len(notes) == 1 and str(torn) in notes[0] and "passed over" in notes[0]
    remember(verdict(timing(FUSED, 1.3)))
    assert len(found()) == 2


def test_a_folder_that_cannot_be_written_costs_a_note_alone(folder: Path) -> None:
    folder.write_text("a file in its place")
    notes = remember(verdict(timing(FUSED, 1.3)))
    assert len(notes) == 1 and "couldn't be kept" in notes[0]


def test_a_reduced_precision_is_taken_by_those_who_asked_for_it_alone() -> None:
    remember(verdict(timing(WRONG, 3.0, parity="reduced-precision")))
    kept_now = recall("f", "m", VERSIONS)[0]
    assert best(kept_now, 100) is None
    taken = best(kept_now, 100, (*TRUSTED, "reduced-precision"))
    assert taken is not None and taken.timing.plan["precision"] == "bf16"


def test_loaders_of_so_many_workers_change_nothing_in_what_is_kept() -> None:
    base = timing(Plan(workers=2), 1.0, verdict="no difference").model_copy(update={"name": "baseline"})
    one = verdict(timing(FUSED.with_axes(workers=2), 1.3))
    remember(one.model_copy(update={"plans": [base, *one.plans[1:]]}))
    assert [plan.ratio for plan in found().values() if plan.verdict == "faster"] == [1.3]


def test_what_was_raced_on_one_device_is_not_taken_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    record = SourceRecord(file="t.py", module="t", attribute="task", digest="d", reference="t.py", origin=".")
    loaded = Loaded(a_task(), record, {})
    facts = known(loaded.task, Plan())[0].model_copy(update={"fingerprint": "f"})
    monkeypatch.setattr(remembering, "machine_name", lambda: "m")
    monkeypatch.setattr(remembering, "speed_versions", lambda: VERSIONS)
    monkeypatch.setattr(remembering, "fingerprinted", lambda loaded: facts)
    remember(verdict(timing(FUSED, 1.3)))
    taken = lambda **axes: remembering.remembered(loaded, Wanted.of("auto", axes), print)  # noqa: E731
    assert taken(device="cpu") == FUSED
    monkeypatch.setattr(remembering, "placed", lambda plan: plan.with_axes(device="cuda:0"))
    assert taken() is None
