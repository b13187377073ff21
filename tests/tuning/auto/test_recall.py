"""Results of races that a training takes where it begins or goes on, and what they don't outlive."""

from __future__ import annotations

import importlib
import os
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hotloop.core.files.source_files import external_sources
from hotloop.core.hardware.machine import machine_name, speed_versions
from hotloop.core.plan_request import PlanRequest
from hotloop.core.records.race import Timing, Verdict
from hotloop.core.records.training import SourceRecord
from hotloop.lowering import task_facts
from hotloop.plan import Plan
from hotloop.task import Task
from hotloop.task_file import LoadedTask, load_task
from hotloop.tuning import auto as remembering
from hotloop.tuning import race_cache as kept
from hotloop.tuning.auto import facts_with_fingerprint, feasibility_facts
from hotloop.tuning.contenders import RaceSpec
from hotloop.tuning.race import race_loaded
from hotloop.tuning.race_cache import save_races
from tests.support.programs import a_task
from tests.support.runs import lower_cached_or_auto, resume_run, start_run
from tests.support.tuning.handmade_verdicts import COMPILED, FUSED, VERSIONS, timing, verdict


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch) -> Iterator[Path]:
    monkeypatch.setattr(kept, "races_folder", lambda: tmp_path / "races")
    yield tmp_path / "races"


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        (dict(ratio=0.8, verdict="slower"), "it was found slower than the baseline"),
        (dict(ratio=0.4, ratio_low=None, ratio_high=None, verdict=None, left_out=True), None),
        (
            dict(ratio=0.94, windows=4, ratio_low=None, ratio_high=None, verdict=None, left_out=True),
            None,
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
    loaded = LoadedTask(a_task(optimizer=torch.optim.Adam), RECORD, {})
    of_this = dict(
        fingerprint=remembering.facts_with_fingerprint(loaded).fingerprint,
        machine=remembering.machine_name(),
        versions=remembering.speed_versions(),
    )
    save_races(verdict(timing(FUSED, measured.pop("ratio"), **measured), **of_this))
    said: list[str] = []
    program = lower_cached_or_auto(loaded, PlanRequest.with_auto_default(None, {"device": "cpu"}), said.append)
    program.close()
    assert program.parts.plan == (FUSED if says is None else Plan())
    assert said == [] if says is None else f"auto leaves out optimizer=fused: {says}" in said[0]


RECORD = SourceRecord(file="t.py", module="t", attribute="task", digest="d", reference="t.py", origin=".")

Taken = Callable[..., Plan | None]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Taken:
    """What a training with such axes takes of what is kept."""
    loaded = LoadedTask(a_task(), RECORD, {})
    facts = feasibility_facts(loaded.task, Plan())[0].model_copy(update={"fingerprint": "f"})
    monkeypatch.setattr(remembering, "machine_name", lambda: "m")
    monkeypatch.setattr(remembering, "speed_versions", lambda: VERSIONS)
    monkeypatch.setattr(remembering, "facts_with_fingerprint", lambda loaded: facts)

    def take(**axes: Any) -> Plan | None:
        found = remembering.cached_best_race(loaded, PlanRequest.from_value("auto", axes), print)
        return None if found is None else found.timing.as_plan

    return take


def beside(plan: Plan, *plans: Timing) -> Verdict:
    """A race against the baseline with axes of its own."""
    one = verdict(*plans)
    base = timing(plan, 1.0, verdict="no difference").model_copy(update={"name": "baseline"})
    return one.model_copy(update={"plans": [base, *plans]})


def test_what_was_raced_on_one_device_is_not_taken_on_another(taken: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    save_races(verdict(timing(FUSED, 1.3)))
    assert taken(device="cpu") == FUSED
    monkeypatch.setattr(remembering, "resolve_device", lambda plan: plan.with_axes(device="cuda:0"))
    assert taken() is None
    save_races(verdict(timing(FUSED.with_axes(device="cuda:0"), 9.0)))  # than a CPU
    assert taken() is None
    save_races(beside(Plan(device="cuda:0"), timing(FUSED.with_axes(device="cuda:0"), 1.1)))
    assert taken() == FUSED.with_axes(device="cuda:0")


def test_what_was_faster_among_many_workers_is_not_taken_where_none_are_used(taken: Taken) -> None:
    eight = FUSED.with_axes(workers=8)
    save_races(beside(Plan(workers=8), timing(eight, 1.3)))
    assert taken() is None and taken(workers=2) is None
    assert taken(workers=8) == eight
    save_races(
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
def test_the_model_that_gives_the_facts_is_the_one_that_trains(record: SourceRecord | None, built: list[int]) -> None:
    """For one of billions of parameters that takes tens of seconds each time."""
    loaded = LoadedTask(a_task(), record, {})
    lower_cached_or_auto(loaded, PlanRequest.with_auto_default(None, {"device": "cpu"}), print).close()
    assert len(built) == 1


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
    start_run(loaded, run=tmp_path / "run", plan="baseline", axes={"device": "cpu"})
    of_this = dict(
        fingerprint=facts_with_fingerprint(loaded).fingerprint, machine=machine_name(), versions=speed_versions()
    )
    save_races(verdict(timing(FUSED, 1.3), **of_this))
    cpu, more = {"device": "cpu"}, {"epochs": 2}
    run, _ = resume_run(tmp_path / "run", plan="auto", axes=cpu, overrides=more, say=said.append)
    assert run.plan == FUSED and "auto: optimizer=fused, stored as the fastest that is proven equal" in said


@pytest.mark.parametrize(("done", "plan"), [(0, COMPILED), (9_000, FUSED)])
def test_only_the_steps_that_are_left_pay_for_a_remembered_plan(
    done: int, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, lowered = LoadedTask(a_task(), RECORD, {}), list[Plan]()
    facts = facts_with_fingerprint(loaded).model_copy(update={"steps": 10_000})
    here = dict(fingerprint=facts.fingerprint, machine=machine_name(), versions=speed_versions())
    save_races(verdict(timing(FUSED, 1.3), timing(COMPILED, 2.0, compile_s=10.0), **here))  # 10 ms a step
    monkeypatch.setattr(remembering, "lower", lambda task, plan, *told, **named: lowered.append(plan) or True)
    lower_cached_or_auto(loaded, PlanRequest.from_value("auto", {"device": "cpu"}), print, facts=facts, done=done)
    assert lowered == [plan]


@pytest.mark.more
def test_a_race_looks_at_the_model_once(built: list[int]) -> None:
    loaded = LoadedTask(a_task(), RECORD, {})
    race_loaded(loaded, RaceSpec(("baseline", "auto"), "baseline", ["cpu"], time_limit="0.1s"), prove=None)
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
        return external_sources({"task.py": b"import zipped, gone"})

    assert found("first = 1") == {"zipped": b"first = 1"}
    assert found("second = 22")["zipped"] == b"second = 22"
    (tmp_path / "once_there.py").write_text("third = 333")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "once_there", importlib.import_module("once_there"))
    assert external_sources({"task.py": b"import once_there"}) == {"once_there": b"third = 333"}
    (tmp_path / "once_there.py").unlink()  # it is loaded all the same
    assert external_sources({"task.py": b"import once_there"}) == {}


@pytest.mark.parametrize("how", IMPORTS)
def test_what_was_found_does_not_outlive_a_change_of_code_elsewhere(how: str, tmp_path: Path, lab: Path) -> None:
    line, made = IMPORTS[how]
    file = tmp_path / "experiments" / "task.py"
    file.parent.mkdir()
    file.write_text(FILE.replace("class Net(torch.nn.Linear):\n    pass", line).replace("Net(6, 3)", f"{made}(6, 3)"))

    def now() -> str:
        return facts_with_fingerprint(load_task(str(file))).fingerprint

    before = now()
    importlib.import_module("lab.later")  # whether it was imported already makes no difference
    assert now() == before
    (lab / "other.py").write_text("nobody imports this")
    assert now() == before
    for part in ("nets.py", "parts.py", "later.py"):
        (lab / part).write_text((lab / part).read_text() + "# another forward\n")
        assert now() != before, part
        before = now()


@pytest.mark.parametrize("plan", [None, "auto", "baseline", Plan(optimizer="foreach")], ids=str)
def test_a_training_builds_its_model_and_reads_its_facts_once(
    plan: Any, built: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = list[int]()
    monkeypatch.setattr(task_facts, "trial_optimizer", lambda *given: looked.append(1))
    real = task_facts.inexact_reasons
    monkeypatch.setattr(task_facts, "inexact_reasons", lambda *given: looked.append(1) or real(*given))
    (tmp_path / "task.py").write_text(FILE)
    run, _ = start_run(load_task(str(tmp_path / "task.py")), run=tmp_path / "run", plan=plan, axes={"device": "cpu"})
    assert len(built) == 1 and looked == [1]
    assert run.record.facts.parameters == 21
