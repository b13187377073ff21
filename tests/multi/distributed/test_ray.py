"""Ranks where Ray places them: real clusters of one machine and of two that are made up, and real signals."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

import hotloop
from hotloop.distributed.join import RankEnv, join_ranks
from hotloop.distributed.ray import cluster, ray_launch
from hotloop.errors import PlanError
from hotloop.plan import Plan
from hotloop.profiler import profile
from hotloop.training.run import Run
from tests.conftest import RunCli
from tests.support.processes.forked_server import Server
from tests.support.processes.process_tree import no_process_of_ray_is_left  # noqa: F401 - a fixture of this module
from tests.support.processes.resumed_training import disagreements
from tests.support.tasks.rank_tasks import images

FILE = """
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn

import hotloop

x = torch.randn(92, 6, generator=torch.Generator().manual_seed(1))


def task(trouble: str = "", pause: float = 0.0):
    taken = [0]

    def loss(output, target):
        time.sleep(pause)
        taken[0] += 1
        if taken[0] == 12 and os.environ.get("RANK") == "1" and trouble and not Path(trouble).exists():
            Path(trouble).touch()
            if trouble == "error":
                raise ValueError("the culprit has had enough")
            os.kill(os.getpid() if trouble == "kill" else os.getppid(), signal.SIGKILL)
        return nn.functional.cross_entropy(output, target)

    return hotloop.Task(
        model=lambda: nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3)),
        loss=loss,
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
        data=(x, x[:, :3].argmax(1)),
        validation=0.1,
        batch_size=20,
        epochs=4,
    )
"""

ON_RAY = ("--ranks", "2", "--set", "workforce=ray", "--checkpoint-every", "5")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the Task's file is, and the run of two ranks without Ray."""
    folder = tmp_path_factory.mktemp("on-ray")
    (folder / "task.py").write_text(FILE)
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path, server: Server) -> Path:
    process = server.start("train", "task.py", "--ranks", "2", "--run", "whole", cwd=folder)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return folder / "whole"


@pytest.fixture(scope="module")
def two_machines() -> Iterator[dict[str, str]]:
    """A cluster of two machines with a core each, which are this one; as the environment names it."""
    pytest.importorskip("ray", reason="needs hotloop[ray]")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        made.add_node(num_cpus=1)
        yield {**os.environ, "RAY_ADDRESS": made.address}
    finally:
        made.shutdown()


def ranks_of(run: Path) -> list[psutil.Process]:
    """The processes that have its folder on their command line, as ranks have, and the command itself."""
    found = psutil.process_iter(["cmdline"])
    return [one for one in found if str(run) in (one.info["cmdline"] or []) and "train" in one.info["cmdline"]]


@pytest.mark.more
def test_ranks_in_a_cluster_of_its_own_end_as_those_without_ray(whole: Path, run_cli: RunCli, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs hotloop[ray]")
    done = run_cli("train", whole.parent / "task.py", *ON_RAY, "--run", tmp_path / "run", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plan"]["workforce"] == "ray"
    assert done.stderr.count("epoch 4/4") == 1  # one rank speaks
    assert disagreements(whole, tmp_path / "run") == []
    assert ranks_of(tmp_path / "run") == []


@pytest.mark.more
@pytest.mark.parametrize("trouble", ["kill", pytest.param("keeper", marks=pytest.mark.more)])
def test_ranks_on_two_machines_start_again_where_one_is_killed_and_end_the_same(
    whole: Path, two_machines: dict[str, str], run_cli: RunCli, tmp_path: Path, trouble: str
) -> None:
    run = tmp_path / "run"
    done = run_cli(
        "train", whole.parent / "task.py", *ON_RAY, "--run", run, "-p", f"trouble={trouble}", env=two_machines
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / trouble).exists()
    assert "rank 1 was killed (SIGKILL): all 2 start again from the last checkpoint (1 of 3)" in done.stderr
    assert [event["event"] for event in Run.open(run).journal()].count("resume") == 1
    assert disagreements(whole, run) == []


@pytest.mark.more
def test_an_error_of_a_rank_is_told_in_a_line(
    folder: Path, two_machines: dict[str, str], run_cli: RunCli, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = run_cli("train", folder / "task.py", *ON_RAY, "--run", run, "-p", "trouble=error", env=two_machines)
    assert done.returncode == 1
    assert "error: rank 1: " in done.stderr
    assert "ValueError: the culprit has had enough (task.py:" in done.stderr
    assert "Traceback" not in done.stderr
    assert ranks_of(run) == []


@pytest.mark.more
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)], ids=str)
def test_what_ends_the_command_has_ranks_save_and_stop(
    folder: Path, two_machines: dict[str, str], server: Server, tmp_path: Path, number: int, code: int
) -> None:
    """To the whole group, as a terminal's Ctrl-C; or the command alone is killed."""
    run = tmp_path / "run"
    arguments = ("train", folder / "task.py", *ON_RAY, "--run", run, "-p", "pause=0.05")
    process = server.start(*arguments, cwd=tmp_path, env=two_machines)
    deadline = time.monotonic() + 120
    while not (run / "run.json").exists() or Run.open(run).reached() < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    assert len(ranks_of(run)) == 2
    if number == signal.SIGKILL:
        process.kill()
    else:
        os.killpg(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    _, alive = psutil.wait_procs(ranks_of(run), timeout=30)
    assert alive == []
    stop = Run.open(run).journal()[-1]
    if number == signal.SIGINT:
        assert (stop["event"], stop["reason"]) == ("stop", "SIGINT")
        assert stop["step"] == Run.open(run).reached()
        assert err.count("stopped (SIGINT)") == 1


def test_more_ranks_than_the_cluster_has_cores_are_refused(
    folder: Path, two_machines: dict[str, str], run_cli: RunCli
) -> None:
    done = run_cli("train", folder / "task.py", "--ranks", "3", "--set", "workforce=ray", env=two_machines)
    assert done.returncode == 1
    assert "error: 3 ranks, and Ray's cluster has 2 cores; expected at most as many ranks as cores" in done.stderr


class Rays:
    """What a cluster would say of itself."""

    def __init__(self, **resources: float) -> None:
        self.resources = resources

    def cluster_resources(self) -> dict[str, float]:
        return self.resources


@pytest.mark.parametrize(
    ("axes", "resources", "says"),
    [
        ({"ranks": 4}, {"CPU": 64, "GPU": 2}, "4 ranks, and Ray's cluster has 2 GPUs; .* --ranks 2, or --device cpu"),
        ({"ranks": 4, "device": "cuda"}, {"CPU": 64}, "4 ranks, and Ray's cluster has 0 GPUs; .* Use --device cpu"),
        ({}, {"CPU": 8}, "on CPUs without a number of ranks; expected how many, .* has 8. Use --ranks 8"),
    ],
)
def test_what_the_cluster_does_not_have_is_told(axes: dict, resources: dict[str, float], says: str) -> None:
    plan, ray = Plan(parallel="data", **axes), Rays(**resources)
    with pytest.raises(PlanError, match=says):
        ray_launch._rank_count(ray, plan, ray_launch._device_kind(ray, plan))


def test_ranks_are_as_many_as_the_cluster_has_gpus() -> None:
    plan, ray = Plan(parallel="data"), Rays(CPU=64, GPU=4)
    assert ray_launch._rank_count(ray, plan, ray_launch._device_kind(ray, plan)) == 4


def test_ranks_of_a_machine_see_all_its_gpus_and_take_one_each() -> None:
    found = ray_launch.rank_environments(["a", "a", "b"], ["3", "1", "0"])
    assert [(seat["RANK"], seat["LOCAL_RANK"], seat["LOCAL_WORLD_SIZE"]) for seat in found] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
        ("2", "0", "1"),
    ]
    assert [seat["CUDA_VISIBLE_DEVICES"] for seat in found] == ["3,1", "3,1", "0"]
    assert "CUDA_VISIBLE_DEVICES" not in ray_launch.rank_environments(["a", "a"], ["", ""])[0]


def test_without_ray_it_is_said_before_anything_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlanError, match="Ray isn't installed"):
        ray_launch.launch_on_ray(Plan(parallel="data", ranks=2), [], print)


@pytest.mark.more
@pytest.mark.parametrize("address", ["127.0.0.1:9", "nowhere"])
def test_an_address_where_ray_is_not_is_told_at_once(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    pytest.importorskip("ray", reason="needs hotloop[ray]")
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(PlanError, match=r"Ray can't be reached: .*RAY_ADDRESS"):
        ray_launch.launch_on_ray(Plan(parallel="data", ranks=2), [], print)


def test_a_driver_that_is_not_in_the_cluster_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://first:10001")
    with pytest.raises(PlanError, match="Ray's client server"):
        ray_launch.launch_on_ray(Plan(parallel="data", ranks=2), [], print)


ON_RAY_PLAN = Plan(parallel="data", ranks=2, workforce="ray")


def test_what_ray_does_not_start_says_so() -> None:
    task = images(torch.float32)
    with pytest.raises(PlanError, match=r"workforce=ray in hotloop\.fit; .* `hotloop train file.py`"):
        hotloop.fit(task, plan=ON_RAY_PLAN, progress=False)
    with pytest.raises(PlanError, match="a profile of parallel=data with workforce=ray"):
        profile.refuse_for_ranks(ON_RAY_PLAN, try_remedies=False)


def test_ranks_that_torchrun_has_started_are_not_rays(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "TORCHELASTIC_RUN_ID": "run7",
    }
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    assert RankEnv.from_env() is not None
    with (
        pytest.raises(PlanError, match="workforce=ray, and 2 ranks were started already"),
        join_ranks(ON_RAY_PLAN, print, 2),
    ):
        pass
