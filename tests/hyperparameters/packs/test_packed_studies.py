"""A study with packs: the trials of the study without packs up to rounding, the same bits after kills, reasons in the record."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hotloop
from hotloop.errors import StudyError
from hotloop.hyperparameters.study import Study
from hotloop.hyperparameters.study_folder import StudyFolder
from hotloop.hyperparameters.study_options import StudyOptions
from hotloop.training.run import Run
from tests.hyperparameters.test_trial_rounds import check_same, kill, start
from tests.support.processes.resumed_training import disagreements, last_checkpoint
from tests.support.tasks.studied_task import STUDIED

SPACE = {"lr": "1e-2..1:log", "width": [4, 6]}
LONG = {"lr": "1e-2..1:log", "epochs": 60}
LONG_ARGUMENTS = ["-p", "lr=1e-2..1:log", "-p", "epochs=60", "--trials", "3", "--round", "3"]
ONE_ROUND = dict(trials=3, round_size=3, progress=False)
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


def events(run: str | Path) -> list[str]:
    return [row["event"] for row in Run.open(run).journal()]


def epochs_done(path: Path) -> int:
    return sum(len(metrics.read_text().splitlines()) for metrics in path.glob("trials/*/metrics.jsonl"))


@pytest.fixture(scope="module")
def whole(folder: Path) -> Study:
    return hotloop.study(folder / "task.py", LONG, folder=folder / "whole", pack="auto", **ONE_ROUND)


@pytest.mark.slow
def test_the_same_packed_study_gives_the_same_bits(folder: Path, whole: Study) -> None:
    assert len([one for one in whole.trials if one.packed]) == 3
    check_same(
        whole, hotloop.study(folder / "task.py", LONG, folder=folder / "again", pack="auto", jobs=2, **ONE_ROUND)
    )


@pytest.mark.more
@pytest.mark.slow
def test_kills_change_no_bit_of_a_packed_study(folder: Path, whole: Study, tmp_path: Path) -> None:
    """Each kill hits a pack that trains, after an epoch since the last kill."""
    path, victims, begun = tmp_path / "killed", ["trial", "trial", "command"], []
    command = start(folder, "task.py", *LONG_ARGUMENTS, "--pack", "auto", "--study", str(path))
    for victim in victims:
        begun.append(epochs_done(path))
        while epochs_done(path) <= begun[-1]:
            assert command.poll() is None, command.communicate()[1]
            time.sleep(0.01)
        assert kill(command, victim)
    command.wait()
    assert epochs_done(path) < sum(len(one.curve) for one in whole.trials)
    check_same(whole, hotloop.study(folder / "task.py", resume=path, pack=8, progress=False))
    assert events(whole.trials[0].runs[0]).count("packed") == 1
    assert events(path / "trials/0000").count("packed") == 1 + len(victims)


TRAIN_PACK = """
import itertools, os, signal, sys
from pathlib import Path
from hotloop.core.records.study import PackPlan
from hotloop.hyperparameters.packs.pack_process import train_pack
from hotloop.hyperparameters.packs.packed_step import Pack
from hotloop.hyperparameters.study_folder import StudyFolder
from hotloop.training.cadence import CheckpointCadence

path, last, steps, advance = Path(sys.argv[1]), int(sys.argv[2]), itertools.cycle([7, 11, 13]), Pack.advance

def advance_or_die(self, active, count):
    if self.programs[active[0]].position.step >= last:
        os.kill(os.getpid(), signal.SIGKILL)
    advance(self, active, count)

CheckpointCadence.parse = classmethod(lambda cls, text: cls(steps=next(steps)))
Pack.advance = advance_or_die
record = StudyFolder.open(path).record
(pack,) = PackPlan.model_validate_json((path / "packs/round-0000.json").read_bytes()).packs
train_pack(str(path), record, None, pack, [str(path / f"trials/{one.number:04d}") for one in pack], None)
"""


@pytest.mark.more
@pytest.mark.slow
def test_trials_go_on_from_checkpoints_of_different_steps(whole: Study, tmp_path: Path) -> None:
    """A kill leaves each trial with a checkpoint of its own step; those with fewer steps train first."""
    for name in ("study.json", "source", "packs/round-0000.json"):
        copy = shutil.copytree if (whole.path / name).is_dir() else shutil.copy
        (tmp_path / name).parent.mkdir(exist_ok=True)
        copy(whole.path / name, tmp_path / name)
    runs = [Path(one.runs[0]) for one in whole.trials]
    for last, code in ((25, -signal.SIGKILL), (90, -signal.SIGKILL), (10**6, 0)):
        ended = subprocess.run([sys.executable, "-c", TRAIN_PACK, str(tmp_path), str(last)], capture_output=True)
        assert ended.returncode == code, ended.stderr.decode()
        if code:
            steps = {last_checkpoint(Run.open(tmp_path / "trials" / run.name)).state.position.step for run in runs}
            assert len(steps) == 3
    assert [disagreements(tmp_path / "trials" / run.name, run) for run in runs] == [[]] * 3


@pytest.mark.more
@pytest.mark.slow
def test_failed_trials_leave_their_pack(folder: Path) -> None:
    errors = {"nan": "holds NaN", "raising": "no such mode", "exit in the model": "exit('no model')"}
    space = {"mode": ["plain", *errors], "lr": [0.01, 0.02], "epochs": 2}
    study = hotloop.study(folder / "task.py", space, folder=folder / "failed", sampler="grid", pack=4, progress=False)
    modes = {mode: [one for one in study.trials if one.params["mode"] == mode] for mode in space["mode"]}
    assert all(one.state == "complete" and len(one.curve) == 2 for one in modes["plain"])
    assert all({one.number for one in modes["plain"]} <= set(one.packed) for one in modes["plain"])
    for mode, error in errors.items():
        assert all(one.state == "failed" and error in one.error for one in modes[mode])
    assert all(one.alone for mode in ("raising", "exit in the model") for one in modes[mode])


@pytest.mark.slow
def test_a_study_goes_on_with_its_own_packs_alone(folder: Path, packed: Study) -> None:
    with pytest.raises(StudyError, match=r"pack=4, and the study has 8.*Leave the option out"):
        hotloop.study(folder / "task.py", resume=packed.path, pack=4, progress=False)
    with pytest.raises(StudyError, match=r"--jobs-on ray for a study with --pack 8.*--jobs-on processes"):
        StudyOptions(jobs_on="ray").check_same(StudyFolder.open(packed.path).record, packed.path)


def test_packs_on_ray_are_an_error() -> None:
    with pytest.raises(StudyError, match=r"--jobs-on ray for a study with --pack auto.*--jobs-on processes"):
        StudyOptions(pack="auto", jobs_on="ray").check()


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
