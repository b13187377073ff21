"""Files that an earlier hotloop 0.1.0 wrote are read: a run folder, races in the cache, and the record of a profile.

Each is also read with one JSON field renamed, which must not go unnoticed.
"""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import hotloop
from hotloop.core.plan_request import PlanRequest
from hotloop.core.records.profile import Profile
from hotloop.plan import Plan
from hotloop.report.profile import profile_page
from hotloop.report.profile_charts import write_charts
from hotloop.task_file import LoadedTask, load_task
from hotloop.training.run import Run
from hotloop.tuning import auto, race_cache
from tests.support.runs import lower_cached_or_auto, resume_run

OLD = Path(__file__).parents[1] / "support/files_of_0_1_0" / "default_precision"
"""Two epochs of six in all, a race of baseline and fused optimizer, and `hotloop profile --json`; of the Task in `run/source`."""


def rename(file: Path, old: str, new: str) -> None:
    """Renames a field of a JSON file, wherever it stands."""
    text = file.read_text(encoding="utf-8")
    assert f'"{old}":' in text, f"{file} has no field {old}"
    file.write_text(text.replace(f'"{old}":', f'"{new}":'), encoding="utf-8")


# --- the run folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOTLOOP_TRUST", "1")  # the run was started by another user
    return Path(shutil.copytree(OLD / "run", tmp_path / "run"))


def resume_and_compare(folder: Path) -> None:
    """Trains a third epoch, and compares with three epochs in one go."""
    first = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    resumed, ended = resume_run(folder, overrides={"epochs": 3}, say=lambda line: None)
    assert ended.reason == "finished" and [row["step"] for row in resumed.epochs] == [3, 6, 9]
    assert resumed.epochs[:2] == first, "rows of the epochs before stay"
    events = [json.loads(line)["event"] for line in (folder / "journal.jsonl").read_text().splitlines()]
    assert events[:4] == ["start", "checkpoint", "stop", "final"] and "resume" in events[4:]

    task = load_task(str(folder / "source" / "digits.py"), {}).task
    whole = hotloop.fit(
        replace(task, epochs=3), run=folder.parent / "whole", plan="baseline", device="cpu", progress=False
    )
    # Not bitwise: another processor's kernels may round otherwise than those that trained the first two epochs.
    for row, expected in zip(resumed.epochs, whole.epochs, strict=True):
        assert row["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-4)
    weights = hotloop.load_model(whole, weights="last").state_dict()
    for name, value in hotloop.load_model(Run.open(folder), weights="last").state_dict().items():
        torch.testing.assert_close(value, weights[name], rtol=1e-3, atol=1e-5)


def test_a_run_goes_on_from_its_checkpoint(run: Path) -> None:
    resume_and_compare(run)


@pytest.mark.parametrize(
    ("file", "field"), [("run.json", "overrides"), ("run.json", "source"), ("metrics.jsonl", "step")]
)
def test_a_renamed_field_of_a_run_shows(run: Path, file: str, field: str) -> None:
    rename(run / file, field, "renamed")
    with pytest.raises((AssertionError, KeyError, hotloop.HotloopError)):
        resume_and_compare(run)


# --- the cache of races


@pytest.fixture
def races(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = Path(shutil.copytree(OLD / "races", tmp_path / "races"))
    monkeypatch.setattr(race_cache, "races_folder", lambda: folder)
    key = key_of(OLD / "races")
    monkeypatch.setattr(auto, "machine_name", lambda: key["machine"])
    monkeypatch.setattr(auto, "speed_versions", lambda: key["versions"])
    return folder


def key_of(folder: Path) -> dict[str, Any]:
    """What the races of the folder depend on, beside the plan."""
    (key, _) = (json.loads(path.read_text(encoding="utf-8"))["key"] for path in folder.glob("*/*.json"))
    return key


def digits() -> LoadedTask:
    """The Task that was raced."""
    return load_task(str(OLD / "run" / "source" / "digits.py"), {})


def use_the_race() -> None:
    """Lowers the Task as `--plan auto` does; only the machine and versions are those of the race."""
    facts = auto.facts_with_fingerprint(digits()).model_copy(update={"fingerprint": key_of(OLD / "races")["task"]})
    said: list[str] = []
    wanted = PlanRequest.from_value("auto", {"device": "cpu"})
    program = lower_cached_or_auto(digits(), wanted, said.append, facts=facts)
    assert said == ["auto: optimizer=fused, stored as the fastest that is proven equal"]
    assert program.parts.plan == Plan(device="cpu", optimizer="fused")


@pytest.mark.skipif(torch.__version__ != "2.13.0+cpu", reason="the fingerprint depends on torch's version")
def test_the_fingerprint_of_a_task_is_the_same() -> None:
    assert auto.facts_with_fingerprint(digits()).fingerprint == key_of(OLD / "races")["task"]


@pytest.mark.usefixtures("races")
def test_a_race_is_used_without_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "lower_by_rules", lambda *_, **__: pytest.fail("auto chose anew"))
    use_the_race()


@pytest.mark.parametrize("field", ["key", "timing", "ratio", "parity", "verdict", "machine", "step_ms"])
def test_a_renamed_field_of_a_race_shows(races: Path, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "lower_by_rules", lambda *_, **__: pytest.fail("auto chose anew"))
    for path in races.glob("*/*.json"):
        rename(path, field, "renamed")
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        use_the_race()


# --- the record of a profile


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return Path(shutil.copy(OLD / "profile.json", tmp_path))


def show(file: Path) -> None:
    """Shows the record as `hotloop profile` does, and compares with what the file says."""
    written = json.loads(file.read_text(encoding="utf-8"))
    found = Profile.model_validate({name: value for name, value in written.items() if name != "pages"})
    assert found.model_dump(mode="json") == {name: value for name, value in written.items() if name != "pages"}
    console = Console(width=160, file=io.StringIO())
    console.print(profile_page(found))
    text = console.file.getvalue()
    assert "22.1 ms" in text and "overhead" in text
    assert "a for-loop optimizer: AdamW updates 30 parameters one by one" in text
    assert all(phase in text for phase in ("forward", "backward", "update"))
    pages = write_charts(found, file.parent / "pictures")
    assert {path.name for path in pages} >= {"phases.html", "modules.html"}


def test_a_profile_is_shown(profile: Path) -> None:
    show(profile)


@pytest.mark.parametrize("field", ["step_ms", "phases", "modules", "operators", "bound", "remedies", "optimizers"])
def test_a_renamed_field_of_a_profile_shows(profile: Path, field: str) -> None:
    rename(profile, field, "renamed")
    with pytest.raises((AssertionError, ValueError)):
        show(profile)
