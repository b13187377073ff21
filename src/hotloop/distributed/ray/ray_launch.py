"""Starts ranks on the machines of a Ray cluster; the ranks join as those of torch's agent do."""

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

from hotloop.core.processes import STOP_SIGNALS, signal_handlers
from hotloop.core.reporter import Say
from hotloop.distributed.launch import LOOPBACK, launch_until_done, open_store
from hotloop.distributed.ray.actor import RankActor, RankStatus
from hotloop.distributed.ray.cluster import connect, translate_ray_errors
from hotloop.errors import PlanError
from hotloop.plan import Plan

_ENDS_S = 30.0
"""Time for ranks to end after another rank has failed, as in torch's agent."""
_PATIENCE_S = 5
"""Wait for free cores or GPUs, in seconds, before a line reports the wait."""
_LOST_STATUS = RankStatus(exitcode=-signal.SIGKILL)
"""Status of a rank whose actor or machine has ended."""


def launch_on_ray(plan: Plan, command: list[str], say: Say) -> tuple[str, int]:
    """Runs a command of hotloop as ranks in a Ray cluster, see `connect`; otherwise like `launch`.

    All machines must share the current folder and the folder of the run.

    Args:
        command: Python, which Ray's workers replace by their own, and its arguments.

    Returns:
        The run and the exit code, see `launch`.

    Raises:
        PlanError: Ray can't be reached, or the cluster is too small.
        HotloopError: the error of the rank that failed first.
        TrainingError: ranks were killed and no restart is left, or Ray failed.
    """
    if os.environ.get("RAY_ADDRESS", "").startswith("ray://"):
        raise PlanError(
            "RAY_ADDRESS names Ray's client server, and ranks must reach the process that starts them",
            expected="a process on a machine of the cluster",
            fix="start it there, with RAY_ADDRESS=auto or by `ray job submit`",
        )
    with redirect_stdout(sys.stderr), _connect(plan) as ray:  # Ray prints warnings about machines
        kind = _device_kind(ray, plan)
        ranks = _rank_count(ray, plan, kind)
        with (
            _reserve(ray, ranks, kind, say) as group,
            open_store(_store_address(ray, group)) as store,
            tempfile.TemporaryDirectory() as logs,
        ):

            def start(name: str) -> None:
                _wait_for(group, say)
                started = _RankGroup(ray, group, kind, logs)
                try:
                    started.start(command, name, store)
                    failures = started.wait_for_end()
                finally:
                    started.close()
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
    """Returns this process's address; loopback if all ranks run on this machine."""
    alone = set(_bundle_nodes(ray, group)) == {ray.get_runtime_context().get_node_id()}
    return LOOPBACK if alone else str(ray.util.get_node_ip_address())


def _device_kind(ray: Any, plan: Plan) -> str:
    if "device" in plan.model_fields_set:
        return plan.device.partition(":")[0]
    return "cuda" if ray.cluster_resources().get("GPU", 0) else "cpu"


def _rank_count(ray: Any, plan: Plan, kind: str) -> int:
    """Raises PlanError if the cluster has too few cores or GPUs, or a plan on CPUs gives no number."""
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
def _reserve(ray: Any, ranks: int, kind: str, say: Say) -> Iterator[Any]:
    """Reserves a core or GPU for each rank in one step, so that two trainings never wait for each other."""
    bundle = {"CPU": 1, "GPU": 1} if kind == "cuda" else {"CPU": 1}
    group = ray.util.placement_group([bundle] * ranks, strategy="PACK")
    try:
        _wait_for(group, say)
        yield group
    finally:
        ray.util.remove_placement_group(group)


def _wait_for(group: Any, say: Say) -> None:
    """Waits until Ray has placed all ranks, also after the loss of a machine."""
    if group.wait(_PATIENCE_S):
        return
    say(f"waiting for Ray, whose cluster has no free resources for {group.bundle_count} ranks at present")
    while not group.wait(1):  # short waits, so that Ctrl-C interrupts them
        pass


def _bundle_nodes(ray: Any, group: Any) -> list[str]:
    placed: dict[int, str] = ray.util.placement_group_table(group)["bundles_to_node_id"]
    return [placed[bundle] for bundle in range(group.bundle_count)]


class _RankGroup:
    """The ranks of one start, each with an actor; those of a machine have consecutive numbers."""

    def __init__(self, ray: Any, group: Any, kind: str, logs: str) -> None:
        self._ray, self._logs = ray, Path(logs)
        where = _bundle_nodes(ray, group)
        order = sorted(range(len(where)), key=lambda bundle: (where.index(where[bundle]), bundle))
        self._nodes = [where[bundle] for bundle in order]
        placing = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        resources = {"num_cpus": 1, "num_gpus": 1 if kind == "cuda" else 0}
        remote = ray.remote(**resources)(RankActor)
        self._actors = [remote.options(scheduling_strategy=placing(group, bundle)).remote() for bundle in order]

    def start(self, command: list[str], name: str, store: dist.TCPStore) -> None:
        """Starts the command as ranks of the launch `name`; raises PlanError if a machine can't."""
        devices = self._answers([actor.devices.remote() for actor in self._actors])
        shared = {
            "MASTER_ADDR": store.host,
            "MASTER_PORT": str(store.port),
            "WORLD_SIZE": str(len(self._actors)),
            "TORCHELASTIC_RUN_ID": name,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),  # Ray sets 1
        }
        own = rank_environments(self._nodes, devices)
        own[0] |= _terminal_variables()
        starting = [
            actor.start.remote(command[1:], os.getcwd(), shared | variables, speaks=rank == 0)
            for rank, (actor, variables) in enumerate(zip(self._actors, own, strict=True))
        ]
        if refused := next(filter(None, self._answers(starting)), ""):
            raise _not_started_error(refused)

    def _answers(self, pending: list[Any]) -> list[str]:
        """Returns the answers by rank. An actor's machine may have ended before Ray notices."""
        answers: list[str] = []
        for rank, answer in enumerate(pending):
            try:
                answers.append(self._ray.get(answer))
            except self._ray.exceptions.RayActorError as error:
                if error.actor_init_failed:
                    raise _not_started_error(str(error).strip().splitlines()[-1]) from None
                raise ChildFailedError("", {rank: self._failure(rank, _LOST_STATUS)}) from None
        return answers

    def wait_for_end(self) -> dict[int, ProcessFailure]:
        """Shows rank 0's output until all ranks end; returns the failures. After a failure all ranks get SIGTERM."""
        failures: dict[int, ProcessFailure] = {}
        polls = {actor.poll.remote(): rank for rank, actor in enumerate(self._actors)}
        ends = float("inf")
        with _collect_signals() as received:
            while polls and time.monotonic() < ends:
                while received:
                    self._send(polls.values(), received.pop(0))
                for poll in self._ray.wait(list(polls), num_returns=len(polls), timeout=0.2)[0]:
                    rank = polls.pop(poll)
                    status = self._status(poll)
                    _show_output(status)
                    if status.exitcode is None:
                        polls[self._actors[rank].poll.remote()] = rank
                    elif status.exitcode:
                        failures[rank] = self._failure(rank, status)
                if failures and ends == float("inf"):
                    ends = time.monotonic() + _ENDS_S
                    self._send(polls.values(), signal.SIGTERM)
        return failures

    def _send(self, ranks: Any, number: int) -> None:
        for rank in ranks:
            self._actors[rank].send_signal.remote(number)

    def _status(self, poll: Any) -> RankStatus:
        try:
            status: RankStatus = self._ray.get(poll)
        except self._ray.exceptions.RayActorError:  # the actor or its machine has ended, and the rank with it
            return _LOST_STATUS
        return status

    def _failure(self, rank: int, status: RankStatus) -> ProcessFailure:
        """Returns a failure and writes files in the format of torch's agent."""
        folder = self._logs / "ray" / "attempt_0" / str(rank)
        folder.mkdir(parents=True, exist_ok=True)
        if status.said:
            (folder / "stderr.log").write_bytes(status.said)
        record = folder / "error.json"
        record.unlink(missing_ok=True)
        if status.error:
            record.write_bytes(status.error)
        return ProcessFailure(local_rank=rank, pid=status.pid, exitcode=status.exitcode or 0, error_file=str(record))

    def close(self) -> None:
        self._ray.wait([actor.close.remote() for actor in self._actors], num_returns=len(self._actors), timeout=5)
        for actor in self._actors:
            with suppress(self._ray.exceptions.RayError):
                self._ray.kill(actor)


def rank_environments(nodes: list[str], devices: list[str]) -> list[dict[str, str]]:
    """Returns the variables that torchrun sets for each rank; the ranks of a machine see all its GPUs.

    Args:
        nodes: machine of each rank.
        devices: GPUs of each rank, as in CUDA_VISIBLE_DEVICES; empty without GPUs.
    """
    environments = []
    for rank, node in enumerate(nodes):
        local = [other for other, where in enumerate(nodes) if where == node]
        visible = ",".join(devices[other] for other in local)
        numbers = {"RANK": rank, "LOCAL_RANK": local.index(rank), "LOCAL_WORLD_SIZE": len(local)}
        environments.append({name: str(number) for name, number in numbers.items()})
        if visible.strip(","):
            environments[-1]["CUDA_VISIBLE_DEVICES"] = visible
    return environments


def _not_started_error(why: str) -> PlanError:
    return PlanError(
        f"Ray can't start a rank: {why}",
        expected="hotloop, and this folder, on all machines of its cluster",
        fix="install it there, and train in a folder that all see",
    )


@contextmanager
def _collect_signals() -> Iterator[list[int]]:
    received: list[int] = []
    with signal_handlers(lambda number, frame: received.append(number), *STOP_SIGNALS):
        yield received


def _show_output(status: RankStatus) -> None:
    for number, output in ((1, status.out), (2, status.err)):
        while output:
            output = output[os.write(number, output) :]


def _terminal_variables() -> dict[str, str]:
    """Makes rank 0 draw its progress bar for this process's terminal."""
    if not sys.stderr.isatty():
        return {}
    columns, lines = shutil.get_terminal_size()
    terminal = {name: os.environ[name] for name in ("TERM", "COLORTERM") if name in os.environ}
    return {"FORCE_COLOR": "1", "COLUMNS": str(columns), "LINES": str(lines), **terminal}
