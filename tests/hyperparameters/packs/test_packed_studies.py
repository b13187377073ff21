"""A study with packs: the trials of the study without packs up to rounding, the same bits after kills, reasons in the record."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

import hotloop
from hotloop.errors import StudyError
from hotloop.hyperparameters.study import Study
from hotloop.hyperparameters.study_options import StudyOptions
from hotloop.training.run import Run
from tests.hyperparameters.test_trial_rounds import check_same, kill, start
from tests.support.tasks.studied_task import STUDIED

SPACE = {"lr": "1e-2..1:log", "width": [4, 6]}
ARGUMENTS = ["-p", "lr=1e-2..1:log", "-p", "width=4,6", "--trials", "5", "--round", "5", "--prune", "halving"]
SETTINGS = dict(trials=5, round_size=5, pruner="halving", progress=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed")
    (path / "task.py").write_text(STUDIED)
    return path


@pytest.fixture(scope="module")
def packed(folder: Path) -> Study:
    return hotloop.study(folder / "task.py", SPACE, folder=folder / "packed", pack="auto", **SETTINGS)


@pytest.mark.slow
def test_packed_trials_are_the_trials_alone_up_to_rounding(folder: Path, packed: Study) -> None:
    alone = hotloop.study(folder / "task.py", SPACE, folder=folder / "alone", **SETTINGS)
    assert [one.state for one in packed.trials] == [one.state for one in alone.trials]
    for one, other in zip(packed.trials, alone.trials, strict=True):
        assert one.params == other.params
        assert one.curve == pytest.approx(other.curve, rel=1e-4)
    together = [one for one in packed.trials if one.packed]
    assert len(together) >= 2
    for one in together:
        assert one.number in one.packed
        assert one.proof.startswith("fp32-equivalent")
        (event, *_) = [row for row in Run.open(one.runs[0]).journal() if row["event"] == "packed"]
        assert event["trials"] == one.packed
        assert event["proof"] == one.proof
    assert all(one.packed or one.alone for one in packed.trials)
    assert packed.result.exact


@pytest.mark.slow
def test_kills_change_no_bit_of_a_packed_study(folder: Path, packed: Study, tmp_path: Path) -> None:
    path, draws = tmp_path / "killed", random.Random(3)
    command = start(folder, "task.py", *ARGUMENTS, "--pack", "auto", "--study", str(path))
    while not list(path.glob("trials/*/journal.jsonl")):
        assert command.poll() is None, command.communicate()[1]
        time.sleep(0.01)
    killed = []
    for victim in ("trial", "command"):
        time.sleep(draws.uniform(0.0, 0.3))
        killed += [victim] * kill(command, victim)
        if victim == "command":
            command.wait()
    assert killed == ["trial", "command"]
    check_same(packed, hotloop.study(folder / "task.py", resume=path, progress=False))


@pytest.mark.slow
def test_failed_trials_leave_their_pack(folder: Path) -> None:
    space = {"mode": ["nan", "plain", "raising"], "lr": [0.01, 0.02], "epochs": 2}
    study = hotloop.study(folder / "task.py", space, folder=folder / "failed", sampler="grid", pack=4, progress=False)
    states = {(one.params["mode"], one.state) for one in study.trials}
    assert states == {("nan", "failed"), ("plain", "complete"), ("raising", "failed")}
    assert all(len(one.packed) == 2 for one in study.trials if one.params["mode"] == "plain")
    assert all(one.alone and one.error for one in study.trials if one.params["mode"] != "plain")


@pytest.mark.parametrize("pack", [1, "many", "-2"])
def test_another_pack_is_an_error(pack: str | int) -> None:
    with pytest.raises(StudyError, match=f"--pack {pack}.*none, auto, or a number of trials from 2"):
        StudyOptions(pack=pack).check()


def test_a_plan_of_its_own_excludes_packs() -> None:
    StudyOptions(pack="auto", plan="baseline", axes={"device": "cpu"}).check()
    with pytest.raises(StudyError, match="--pack auto with a plan of its own"):
        StudyOptions(pack="auto", plan="auto").check()


def test_an_axis_that_a_packed_step_lacks_is_an_error() -> None:
    with pytest.raises(StudyError, match="--pack 4 with compile=package"):
        StudyOptions(pack=4, axes={"compile": "package"}).check()
