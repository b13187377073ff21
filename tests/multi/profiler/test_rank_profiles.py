"""A profile of ranks: what they wait and send is in phases of its own, and what would hide that is caught."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.core.records.profile import Profile
from hotloop.distributed.comm_stats import CommMeter
from hotloop.distributed.world import World
from hotloop.lowering.steps.gradient_check import LaterGradients
from hotloop.plan import Plan
from hotloop.profiler.detectors import diagnose
from hotloop.profiler.task_profile import record_program
from hotloop.profiler.timers.modules import ModuleClock
from hotloop.tuning.races.runner import Runner
from tests.conftest import RunCli
from tests.multi.cli.test_train import FILE
from tests.support.processes.rank_processes import of_ranks

pytestmark = pytest.mark.more

PLAN = Plan(parallel="data", ranks=2)
STEPS, BATCH = 8, 4
SLOW, PAUSE_S = 1, 0.03
"""A rank, and how long it takes for each of its samples."""

Plant = Callable[[pytest.MonkeyPatch], None]


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 10 * BATCH

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == SLOW:
            time.sleep(PAUSE_S)
        return torch.full((6,), float(place)), place % 2


class Large(nn.Module):
    """Many parameters, and next to nothing to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(2_000_000))

    def forward(self, x: Tensor) -> Tensor:
        return x.mean() * self.scale.sum() + x


def task(model: Callable[[], nn.Module], **fields: Any) -> hotloop.Task:
    given: dict[str, Any] = dict(
        model=model, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3), batch_size=BATCH, epochs=50
    )
    return hotloop.Task(**given | fields)


def slow_data() -> hotloop.Task:
    """The first thing that the ranks do together is to normalise, in the middle of the forward pass."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))

    return task(model, loss=nn.CrossEntropyLoss(), data=Samples())


def large() -> hotloop.Task:
    x = torch.randn(10 * BATCH, 2, generator=torch.Generator().manual_seed(1))
    return task(Large, loss=nn.MSELoss(), data=(x, x))


def blocks() -> hotloop.Task:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))

    x = torch.randn(160, 6, generator=torch.Generator().manual_seed(1))
    return task(model, loss=nn.CrossEntropyLoss(), data=(x, (x[:, 0] > 0).long()), batch_size=16)


def nothing(patch: pytest.MonkeyPatch) -> None:
    """As it is."""


def waits_in_the_norm(patch: pytest.MonkeyPatch) -> None:
    """Else the ranks wait for each other where they decide whether to compare the batch."""
    patch.setattr(LaterGradients, "check", lambda self, *arguments: None)


def waits_not_counted(patch: pytest.MonkeyPatch) -> None:
    waits_in_the_norm(patch)

    @contextmanager
    def silent(self: CommMeter) -> Iterator[None]:
        yield

    patch.setattr(CommMeter, "measure_waiting", silent)


def sums_not_counted(patch: pytest.MonkeyPatch) -> None:
    begin = CommMeter.begin
    patch.setattr(CommMeter, "begin", lambda self, *, last=False: begin(self))


def waits_as_work_of_modules(patch: pytest.MonkeyPatch) -> None:
    waits_in_the_norm(patch)
    patch.setattr(ModuleClock, "pause", lambda self: None)


CASES: dict[str, tuple[Callable[[], hotloop.Task], dict[str, Any], Plant]] = {
    "slow data": (slow_data, {}, waits_in_the_norm),
    "slow data before a decision": (slow_data, {}, nothing),
    "large": (large, {}, nothing),
    "sharded": (large, {"parallel": "sharded"}, nothing),
    "towers": (large, {"parallel": "towers"}, nothing),
    "local": (large, {"parallel": "local", "sync_every": 4}, nothing),
    "tensor": (blocks, {"parallel": "tensor"}, nothing),
    "stages": (blocks, {"parallel": "stages", "microbatches": 2}, nothing),
    "waits not counted": (slow_data, {}, waits_not_counted),
    "waits as work": (slow_data, {}, waits_as_work_of_modules),
    "sums not counted": (large, {}, sums_not_counted),
}


@pytest.fixture(scope="session")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Profile]]:
    def compute(world: World) -> dict[str, Profile]:
        found, warm_up = {}, Runner.warm_up
        for name, (make, axes, plant) in CASES.items():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Runner, "warm_up", lambda self: warm_up(self, 0.05))
                plant(patch)
                program = hotloop.lower(make(), PLAN.with_axes(**axes))
                found[name] = record_program(program, steps=STEPS, source=name)
        return found

    of_each = of_ranks(tmp_path_factory.mktemp("ranks"), PLAN, compute)
    return {name: [found[name] for found in of_each] for name in CASES}


def waits_for_the_slow_rank(profile: Profile) -> bool:
    """Whether the wait of the other one is about what the slow one takes longer."""
    quick, slow = profile.ranks[1 - SLOW].phases, profile.ranks[SLOW].phases
    longer = slow["data"] - quick["data"]
    return profile.slowest == SLOW and 0.5 * longer < quick.get("waiting", 0.0) < 2 * longer


def modules_are_left_out(profile: Profile) -> bool:
    """Whether the wait in the norm is no time of the norm's."""
    (norm,) = [one for one in profile.modules if one.kind == "BatchNorm1d"]
    return (norm.forward_ms or 0.0) < 0.5 * profile.phases["waiting"]


def sums_are_communication(profile: Profile) -> bool:
    return all(one.phases.get("communication", 0.0) > one.phases["backward"] for one in profile.ranks)


@pytest.mark.parametrize("case", CASES)
def test_the_phases_of_each_rank_add_up(profiles: dict[str, list[Profile]], case: str) -> None:
    first, other = profiles[case]
    assert first.steps == other.steps == STEPS
    assert first.ranks == other.ranks and first.slowest == other.slowest
    assert (first.phases, first.step_ms) == (first.ranks[0].phases, first.ranks[0].step_ms)
    for rank, own in zip(first.ranks, profiles[case], strict=True):
        assert sum(rank.phases.values()) == pytest.approx(rank.step_ms)
        assert rank.phases == own.phases


def test_a_slow_rank_is_named_with_what_it_does_longer(profiles: dict[str, list[Profile]]) -> None:
    profile = profiles["slow data"][0]
    assert waits_for_the_slow_rank(profile) and modules_are_left_out(profile)
    assert waits_for_the_slow_rank(profiles["slow data before a decision"][0])
    assert [one.name for one in profile.modules] == ["", "0", "1", "2", "(loss)"]
    assert profile.samples_per_step == BATCH
    found = diagnose(profile)
    assert found.bound == "waiting"
    assert any(f"Rank {SLOW} spends" in line and "more in data" in line for line in found.bound_evidence)
    assert found.remedies[0].cause == f"waiting: rank {SLOW} is slower than the others"
    assert "more in data" in found.remedies[0].evidence and found.remedies[0].gain > 0


def test_sums_of_many_parameters_bound_the_step(profiles: dict[str, list[Profile]]) -> None:
    assert sums_are_communication(profiles["large"][0])
    found = diagnose(profiles["large"][0])
    assert found.bound == "communication"
    assert {"parallel": "local"} in [one.axes for one in found.remedies]


def test_clocks_that_are_not_heard_are_missed(profiles: dict[str, list[Profile]]) -> None:
    assert not waits_for_the_slow_rank(profiles["waits not counted"][0])
    assert not modules_are_left_out(profiles["waits as work"][0])
    assert not sums_are_communication(profiles["sums not counted"][0])


def test_each_way_to_share_a_step_says_what_it_can(profiles: dict[str, list[Profile]]) -> None:
    for case in ("sharded", "towers", "tensor"):
        assert all(one.phases["communication"] > 0 for one in profiles[case][0].ranks)
    assert all(one.communication_ms for one in profiles["towers"][0].ranks)
    assert all(one.communication_ms and one.waiting_ms is None for one in profiles["tensor"][0].ranks)
    stages, local = profiles["stages"][0], profiles["local"][0]
    assert all(one.phases["waiting"] > 0 for one in stages.ranks) and stages.modules == []
    assert all(one.waiting_ms and one.communication_ms is None for one in stages.ranks)
    assert all(one.communication_ms and "communication" not in one.phases for one in local.ranks)
    assert "the ranks average their weights every 4 steps" in local.notes[-1]


def test_from_python_and_by_the_command(tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up = Runner.warm_up
    monkeypatch.setattr(Runner, "warm_up", lambda self: warm_up(self, 0.05))
    found = hotloop.profile(slow_data(), plan=PLAN, steps=STEPS, progress=False)
    assert found.plan == "parallel=data ranks=2" and found.slowest == SLOW and found.bound == "waiting"
    (tmp_path / "task.py").write_text(FILE)
    done = run_cli("profile", "task.py", "--ranks", "2", "--steps", STEPS, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert len(document["ranks"]) == 2 and document["threads"] is None
    for rank in document["ranks"]:
        assert rank["waiting_ms"] > 0 and sum(rank["phases"].values()) == pytest.approx(rank["step_ms"])
