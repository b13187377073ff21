"""Results of races in the user's cache folder: what is found again, what isn't, and what is passed over."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hotloop import contests, kept, remembering
from hotloop.choosing import known
from hotloop.contests import raced
from hotloop.kept import best, recall, remember
from hotloop.lowering import Program, lower
from hotloop.measuring.racing import Measured
from hotloop.plan import Plan
from hotloop.records import SourceRecord, TaskFacts
from hotloop.remembering import fingerprinted, lowered_by_memory
from hotloop.rivals import Contest
from hotloop.setting import machine_name, speed_versions
from hotloop.sources import sources_elsewhere
from hotloop.task import Task
from hotloop.taskfile import Loaded, load_task
from hotloop.training import go_on, start
from hotloop.verdicts import TRUSTED, Parity, Timing, Verdict
from hotloop.wanted import Wanted
from hotloop.weighing import Memory
from tests.cpu.programs import a_task

VERSIONS = {"hotloop": "1", "torch": "2", "python": "3"}
FUSED, COMPILED, WRONG = Plan(optimizer="fused"), Plan(compile="step"), Plan(precision="bf16")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    monkeypatch.setattr(kept, "folder", lambda: tmp_path / "races")
    yield tmp_path / "races"


def timing(plan: Plan, ratio: float, **more: Any) -> Timing:
    figures: dict[str, Any] = dict(ratio=ratio, ratio_low=ratio - 0.01, ratio_high=ratio + 0.01, windows=20)
    figures |= dict(step_ms=10 / ratio, startup_s=1.0, compile_s=0.0, parity="bitwise", states=16, verdict="faster")
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
    "another compiler": dict(versions=VERSIONS | {"compiler": "/usr/bin/g++-13, 1"}),
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


SHORT: dict[str, Any] = dict(ratio_low=None, ratio_high=None, verdict=None)
WIDE: dict[str, Any] = dict(ratio=1.01, ratio_low=0.8, ratio_high=1.2, verdict="no difference")
UNDECIDED: dict[str, dict[str, Any]] = {
    "too few windows": dict(ratio=0.9, ratio_low=None, ratio_high=None, verdict=None),
    "too wide an interval": WIDE,
}


@pytest.mark.parametrize("name", UNDECIDED)
def test_what_was_decided_stays_where_a_shorter_race_left_it_open(name: str) -> None:
    remember(verdict(timing(FUSED, 1.3)))
    short = {"ratio": 0.0, **UNDECIDED[name]}
    remember(verdict(timing(FUSED, short.pop("ratio") or 1.0, parity=None, **short)))
    assert found()[FUSED.brief()] == timing(FUSED, 1.3)
    remember(verdict(timing(FUSED, 1.0, verdict="no difference")))  # a narrow interval says that there is none
    assert found()[FUSED.brief()].verdict == "no difference"


def test_a_race_that_left_the_speed_open_may_still_prove(folder: Path) -> None:
    remember(verdict(timing(FUSED, 1.3)))
    remember(verdict(timing(FUSED, 1.0, ratio_low=None, ratio_high=None, verdict=None, parity="broken")))
    kept = found()[FUSED.brief()]
    assert (kept.verdict, kept.parity) == ("faster", "broken")


def test_what_a_search_settled_before_its_last_race_is_kept() -> None:
    """That one was too short for an interval; and nothing is kept of what nothing was found of."""
    rivals = timing(FUSED, 1.3), Timing(name="c", plan=COMPILED.model_dump(), failure="can't be captured")
    one = verdict(*rivals, timing(WRONG, 1.1, **SHORT, parity=None))
    base = timing(Plan(), 1.0, **SHORT).model_copy(update={"parity": None})
    remember(one.model_copy(update={"plans": [base.model_copy(update={"name": "baseline"}), *one.plans[1:]]}))
    assert found() == {one.name: one for one in rivals}


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        (dict(ratio=0.8, verdict="slower"), "it was found slower than the baseline"),
        (dict(ratio=0.4, ratio_low=None, ratio_high=None, verdict=None, left_out=True), "it was found slower"),
        (
            dict(ratio=0.94, windows=4, ratio_low=None, ratio_high=None, verdict=None, left_out=True),
            "it was found slower",
        ),
        (dict(ratio=0.96, windows=4, ratio_low=None, ratio_high=None, verdict=None, left_out=True), None),
        (dict(ratio=0.9, windows=2, ratio_low=None, ratio_high=None, verdict=None, left_out=True), None),
        (dict(ratio=1.3, parity="broken"), "it was found broken"),
        (dict(ratio=0.99, verdict="no difference"), None),
    ],
    ids=["slower", "left out", "left out early", "left out beside a faster one", "at once", "broken", "no difference"],
)
def test_a_plan_of_the_rules_that_was_found_slower_is_not_taken(
    measured: dict[str, Any], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = Loaded(a_task(optimizer=torch.optim.Adam), RECORD, {})
    of_this = dict(
        fingerprint=remembering.fingerprinted(loaded).fingerprint,
        machine=remembering.machine_name(),
        versions=remembering.speed_versions(),
    )
    remember(verdict(timing(FUSED, measured.pop("ratio"), **measured), **of_this))
    said: list[str] = []
    program = lowered_by_memory(loaded, loaded.task, Wanted.or_auto(None, {"device": "cpu"}), said.append)
    program.close()
    assert program.parts.plan == (FUSED if says is None else Plan())
    assert said == [] if says is None else f"auto passes over optimizer=fused: {says}" in said[0]


def test_failures_are_kept() -> None:
    remember(verdict(Timing(name="c", plan=COMPILED.model_dump(), failure="can't be captured")))
    assert found()["c"].failure == "can't be captured"


def test_a_lack_of_memory_is_tried_again_another_time() -> None:
    remember(verdict(timing(COMPILED, 1.3)))
    lacking = Timing(name="c", plan=COMPILED.model_dump(), failure="ran out of memory", short_of_memory=True)
    remember(verdict(lacking))
    assert found()[COMPILED.brief()].verdict == "faster"


def test_a_lack_of_memory_for_a_proof_says_nothing_of_the_plan() -> None:
    proven = timing(FUSED, 1.3)
    remember(verdict(proven, timing(COMPILED, 2.0, parity=None, states=0)))
    for plan in (FUSED, COMPILED):
        lacking = Parity(plan=plan.brief(), parity="unproven", reason="no memory left", states=0, short_of_memory=True)
        remember(verdict(timing(plan, 1.3).proven(lacking)))
    assert found()[FUSED.brief()] == proven
    left = found()[COMPILED.brief()]
    assert (left.parity, left.verdict, left.short_of_memory) == (None, "faster", False)
    assert Memory([left]).against(COMPILED, Plan(), TRUSTED, 10_000) == ""


def test_races_of_different_days_are_compared_by_their_ratios() -> None:
    """On a busy day all take twice as long: what was faster there is no worse for that."""
    remember(verdict(timing(FUSED, 1.1)))
    busy = verdict(timing(COMPILED, 1.5, step_ms=20 / 1.5))
    slow = busy.plans[0].model_copy(update={"step_ms": 20.0})
    remember(busy.model_copy(update={"plans": [slow, *busy.plans[1:]]}))
    for steps in (None, 100_000):
        chosen = best(recall("f", "m", VERSIONS)[0], steps)
        assert chosen is not None and chosen.timing.plan == COMPILED.model_dump()


def test_ratios_against_anything_else_are_not_kept() -> None:
    other = verdict(timing(COMPILED, 2.0))
    base = other.plans[0].model_copy(update={"plan": FUSED.model_dump()})
    assert remember(other.model_copy(update={"plans": [base, *other.plans[1:]]})) == []
    unmeasured = other.plans[0].model_copy(update={"step_ms": None})
    assert remember(other.model_copy(update={"plans": [unmeasured, *other.plans[1:]]})) == []
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
    remember(verdict(*plans))
    known, _ = recall("f", "m", VERSIONS)
    chosen = best(known, steps)
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
    remember(verdict(timing(plan, 2.0, compile_s=30.0, compile_warm_s=0.5)))

    def taken() -> Plan | None:
        chosen = best(recall("f", "m", VERSIONS)[0], 1000)  # 10 s, of which it saves 5
        return None if chosen is None else chosen.timing.as_plan

    (where / "of long ago.pt2").unlink()  # another's
    assert taken() == plan
    shutil.rmtree(where)
    assert taken() is None
    remember(verdict(timing(plan, 2.0, compile_s=30.0, compile_warm_s=0.5)))
    assert taken() == (None if way == "package" else plan)  # a package that couldn't be kept


def test_a_proof_of_a_few_steps_is_for_runs_of_no_more() -> None:
    def taken() -> list[bool]:
        return [best(recall("f", "m", VERSIONS)[0], steps) is not None for steps in (3, 4, None)]

    proof = Parity(plan="", parity="bitwise", reason="all 3 single steps of the training", states=3)
    remember(verdict(timing(FUSED, 1.3).proven(proof)))
    assert taken() == [True, False, False]
    longer = proof.model_copy(update={"states": 16})
    for one in (longer, proof):  # and it takes nothing from one of a longer training
        remember(verdict(timing(FUSED, 1.3).proven(one)))
        assert taken() == [True, True, True]


@pytest.mark.parametrize(
    ("before", "after", "stays"),
    [
        ("fp32-equivalent", "bitwise", "fp32-equivalent"),
        ("broken", "bitwise", "broken"),
        ("bitwise", "broken", "broken"),
        ("unproven", "bitwise", "bitwise"),
    ],
)
def test_a_proof_of_a_few_steps_takes_the_place_of_no_longer_one_unless_it_finds_a_fault(
    before: Any, after: Any, stays: str
) -> None:
    for parity, states in ((before, 16), (after, 3)):
        proof = Parity(plan="", parity=parity, reason="why", states=states)
        remember(verdict(timing(FUSED, 1.3).proven(proof)))
    [kept] = [one for one in recall("f", "m", VERSIONS)[0] if one.timing.name != "baseline"]
    assert kept.timing.parity == stays


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


def test_a_result_of_an_axis_that_there_is_no_more_is_passed_over_and_said(folder: Path) -> None:
    one = timing(FUSED, 1.3)
    remember(verdict(one.model_copy(update={"plan": {**one.plan, "gone": 1}})))
    known, notes = recall("f", "m", VERSIONS)
    assert [one.timing.name for one in known] == ["baseline"]
    assert len(notes) == 1 and "passed over" in notes[0] and "gone" in notes[0]


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


RECORD = SourceRecord(file="t.py", module="t", attribute="task", digest="d", reference="t.py", origin=".")

Taken = Callable[..., Plan | None]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    """What a training with such axes takes of what is kept."""
    loaded = Loaded(a_task(), RECORD, {})
    facts = known(loaded.task, Plan())[0].model_copy(update={"fingerprint": "f"})
    monkeypatch.setattr(remembering, "machine_name", lambda: "m")
    monkeypatch.setattr(remembering, "speed_versions", lambda: VERSIONS)
    monkeypatch.setattr(remembering, "fingerprinted", lambda loaded: facts)
    return lambda **axes: remembering.remembered(loaded, Wanted.of("auto", axes), print)


def beside(plan: Plan, *plans: Timing) -> Verdict:
    """A race against the baseline with axes of its own."""
    one = verdict(*plans)
    base = timing(plan, 1.0, verdict="no difference").model_copy(update={"name": "baseline"})
    return one.model_copy(update={"plans": [base, *plans]})


def test_what_was_raced_on_one_device_is_not_taken_on_another(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    remember(verdict(timing(FUSED, 1.3)))
    assert taken(device="cpu") == FUSED
    monkeypatch.setattr(remembering, "placed", lambda plan: plan.with_axes(device="cuda:0"))
    assert taken() is None
    remember(verdict(timing(FUSED.with_axes(device="cuda:0"), 9.0)))  # than a CPU
    assert taken() is None
    remember(beside(Plan(device="cuda:0"), timing(FUSED.with_axes(device="cuda:0"), 1.1)))
    assert taken() == FUSED.with_axes(device="cuda:0")


def test_what_was_faster_among_many_workers_is_not_taken_where_none_are_used(taken: Taken) -> None:
    eight = FUSED.with_axes(workers=8)
    remember(beside(Plan(workers=8), timing(eight, 1.3)))
    assert taken() is None and taken(workers=2) is None
    assert taken(workers=8) == eight
    remember(
        verdict(timing(eight, 0.7, verdict="slower"))
    )  # beside another baseline: neither says anything of the other
    assert taken() is None and taken(workers=8) == eight


def test_a_compiler_is_told_from_the_next_one_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed without one, or with a broken one, is tried again."""
    (real := tmp_path / "g++-12").write_text("#!/bin/sh")
    real.chmod(0o755)
    (tmp_path / "c++").symlink_to(real)
    found = []
    for change in (lambda: None, lambda: os.utime(real, (9, 9)), real.unlink):
        change()
        monkeypatch.setenv("CXX", str(tmp_path / "c++"))
        found.append(speed_versions().get("compiler"))
    assert found[1:] == [f"{real}, {9 * 10**9}", None] and found[0] not in found[1:]


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each model that is built."""
    made: list[int] = []
    build = Task.build_model
    monkeypatch.setattr(Task, "build_model", lambda self: made.append(1) or build(self))
    return made


@pytest.mark.parametrize("record", [RECORD, None], ids=["of a file", "of Python"])
def test_a_model_is_built_once_to_be_looked_at_and_once_to_be_trained(
    record: SourceRecord | None, built: list[int]
) -> None:
    """For one of billions of parameters that takes tens of seconds each time."""
    loaded = Loaded(a_task(), record, {})
    lowered_by_memory(loaded, loaded.task, Wanted.or_auto(None, {"device": "cpu"}), print).close()
    assert len(built) == 2


def test_what_auto_finds_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run begins with it at once."""
    loaded = Loaded(a_task(), RECORD, {})

    def chosen(task: Task, *told: Any, memory: Memory, facts: TaskFacts, **rest: Any) -> Program:
        here = dict(fingerprint=facts.fingerprint, machine=machine_name(), versions=speed_versions())
        memory.keep(verdict(timing(FUSED, 1.3, startup_s=0.0), steps=10, **here))
        return lower(task, FUSED)

    monkeypatch.setattr(remembering, "lowered", chosen)
    said: list[str] = []
    for _ in range(2):
        lowered_by_memory(loaded, loaded.task, Wanted.of("auto", {"device": "cpu"}), said.append).close()
    assert said == ["auto: optimizer=fused, remembered as the fastest that is proven equal"]


FILE = """
import hotloop, torch

class Net(torch.nn.Linear):
    pass

task = hotloop.Task(
    name="t", model=lambda: Net(6, 3), loss=torch.nn.CrossEntropyLoss(), optimizer=torch.optim.Adam,
    data=(torch.randn(24, 6), torch.arange(24) % 3), batch_size=12, epochs=1, seed=1,
)
"""


def test_a_run_that_is_gone_on_with_takes_what_was_found_too(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(FILE)
    loaded, said = load_task(str(tmp_path / "task.py")), list[str]()
    start(loaded, run=tmp_path / "run", plan="baseline", axes={"device": "cpu"})
    of_this = dict(fingerprint=fingerprinted(loaded).fingerprint, machine=machine_name(), versions=speed_versions())
    remember(verdict(timing(FUSED, 1.3), **of_this))
    cpu, more = {"device": "cpu"}, {"epochs": 2}
    run, _ = go_on(tmp_path / "run", plan="auto", axes=cpu, overrides=more, say=said.append)
    assert run.plan == FUSED and "auto: optimizer=fused, remembered as the fastest that is proven equal" in said


@pytest.mark.parametrize(("done", "plan"), [(0, COMPILED), (9_000, FUSED)])
def test_only_the_steps_that_are_left_pay_for_a_remembered_plan(
    done: int, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, lowered = Loaded(a_task(), RECORD, {}), list[Plan]()
    facts = fingerprinted(loaded).model_copy(update={"steps": 10_000})
    here = dict(fingerprint=facts.fingerprint, machine=machine_name(), versions=speed_versions())
    remember(verdict(timing(FUSED, 1.3), timing(COMPILED, 2.0, compile_s=10.0), **here))  # 10 ms a step
    monkeypatch.setattr(remembering, "lower", lambda task, plan, *told: lowered.append(plan))
    lowered_by_memory(loaded, loaded.task, Wanted.of("auto", {"device": "cpu"}), print, facts=facts, done=done)
    assert lowered == [plan]


def test_a_race_keeps_no_start_that_is_the_time_auto_took_to_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run that the plan pays for wouldn't take it: what `auto` compiles it keeps by itself."""
    chosen = timing(COMPILED, 2.0, startup_s=90.0).model_copy(update={"name": "auto"})
    monkeypatch.setattr(
        contests, "measure", lambda *_, **__: Measured([*verdict(timing(FUSED, 1.3)).plans, chosen], [])
    )
    loaded = Loaded(a_task(), RECORD, {})
    asked = Contest(("baseline", "auto", FUSED), "baseline", None, time_limit="0.1s")
    found = raced(loaded, asked, prove=None)
    assert found.plan("auto") == chosen
    kept, _ = recall(found.fingerprint, found.machine, found.versions)
    assert {one.timing.name for one in kept} == {"baseline", "optimizer=fused"}


def test_auto_is_told_of_what_was_found_before(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, told = Loaded(a_task(), RECORD, {}), list[Timing]()
    broken = timing(COMPILED, 2.0, parity="broken")
    facts = fingerprinted(loaded)
    remember(verdict(broken, fingerprint=facts.fingerprint, machine=machine_name(), versions=speed_versions()))
    monkeypatch.setattr(remembering, "lowered", lambda *_, memory, **__: told.extend(memory.timings))
    lowered_by_memory(loaded, loaded.task, Wanted.of("auto", {"device": "cpu"}), print)
    assert broken in told


def test_a_race_looks_at_the_model_once(built: list[int]) -> None:
    loaded = Loaded(a_task(), RECORD, {})
    raced(loaded, Contest(("baseline", "auto"), "baseline", ["cpu"], time_limit="0.1s"), prove=None)
    assert len(built) == 4  # that look, the rehearsal, and each plan's own


BY_NAME = "from lab.nets import Net"
IMPORTS = {
    "at its top": (BY_NAME, "Net"),
    "when the model is made": ("", "__import__('lab.nets').nets.Net"),
    "by a text": ("import importlib", "importlib.import_module('.'.join(['lab', 'nets'])).Net"),
}


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package outside of the Task's folder, as PYTHONPATH or an editable install finds it."""
    where = tmp_path / "src" / "lab"
    where.mkdir(parents=True)
    (where / "__init__.py").touch()
    (where / "nets.py").write_text("import torch\nfrom . import parts\n\nclass Net(torch.nn.Linear): pass\n")
    (where / "parts.py").write_text("def late():\n    import lab.later\n")
    (where / "later.py").touch()
    (where / "other.py").touch()
    monkeypatch.syspath_prepend(str(where.parent))
    yield where
    for name in [name for name in sys.modules if name.partition(".")[0] == "lab"]:
        del sys.modules[name]


def test_code_in_an_archive_counts_and_what_can_t_be_read_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = tmp_path / "libs.zip"
    monkeypatch.syspath_prepend(str(archive))

    def found(text: str) -> dict[str, bytes]:
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("zipped/__init__.py", text)
        importlib.invalidate_caches()
        sys.path_importer_cache.clear()
        return sources_elsewhere({"task.py": b"import zipped, gone"})

    assert found("first = 1") == {"zipped": b"first = 1"}
    assert found("second = 22")["zipped"] == b"second = 22"
    (tmp_path / "once_there.py").write_text("third = 333")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "once_there", importlib.import_module("once_there"))
    assert sources_elsewhere({"task.py": b"import once_there"}) == {"once_there": b"third = 333"}
    (tmp_path / "once_there.py").unlink()  # it is loaded all the same
    assert sources_elsewhere({"task.py": b"import once_there"}) == {}


@pytest.mark.parametrize("how", IMPORTS)
def test_what_was_found_does_not_outlive_a_change_of_code_elsewhere(how: str, tmp_path: Path, lab: Path) -> None:
    line, made = IMPORTS[how]
    file = tmp_path / "experiments" / "task.py"
    file.parent.mkdir()
    file.write_text(FILE.replace("class Net(torch.nn.Linear):\n    pass", line).replace("Net(6, 3)", f"{made}(6, 3)"))

    def now() -> str:
        return fingerprinted(load_task(str(file))).fingerprint

    before = now()
    importlib.import_module("lab.later")  # whether it was imported already makes no difference
    assert now() == before
    (lab / "other.py").write_text("nobody imports this")
    assert now() == before
    for part in ("nets.py", "parts.py", "later.py"):
        (lab / part).write_text((lab / part).read_text() + "# another forward\n")
        assert now() != before, part
        before = now()
