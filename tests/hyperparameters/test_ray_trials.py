"""Trials on a Ray cluster give the same study, also when Ray's workers are killed."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import hotloop
from hotloop.errors import StudyError
from hotloop.hyperparameters.ray_trials import run_trial
from tests.hyperparameters.test_trial_rounds import ARGUMENTS, HALVING, SPACE, check_same, start
from tests.support.tasks.studied_task import STUDIED

pytest.importorskip("ray")


def test_a_machine_without_the_folder_is_one_line(tmp_path: Path) -> None:
    error = run_trial("", "", {"folder": "studies/first"}, str(tmp_path), "studies/first/logs", [])
    assert isinstance(error, StudyError)
    assert f"has no folder {tmp_path / 'studies/first'}; expected a study on a file system that all" in str(error)


def ray_workers(pid: int) -> list[psutil.Process]:
    """The Ray workers that run a trial, of the cluster that a study has started."""
    found = []
    with suppress(psutil.NoSuchProcess):
        for one in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has ended
                found += [one] * ("run_trial" in " ".join(one.cmdline()))
    return found


@pytest.mark.more
def test_a_machine_of_a_cluster_may_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines of one core each, simulated by Ray on this machine; one of them ends while both train."""
    from ray.cluster_utils import Cluster

    (tmp_path / "task.py").write_text(STUDIED)
    whole = hotloop.study(tmp_path / "task.py", SPACE, folder=tmp_path / "whole", **HALVING)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        machine = cluster.add_node(num_cpus=1)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        fresh = ["task.py", *ARGUMENTS, "--trials", "6", "--round", "3", "--prune", "halving", "--study", "ray"]
        command = start(tmp_path, *fresh, "--jobs-on", "ray")
        while len(ray_workers(os.getpid())) < 2 and command.poll() is None:  # a core runs one trial
            time.sleep(0.05)
        assert command.poll() is None, command.communicate()[1]
        cluster.remove_node(machine, allow_graceful=False)
        lines = command.communicate()[1]
        assert command.returncode == 0, lines
    finally:
        cluster.shutdown()
    check_same(whole, hotloop.study(tmp_path / "task.py", resume=tmp_path / "ray", progress=False))


@pytest.mark.more
def test_trials_on_ray_give_the_same_study_after_kills(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(STUDIED)
    whole = hotloop.study(tmp_path / "task.py", SPACE, folder=tmp_path / "whole", **HALVING)
    fresh = ["task.py", *ARGUMENTS, "--trials", "6", "--round", "3", "--prune", "halving", "--study", "ray"]
    command = start(tmp_path, *fresh, "--jobs-on", "ray")
    kills = 0
    while kills < 2 and command.poll() is None:
        if workers := ray_workers(command.pid):
            os.kill(workers[0].pid, signal.SIGKILL)
            kills += 1
            time.sleep(1)
        time.sleep(0.05)
    assert kills == 2, command.communicate()[1]
    while not ray_workers(command.pid) and command.poll() is None:
        time.sleep(0.05)
    command.kill()
    command.wait()
    command = start(tmp_path, "--resume", "ray", "--jobs-on", "ray", "--jobs", "3")
    lines = command.communicate()[1]
    assert command.returncode == 0, lines
    check_same(whole, hotloop.study(tmp_path / "task.py", resume=tmp_path / "ray", progress=False))
