"""Results of races in the user's cache folder: what is found again, what isn't, and what is ignored."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotloop.core.records.race import TRUSTED_CLASSES, Parity, Timing
from hotloop.plan import Plan
from hotloop.tuning import race_cache as kept
from hotloop.tuning.race_cache import RaceHistory, best_race, load_races, save_races
from tests.support.tuning.handmade_verdicts import COMPILED, FUSED, VERSIONS, WRONG, timing, verdict


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    monkeypatch.setattr(kept, "races_folder", lambda: tmp_path / "races")
    yield tmp_path / "races"


def found(**where: Any) -> dict[str, Timing]:
    known, notes = load_races(**dict(fingerprint="f", machine="m", versions=VERSIONS) | where)
    assert notes == []
    return {one.timing.name: one.timing for one in known}


def test_what_was_kept_is_found_again() -> None:
    one = verdict(timing(FUSED, 1.3), timing(COMPILED, 2.0, compile_s=30.0))
    assert save_races(one) == []
    assert found() == {plan.name: plan for plan in one.plans}


ELSEWHERE: dict[str, dict[str, Any]] = {
    "another Task": dict(fingerprint="g"),
    "another machine": dict(machine="n"),
    "another torch": dict(versions=VERSIONS | {"torch": "3"}),
    "another hotloop": dict(versions=VERSIONS | {"hotloop": "2"}),
    "another compiler": dict(versions=VERSIONS | {"compiler": "/usr/bin/g++-13, 1"}),
    "another driver": dict(versions=VERSIONS | {"nvidia_driver": "580"}),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_was_found_elsewhere_does_not_count(name: str) -> None:
    save_races(verdict(timing(FUSED, 1.3)))
    assert found(**ELSEWHERE[name]) == {}


def test_the_newest_result_of_a_plan_counts() -> None:
    save_races(verdict(timing(FUSED, 1.3), timing(COMPILED, 2.0)))
    save_races(verdict(timing(FUSED, 0.7, verdict="slower")))
    assert found()[FUSED.brief()].verdict == "slower" and found()[COMPILED.brief()].ratio == 2.0


def test_a_race_without_proofs_leaves_what_was_proven() -> None:
    save_races(verdict(timing(FUSED, 1.3, parity="fp32-equivalent", parity_reason="so it is")))
    save_races(verdict(timing(FUSED, 1.5, parity=None)))
    kept = found()[FUSED.brief()]
    assert (kept.ratio, kept.parity, kept.parity_reason) == (1.5, "fp32-equivalent", "so it is")


SHORT: dict[str, Any] = dict(ratio_low=None, ratio_high=None, verdict=None)
WIDE: dict[str, Any] = dict(ratio=1.01, ratio_low=0.8, ratio_high=1.2, verdict="no difference")
UNDECIDED: dict[str, dict[str, Any]] = {
    "too few windows": dict(ratio=0.9, ratio_low=None, ratio_high=None, verdict=None),
    "too wide an interval": WIDE,
}


@pytest.mark.parametrize("name", UNDECIDED)
def test_what_was_decided_stays_where_a_shorter_race_left_it_open(name: str) -> None:
    save_races(verdict(timing(FUSED, 1.3)))
    short = {"ratio": 0.0, **UNDECIDED[name]}
    save_races(verdict(timing(FUSED, short.pop("ratio") or 1.0, parity=None, **short)))
    assert found()[FUSED.brief()] == timing(FUSED, 1.3)
    save_races(verdict(timing(FUSED, 1.0, verdict="no difference")))  # a narrow interval says that there is none
    assert found()[FUSED.brief()].verdict == "no difference"


def test_a_race_that_left_the_speed_open_may_still_prove(folder: Path) -> None:
    save_races(verdict(timing(FUSED, 1.3)))
    save_races(verdict(timing(FUSED, 1.0, ratio_low=None, ratio_high=None, verdict=None, parity="broken")))
    kept = found()[FUSED.brief()]
    assert (kept.verdict, kept.parity) == ("faster", "broken")


def test_what_a_search_settled_before_its_last_race_is_kept() -> None:
    """That one was too short for an interval; and nothing is kept of what nothing was found of."""
    rivals = timing(FUSED, 1.3), Timing(name="c", plan=COMPILED.model_dump(), failure="can't be captured")
    one = verdict(*rivals, timing(WRONG, 1.1, **SHORT, parity=None))
    base = timing(Plan(), 1.0, **SHORT).model_copy(update={"parity": None})
    save_races(one.model_copy(update={"plans": [base.model_copy(update={"name": "baseline"}), *one.plans[1:]]}))
    assert found() == {one.name: one for one in rivals}


def test_failures_are_kept() -> None:
    save_races(verdict(Timing(name="c", plan=COMPILED.model_dump(), failure="can't be captured")))
    assert found()["c"].failure == "can't be captured"


def test_a_lack_of_memory_is_tried_again_another_time() -> None:
    save_races(verdict(timing(COMPILED, 1.3)))
    lacking = Timing(name="c", plan=COMPILED.model_dump(), failure="ran out of memory", short_of_memory=True)
    save_races(verdict(lacking))
    assert found()[COMPILED.brief()].verdict == "faster"


def test_a_lack_of_memory_for_a_proof_says_nothing_of_the_plan() -> None:
    proven = timing(FUSED, 1.3)
    save_races(verdict(proven, timing(COMPILED, 2.0, parity=None, states=0)))
    for plan in (FUSED, COMPILED):
        lacking = Parity(plan=plan.brief(), parity="unproven", reason="no memory left", states=0, short_of_memory=True)
        save_races(verdict(timing(plan, 1.3).proven(lacking)))
    assert found()[FUSED.brief()] == proven
    left = found()[COMPILED.brief()]
    assert (left.parity, left.verdict, left.short_of_memory) == (None, "faster", False)
    history = RaceHistory(load_races("f", "m", VERSIONS)[0], 10_000)
    assert history.why_not_again(COMPILED, Plan()) == ""


def test_races_of_different_days_are_compared_by_their_ratios() -> None:
    """On a busy day all take twice as long: what was faster there is no worse for that."""
    save_races(verdict(timing(FUSED, 1.1)))
    busy = verdict(timing(COMPILED, 1.5, step_ms=20 / 1.5))
    slow = busy.plans[0].model_copy(update={"step_ms": 20.0})
    save_races(busy.model_copy(update={"plans": [slow, *busy.plans[1:]]}))
    for steps in (None, 100_000):
        chosen = best_race(load_races("f", "m", VERSIONS)[0], steps)
        assert chosen is not None and chosen.timing.plan == COMPILED.model_dump()


def test_ratios_against_anything_else_are_not_kept() -> None:
    other = verdict(timing(COMPILED, 2.0))
    base = other.plans[0].model_copy(update={"plan": FUSED.model_dump()})
    assert save_races(other.model_copy(update={"plans": [base, *other.plans[1:]]})) == []
    unmeasured = other.plans[0].model_copy(update={"step_ms": None})
    assert save_races(other.model_copy(update={"plans": [unmeasured, *other.plans[1:]]})) == []
    assert found() == {}


BEST: dict[str, tuple[list[Timing], int | None, Plan | None]] = {
    "the fastest": ([timing(FUSED, 1.3), timing(COMPILED, 2.0)], 10_000, COMPILED),
    "in a short run": ([timing(FUSED, 1.3), timing(COMPILED, 2.0, compile_s=30.0)], 100, FUSED),
    "in a long run": ([timing(FUSED, 1.3), timing(COMPILED, 2.0, compile_s=30.0)], 100_000, COMPILED),
    "with looks at each epoch": ([timing(FUSED, 1.3), timing(COMPILED, 2.0, looking_ms=4.0)], 100_000, FUSED),
    "by steps alone": ([timing(FUSED, 1.3), timing(COMPILED, 2.0, compile_s=30.0)], None, COMPILED),
    "not what isn't trusted": ([timing(FUSED, 1.3), timing(WRONG, 9.0, parity="reduced-precision")], 100, FUSED),
    "not what was never proven": ([timing(FUSED, 1.3, parity=None)], 100, None),
    "not what made no difference": ([timing(FUSED, 1.3, verdict="no difference")], 100, None),
    "not what failed": ([Timing(name="c", plan=COMPILED.model_dump(), failure="no")], 100, None),
}


@pytest.mark.parametrize("name", BEST)
def test_the_best_of_what_is_kept(name: str) -> None:
    plans, steps, plan = BEST[name]
    save_races(verdict(*plans))
    known, _ = load_races("f", "m", VERSIONS)
    chosen = best_race(known, steps)
    assert (None if chosen is None else chosen.timing.as_plan) == plan


@pytest.mark.parametrize("way", ["package", "step"])
def test_compiling_is_short_only_where_what_was_compiled_is_there(
    way: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's cache lies below /tmp, which a restart clears, and packages that were used long ago go."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "torch"))
    where = folder.parent / "packages" if way == "package" else tmp_path / "torch"
    where.mkdir()
    for name, age_s in {"own": 0, "of long ago": 1000}.items():
        (path := where / f"{name}.pt2").touch()
        os.utime(path, (time.time() - age_s,) * 2)
    plan = Plan(compile=way)
    save_races(verdict(timing(plan, 2.0, compile_s=30.0, compile_warm_s=0.5)))

    def taken() -> Plan | None:
        chosen = best_race(load_races("f", "m", VERSIONS)[0], 1000)  # 10 s, of which it saves 5
        return None if chosen is None else chosen.timing.as_plan

    (where / "of long ago.pt2").unlink()  # another's
    assert taken() == plan
    shutil.rmtree(where)
    assert taken() is None
    save_races(verdict(timing(plan, 2.0, compile_s=30.0, compile_warm_s=0.5)))
    assert taken() == (None if way == "package" else plan)  # a package that couldn't be stored


def test_a_proof_of_a_few_steps_is_for_runs_of_no_more() -> None:
    def taken() -> list[bool]:
        return [best_race(load_races("f", "m", VERSIONS)[0], steps) is not None for steps in (3, 4, None)]

    proof = Parity(plan="", parity="bitwise", reason="all 3 single steps of the training", states=3)
    save_races(verdict(timing(FUSED, 1.3).proven(proof)))
    assert taken() == [True, False, False]
    longer = proof.model_copy(update={"states": 16})
    for one in (longer, proof):  # and it takes nothing from one of a longer training
        save_races(verdict(timing(FUSED, 1.3).proven(one)))
        assert taken() == [True, True, True]


@pytest.mark.parametrize(
    ("before", "after", "stays"),
    [
        ("fp32-equivalent", "bitwise", "fp32-equivalent"),
        ("broken", "bitwise", "broken"),
        ("bitwise", "broken", "broken"),
        ("unproven", "bitwise", "bitwise"),
        ("bitwise", "unproven", "unproven"),
    ],
)
def test_a_proof_of_a_few_steps_takes_the_place_of_no_longer_one_unless_it_fails(
    before: Any, after: Any, stays: str
) -> None:
    for parity, states in ((before, 16), (after, 3)):
        proof = Parity(plan="", parity=parity, reason="why", states=states)
        save_races(verdict(timing(FUSED, 1.3).proven(proof)))
    [kept] = [one for one in load_races("f", "m", VERSIONS)[0] if one.timing.name != "baseline"]
    assert kept.timing.parity == stays


def test_what_compiling_takes_at_first_is_no_less_for_a_cache_that_was_filled() -> None:
    for compile_s in (None, 30.0, 0.8):
        save_races(verdict(timing(COMPILED, 2.0, compile_s=compile_s)))
    assert found()[COMPILED.brief()].compile_s == 30.0


@pytest.mark.parametrize("content", ["", "{", '{"version": 1}', "\x00\xff", "of another key"])
def test_a_file_that_cannot_be_read_is_passed_over_and_said(content: str, folder: Path) -> None:
    save_races(verdict(timing(FUSED, 1.3)))
    save_races(verdict(timing(COMPILED, 2.0), fingerprint="other"))
    [torn] = [path for path in folder.rglob("*.json") if "fused" in path.read_text()]
    if content == "of another key":
        [other] = [path for path in folder.rglob("*.json") if '"compile":"step"' in path.read_text().replace(" ", "")]
        content = other.read_text()
    torn.write_bytes(content.encode("latin-1"))
    known, notes = load_races("f", "m", VERSIONS)
    assert [one.timing.name for one in known] == ["baseline"]
    assert len(notes) == 1 and str(torn) in notes[0] and "ignored" in notes[0]
    save_races(verdict(timing(FUSED, 1.3)))
    assert len(found()) == 2


def test_a_result_of_an_axis_that_there_is_no_more_is_passed_over_and_said(folder: Path) -> None:
    one = timing(FUSED, 1.3)
    save_races(verdict(one.model_copy(update={"plan": {**one.plan, "gone": 1}})))
    known, notes = load_races("f", "m", VERSIONS)
    assert [one.timing.name for one in known] == ["baseline"]
    assert len(notes) == 1 and "ignored" in notes[0] and "gone" in notes[0]


def test_a_folder_that_cannot_be_written_costs_a_note_alone(folder: Path) -> None:
    folder.write_text("a file in its place")
    notes = save_races(verdict(timing(FUSED, 1.3)))
    assert len(notes) == 1 and "couldn't be stored" in notes[0]


def test_a_reduced_precision_is_taken_by_those_who_asked_for_it_alone() -> None:
    save_races(verdict(timing(WRONG, 3.0, parity="reduced-precision")))
    kept_now = load_races("f", "m", VERSIONS)[0]
    assert best_race(kept_now, 100) is None
    taken = best_race(kept_now, 100, (*TRUSTED_CLASSES, "reduced-precision"))
    assert taken is not None and taken.timing.plan["precision"] == "bf16"


def test_loaders_of_so_many_workers_change_nothing_in_what_is_kept() -> None:
    base = timing(Plan(workers=2), 1.0, verdict="no difference").model_copy(update={"name": "baseline"})
    one = verdict(timing(FUSED.with_axes(workers=2), 1.3))
    save_races(one.model_copy(update={"plans": [base, *one.plans[1:]]}))
    assert [plan.ratio for plan in found().values() if plan.verdict == "faster"] == [1.3]
