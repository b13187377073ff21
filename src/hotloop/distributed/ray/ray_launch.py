"""Starts ranks where Ray places them; they join each other as those do that torch's agent starts on one machine."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from hotloop.core.processes.signals import STOP_SIGNALS, signal_handlers
from hotloop.distributed.launch import LOOPBACK, Report, launch_until_done, open_store
from hotloop.distributed.ray.actor import RankActor, RankStatus
from hotloop.distributed.ray.cluster import connect, translate_ray_errors
from hotloop.errors import PlanError
from hotloop.plan import Plan

_ENDS_S = 30.0
"""So long ranks may take to end after one has failed; torch's agent grants them the same."""
_PATIENCE_S = 5
"""So long Ray may take to find room for ranks before a line says so."""
_LOST_STATUS = RankStatus(exitcode=-signal.SIGKILL)
"""A rank whose keeper, or machine, is gone."""


def launch_on_ray(plan: Plan, command: list[str], say: Report) -> tuple[str, int]:
    """Runs a command of hotloop's as ranks in the cluster that `parallel.cluster` finds; else as `launch` does.

    All machines must see the folder that this is called in, and that of the run.

    Args:
        command: Python, which Ray's workers replace by their own, and its arguments.

    Returns:
        The run and the exit code, see `launch`.

    Raises:
        PlanError: Ray isn't there, or its cluster has not enough for the ranks.
        HotloopError: the error of the rank that failed first.
        TrainingError: ranks were killed again and again, or Ray failed.
    """
    if os.environ.get("RAY_ADDRESS", "").startswith("ray://"):
        raise PlanError(
            "RAY_ADDRESS names Ray's client server, and ranks must reach the process that starts them",
            expected="a process on a machine of the cluster",
            fix="start it there, with RAY_ADDRESS=auto or by `ray job submit`",
        )
    with redirect_stdout(sys.stderr), _connect(plan) as ray:  # it prints what befalls its machines
        kind = _device_kind(ray, plan)
        ranks = _rank_count(ray, plan, kind)
        with (
            _reserve(ray, ranks, kind, say) as group,
            open_store(_store_address(ray, group)) as store,
            tempfile.TemporaryDirectory() as logs,
        ):

            def start(name: str) -> None:
                _wait_for(group, say)
                crew = _RankGroup(ray, group, kind, logs)
                try:
                    crew.start(command, name, store)
                    failures = crew.wait_for_end()
                finally:
                    crew.close()
                if failures:
                    raise ChildFailedError(name, failures)

            return launch_until_done(start, ranks, store, logs, say)


@contextmanager
def _connect(plan: Plan) -> Iterator[Any]:
    ray = connect(plan.ranks or 1)
    try:
        with translate_ray_errors(ray):
            yield ray
    finally:
        ray.shutdown()


def _store_address(ray: Any, group: Any) -> str:
    """Where the ranks find this process: on loopback, if all are on its machine."""
    alone = set(_bundle_nodes(ray, group)) == {ray.get_runtime_context().get_node_id()}
    return LOOPBACK if alone else str(ray.util.get_node_ip_address())


def _device_kind(ray: Any, plan: Plan) -> str:
    """What the ranks compute on: as the plan says, else GPUs if the cluster has any."""
    if "device" in plan.model_fields_set:
        return plan.device.partition(":")[0]
    return "cuda" if ray.cluster_resources().get("GPU", 0) else "cpu"


def _rank_count(ray: Any, plan: Plan, kind: str) -> int:
    """How many, if the cluster has a core or a GPU for each.

    Raises:
        PlanError: it hasn't, or nobody has said how many cores to use.
    """
    have = int(ray.cluster_resources().get("GPU" if kind == "cuda" else "CPU", 0))
    what = "GPUs" if kind == "cuda" else "cores"
    ranks = plan.ranks or (have if kind == "cuda" else None)
    if ranks is None:
        raise PlanError(
            f"parallel={plan.parallel} on CPUs without a number of ranks",
            expected=f"how many, at most the cores, of which Ray's cluster has {have}",
            fix=f"use --ranks {max(2, have)}",
        )
    if not 0 < ranks <= have:
        cpu = ", or --device cpu" if kind == "cuda" else ""
        raise PlanError(
            f"{ranks} ranks, and Ray's cluster has {have} {what}",
            expected=f"at most as many ranks as {what}",
            fix=f"use --ranks {have}{cpu}" if have > 0 else "use --device cpu",
        )
    return ranks


@contextmanager
def _reserve(ray: Any, ranks: int, kind: str, say: Report) -> Iterator[Any]:
    """A core or GPU for each rank, on as few machines as have them; all at once, so that no two trainings wait for each other."""
    bundle = {"CPU": 1, "GPU": 1} if kind == "cuda" else {"CPU": 1}
    group = ray.util.placement_group([bundle] * ranks, strategy="PACK")
    try:
        _wait_for(group, say)
        yield group
    finally:
        ray.util.remove_placement_group(group)


def _wait_for(group: Any, say: Report) -> None:
    """Until Ray has room; again where it had, and has lost a machine since."""
    if group.wait(_PATIENCE_S):
        return
    say(f"waiting for Ray, whose cluster has no room for {group.bundle_count} ranks at present")
    while not group.wait(1):  # in pieces, so that Ctrl-C is heard
        pass


def _bundle_nodes(ray: Any, group: Any) -> list[str]:
    """The machine of each bundle, by Ray's name."""
    placed: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return [placed[bundle] for bundle in range(group.bundle_count)]


class _RankGroup:
    """The ranks of one start, each with its keeper; those of a machine have consecutive numbers."""

    def __init__(self, ray: Any, group: Any, kind: str, logs: str) -> None:
        self._ray, self._logs = ray, Path(logs)
        where = _bundle_nodes(ray, group)
        order = sorted(range(len(where)), key=lambda bundle: (where.index(where[bundle]), bundle))
        self._nodes = [where[bundle] for bundle in order]
        placing = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        resources = {"num_cpus": 1, "num_gpus": 1 if kind == "cuda" else 0}
        actor = ray.remote(**resources)(RankActor)
        self._keepers = [actor.options(scheduling_strategy=placing(group, bundle)).remote() for bundle in order]

    def start(self, command: list[str], name: str, store: dist.TCPStore) -> None:
        """Starts the command as ranks.

        Args:
            name: of this set of processes.

        Raises:
            PlanError: one of the machines can't.
        """
        devices = self._answers([keeper.devices.remote() for keeper in self._keepers])
        shared = {
            "MASTER_ADDR": store.host,
            "MASTER_PORT": str(store.port),
            "WORLD_SIZE": str(len(self._keepers)),
            "TORCHELASTIC_RUN_ID": name,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),  # which Ray sets to 1 by itself
        }
        own = rank_environments(self._nodes, devices)
        own[0] |= _terminal_variables()
        starting = [
            keeper.start.remote(command[1:], os.getcwd(), shared | seat, speaks=rank == 0)
            for rank, (keeper, seat) in enumerate(zip(self._keepers, own, strict=True))
        ]
        if refused := next(filter(None, self._answers(starting)), ""):
            raise _not_started_error(refused)

    def _answers(self, asked: list[Any]) -> list[str]:
        """Rank by rank; a machine of the cluster may be gone, though Ray doesn't know it yet."""
        found: list[str] = []
        for rank, answer in enumerate(asked):
            try:
                found.append(self._ray.get(answer))
            except self._ray.exceptions.RayActorError as error:
                if error.actor_init_failed:
                    raise _not_started_error(str(error).strip().splitlines()[-1]) from None
                raise ChildFailedError("", {rank: self._failure(rank, _LOST_STATUS)}) from None
        return found

    def wait_for_end(self) -> dict[int, ProcessFailure]:
        """Shows what the first rank writes, until all have ended; those that failed. Once one has, the others are to end."""
        failures: dict[int, ProcessFailure] = {}
        looks = {keeper.poll.remote(): rank for rank, keeper in enumerate(self._keepers)}
        ends = float("inf")
        with _collect_signals() as heard:
            while looks and time.monotonic() < ends:
                while heard:
                    self._send(looks.values(), heard.pop(0))
                for look in self._ray.wait(list(looks), num_returns=len(looks), timeout=0.2)[0]:
                    rank = looks.pop(look)
                    seen = self._poll_actors(look)
                    _show_output(seen)
                    if seen.exitcode is None:
                        looks[self._keepers[rank].poll.remote()] = rank
                    elif seen.exitcode:
                        failures[rank] = self._failure(rank, seen)
                if failures and ends == float("inf"):
                    ends = time.monotonic() + _ENDS_S
                    self._send(looks.values(), signal.SIGTERM)
        return failures

    def _send(self, ranks: Any, number: int) -> None:
        for rank in ranks:
            self._keepers[rank].send_signal.remote(number)

    def _poll_actors(self, look: Any) -> RankStatus:
        try:
            seen: RankStatus = self._ray.get(look)
        except self._ray.exceptions.RayActorError:  # with its machine, or killed; the rank ends with it
            return _LOST_STATUS
        return seen

    def _failure(self, rank: int, seen: RankStatus) -> ProcessFailure:
        """As torch's agent tells it, and with the files that it leaves on its machine."""
        folder = self._logs / "ray" / "attempt_0" / str(rank)
        folder.mkdir(parents=True, exist_ok=True)
        if seen.said:
            (folder / "stderr.log").write_bytes(seen.said)
        noted = folder / "error.json"
        noted.unlink(missing_ok=True)
        if seen.error:
            noted.write_bytes(seen.error)
        return ProcessFailure(local_rank=rank, pid=seen.pid, exitcode=seen.exitcode or 0, error_file=str(noted))

    def close(self) -> None:
        """Ends whatever is left."""
        self._ray.wait([keeper.close.remote() for keeper in self._keepers], num_returns=len(self._keepers), timeout=5)
        for keeper in self._keepers:
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(keeper)


def rank_environments(nodes: list[str], devices: list[str]) -> list[dict[str, str]]:
    """What torchrun would say in the environment of each rank alone; the ranks of a machine see all its GPUs, as with it.

    Args:
        nodes: the machine of each.
        devices: the GPUs set aside for each, as CUDA_VISIBLE_DEVICES names them; empty without.
    """
    found = []
    for rank, node in enumerate(nodes):
        beside = [other for other, where in enumerate(nodes) if where == node]
        visible = ",".join(devices[other] for other in beside)
        seat = {"RANK": rank, "LOCAL_RANK": beside.index(rank), "LOCAL_WORLD_SIZE": len(beside)}
        found.append({name: str(number) for name, number in seat.items()})
        if visible.strip(","):
            found[-1]["CUDA_VISIBLE_DEVICES"] = visible
    return found


def _not_started_error(why: str) -> PlanError:
    return PlanError(
        f"Ray can't start a rank: {why}",
        expected="hotloop, and this folder, on all machines of its cluster",
        fix="install it there, and train in a folder that all see",
    )


@contextmanager
def _collect_signals() -> Iterator[list[int]]:
    """Notes Ctrl-C and SIGTERM, which are for the ranks: they save and end."""
    heard: list[int] = []
    with signal_handlers(lambda number, frame: heard.append(number), *STOP_SIGNALS):
        yield heard


def _show_output(seen: RankStatus) -> None:
    for number, written in ((1, seen.out), (2, seen.err)):
        while written:
            written = written[os.write(number, written) :]


def _terminal_variables() -> dict[str, str]:
    """Has the first rank draw its progress bar for the terminal that this process writes to."""
    if not sys.stderr.isatty():
        return {}
    columns, lines = shutil.get_terminal_size()
    kept = {name: os.environ[name] for name in ("TERM", "COLORTERM") if name in os.environ}
    return {"FORCE_COLOR": "1", "COLUMNS": str(columns), "LINES": str(lines), **kept}
