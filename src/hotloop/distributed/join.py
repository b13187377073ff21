"""Joins this process to the ranks of its plan, in the process group that torchrun's environment describes."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from hotloop.core.format import parse_seconds
from hotloop.core.hardware.devices import resolve_device
from hotloop.core.plan_request import PlanRequest
from hotloop.distributed.watchdog import (
    LONGEST_WAIT_S,
    RANK_PROGRESS,
    Heartbeat,
    Watchdog,
    record_collectives,
    recording_frames,
    silent_ranks,
)
from hotloop.distributed.world import SINGLE_RANK, World, rank_loss_error
from hotloop.errors import HotloopError, PlanError, RankLostError, TrainingError
from hotloop.plan import Plan

# torch 2.13: an import after the group exists, as by torch._dynamo, stores the group in default arguments. Its threads
# then outlive it, and a thread that frees a tensor while Python shuts down aborts the process.
if dist.is_available():
    import torch.distributed.nn.functional

LAUNCH_ID_PREFIX = "hotloop-"
"""Begin of the names of hotloop's own launches; the user's torchrun uses other names."""

RUN, BEGAN = "hotloop/run", "hotloop/began"
"""Keys of the store for the run, and for its begin in seconds since 1970."""
_EXTRA_TIMEOUT_S = 60.0
"""torch's own timeout follows the watchdog's by this time, since the watchdog reports more."""


@dataclass(frozen=True)
class RankEnv:
    """The environment variables of a rank.

    Attributes:
        rank, ranks: number of this process and of processes.
        local_rank, local_ranks: the same on this machine.
        host, port: address of the store in which the ranks find each other.
        launch: name of this set of processes; changes with a restart if the store outlives the ranks.
        restarts: number of restarts by this machine's agent; may differ between machines.
        outlives_launcher: whether an agent owns the store, so that the store outlives the ranks; else rank 0 opens it.
        is_elastic: whether torchrun's agent, or hotloop's own, started this process.
        is_watched: whether hotloop's own agent started this process and reports to the user.
    """

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    host: str
    port: int
    launch: str
    restarts: int
    outlives_launcher: bool
    is_elastic: bool
    is_watched: bool

    @classmethod
    def from_env(cls, environment: Mapping[str, str] = os.environ) -> RankEnv | None:
        """Returns the environment of this process; None if the process is no rank.

        Raises:
            PlanError: variables are missing, or are no numbers.
        """
        if "RANK" not in environment or "WORLD_SIZE" not in environment:
            return None
        try:
            rank, ranks, port = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
            restarts = int(environment.get("TORCHELASTIC_RESTART_COUNT", 0))
            local = int(environment.get("LOCAL_RANK", rank)), int(environment.get("LOCAL_WORLD_SIZE", ranks))
            host = environment["MASTER_ADDR"]
        except (KeyError, ValueError) as error:
            raise PlanError(
                f"RANK and WORLD_SIZE are in the environment, and these are missing or wrong: {error}",
                expected="what torchrun sets",
                fix="start with torchrun or --ranks, or unset RANK and WORLD_SIZE",
            ) from None
        launch = environment.get("TORCHELASTIC_RUN_ID", "")
        outlives = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(
            rank,
            ranks,
            *local,
            host,
            port,
            launch=f"{launch}/{restarts if outlives else 0}",
            restarts=restarts,
            outlives_launcher=outlives,
            is_elastic=bool(launch),
            is_watched=launch.startswith(LAUNCH_ID_PREFIX),
        )

    @property
    def serves_store(self) -> bool:
        return self.rank == 0 and not self.outlives_launcher

    @property
    def without_restarts(self) -> bool:
        """Whether a restart by torchrun would lose the name of the run."""
        return self.is_elastic and not self.is_watched and not self.outlives_launcher


@dataclass(frozen=True)
class RankSession:
    """A rank within `join_process_group`, or a process that trains alone.

    Attributes:
        restarts: number of restarts by this machine's agent after a loss, without those after machines came or went.
        started: start of this machine's torchrun and of this process, in seconds since 1970; None without torchrun.
        without_history: see `RankEnv.without_restarts`.
        limit_s: the user's limit on the wait of processes for each other, in seconds; None without such a limit.
    """

    world: World = SINGLE_RANK
    store: dist.Store | None = None
    restarts: int = 0
    started: tuple[float, float] | None = None
    without_history: bool = False
    limit_s: float | None = None

    def begun(self) -> str | None:
        """Returns the run that earlier ranks began and left unfinished; None for the first ranks."""
        return run_in(self.store) if self.store is not None else None

    def cut_short_at(self, named: Path, theirs: bool = False) -> float | None:
        """Returns the start of the first torchrun if its earlier ranks began the run `named`; else None.

        A torchrun without a shared store loses the run's name with its ranks: start times replace the name.

        Args:
            theirs: whether the earlier ranks may have resumed an older run.

        Returns:
            Seconds since 1970, or None.
        """
        if self.started is None:
            return None
        agent, own = self.started
        again, before_ms, last_ms = self.world.all_reduce_max([self.restarts, -int(1e3 * agent), int(1e3 * own)])
        before, last = -before_ms / 1e3, last_ms / 1e3

        def find() -> float | None:
            record = named / "run.json"
            made = record.stat().st_mtime if record.is_file() else 0.0
            recent = before <= made
            return before if (recent and made < last) or (again and (recent or theirs)) else None

        return self.world.broadcast_object(find)

    def begin(self, run: str, at: float | None = None) -> float:
        """Records the run for a restart, and when these or earlier ranks began the run.

        Args:
            at: the begin in seconds since 1970, unless recorded already; None for now.

        Returns:
            The time since the begin, in seconds.
        """
        if self.store is None:
            return 0.0
        return self.world.broadcast_object(partial(self._note, self.store, run, time.time() if at is None else at))

    @staticmethod
    def _note(store: dist.Store, run: str, at: float) -> float:
        store.set(RUN, run)
        return time.time() - float(store.compare_set(f"{BEGAN}/{run}", "", str(at)))


def run_in(store: dist.Store) -> str | None:
    """Returns the run that ranks recorded in the store."""
    return store.get(RUN).decode() if store.check([RUN]) else None


@contextmanager
def join_process_group(
    env: RankEnv, device: str, say: Callable[[str], None], limit_s: float | None = None
) -> Iterator[RankSession]:
    """Makes this process a rank within the context.

    Args:
        device: kind of the plan's device: `cpu` or `cuda`.
        say: reports ranks without heartbeat.
        limit_s: longest wait of ranks for each other in training; None derives the limit from the longest step.

    Raises:
        PlanError: this machine has fewer GPUs than ranks.
    """
    if device == "cuda":
        _check_gpus(env)
    timeout = timedelta(seconds=max(LONGEST_WAIT_S, limit_s or 0.0) + _EXTRA_TIMEOUT_S)
    record_collectives()
    store = dist.TCPStore(env.host, env.port, is_master=env.serves_store, wait_for_workers=False, timeout=timeout)
    if env.is_watched or env.host in ("127.0.0.1", "localhost"):
        _use_store_interface(env.host, env.port)
    if device == "cuda":
        torch.cuda.set_device(env.local_rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=dist.PrefixStore(f"hotloop/{env.launch}", store),
        rank=env.rank,
        world_size=env.ranks,
        timeout=timeout,
    )
    # One store for each thread, so that no thread waits for another.
    own, watched = store.clone(), store.clone()  # type: ignore[attr-defined]
    beats = Heartbeat(own, env.launch, env.rank, env.ranks, say)
    watchdog = Watchdog(watched, env.launch, env.rank, env.ranks, limit_s, partial(_exit_process, env))
    try:
        with recording_frames(), beats.beat(), watchdog.watch(), _name_lost_ranks(env, store):
            check_sums(World(env.rank, env.ranks), device)
            yield RankSession(
                World(env.rank, env.ranks), store, env.restarts, _start_time(env), env.without_restarts, limit_s
            )
            RANK_PROGRESS.phase = "end"
            dist.barrier()  # no rank ends before the last messages of the others have arrived
    finally:
        dist.destroy_process_group()


def _exit_process(env: RankEnv, error: TrainingError, code: int) -> None:
    """Ends the process at once: the main thread waits in C++, where no exception reaches it."""
    get_error_handler().record_exception(error)
    if not env.is_watched:
        sys.stderr.write(f"error: {error}\n")
        sys.stderr.flush()
    os._exit(code)


@contextmanager
def _name_lost_ranks(env: RankEnv, store: dist.Store) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if env.is_watched or (loss := rank_loss_error(error, env.rank)) is None:
            raise
        try:
            names = ", ".join(f"rank {rank}" for rank in silent_ranks(store, env.launch, env.ranks))
        except RuntimeError:
            names = "the machine that holds torchrun's store" if env.outlives_launcher else "rank 0"
        raise RankLostError(f"{loss.given}: {names} gives no sign of life" if names else loss.given) from error


def _start_time(env: RankEnv) -> tuple[float, float] | None:
    if not env.is_elastic or env.is_watched:
        return None
    own = psutil.Process()
    parent = own.parent()
    return (own if parent is None else parent).create_time(), own.create_time()


def check_sums(world: World, device: str) -> None:
    """Checks an all_reduce with a known sum: a version of gloo averaged wrongly without an error.

    Raises:
        TrainingError: the sum is wrong.
    """
    number = torch.arange(1, 6, dtype=torch.float64)
    for kind in dict.fromkeys(("cpu", device)):
        total = ((world.rank + 1) * number).to(kind)
        dist.all_reduce(total)
        expected = world.ranks * (world.ranks + 1) // 2 * number
        if not torch.equal(total.cpu(), expected):
            raise TrainingError(
                f"torch.distributed computes wrong sums on {kind}: {total.tolist()}",
                expected=f"{expected.tolist()}, the sum over {world.ranks} ranks",
                fix="use another version of torch, or parallel=none",
            )


def _check_gpus(env: RankEnv) -> None:
    gpus = torch.cuda.device_count()
    if env.local_ranks > gpus:
        raise PlanError(
            f"{env.local_ranks} ranks on a machine with {gpus} CUDA device{'' if gpus == 1 else 's'}",
            expected="one device for each rank",
            fix=f"use --ranks {gpus} (--nproc-per-node of torchrun)"
            if gpus > 1
            else "use one process, or --device cpu",
        )


def _use_store_interface(host: str, port: int) -> None:
    """Makes gloo and NCCL use the interface that leads to the store; loopback keeps other machines out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        address = probe.getsockname()[0]
    names = (name for name, places in psutil.net_if_addrs().items() if any(p.address == address for p in places))
    for name in list(names)[:1]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def plan_to_launch(plan: Plan | str | Path | None, axes: Mapping[str, Any], resume: Path | None = None) -> Plan | None:
    """Returns the plan if it needs ranks and this process is no rank yet; None if this process can train.

    Args:
        plan, axes: the requested plan.
        resume: the run to resume; its plan counts if `plan` is None.
    """
    if plan is None and resume is not None and (resume / "plan.toml").is_file():
        plan = resume / "plan.toml"
    wanted = PlanRequest.from_value(plan, axes).plan
    return None if not wanted.ranked or RankEnv.from_env() is not None else wanted


@contextmanager
def join_ranks(
    plan: Plan, say: Callable[[str], None], named: int | None, rank_timeout: str | None = None
) -> Iterator[RankSession]:
    """Joins the ranks if the plan needs ranks; records an error of this rank for torch's agent.

    Args:
        say: reports ranks without heartbeat.
        named: number of ranks that the user requested, or None.
        rank_timeout: longest wait of ranks for each other in training, and of an asynchronous server for its workers,
            such as `5m`; None for 60 s, or 20 times the longest step if that is longer.

    Raises:
        PlanError: `rank_timeout` is no time, or the number of started ranks differs from the plan's.
    """
    env = RankEnv.from_env()
    limit_s = None if rank_timeout is None else parse_seconds(rank_timeout, "rank-timeout")
    if not plan.ranked:
        if env is not None and env.ranks > 1 and plan.parallel == "async":
            raise PlanError(
                f"{env.ranks} ranks were started, and parallel=async starts its workers by itself",
                expected="a single process",
                fix="start it without torchrun; --ranks says how many workers there are",
            )
        if env is not None and env.ranks > 1:
            raise PlanError(
                f"{env.ranks} ranks were started, and nothing says how they share the training",
                expected="a plan for them",
                fix="use --set parallel=data",
            )
        yield RankSession(limit_s=limit_s)
        return
    if env is None:
        raise PlanError(f"parallel={plan.parallel} in a process that is no rank", fix="start it with --ranks")
    if plan.workforce == "ray" and not env.is_watched:
        raise PlanError(
            f"workforce=ray, and {env.ranks} ranks were started already",
            expected="ranks that Ray starts",
            fix="use --set workforce=processes, or start it without torchrun",
        )
    if named is not None and named != env.ranks:
        raise PlanError(f"ranks={named} in the plan, and {env.ranks} were started", fix="make both the same")
    if plan.threads is None and "OMP_NUM_THREADS" not in os.environ:  # a machine's ranks share its cores
        torch.set_num_threads(max(1, (psutil.cpu_count(logical=False) or 1) // env.local_ranks))
    with (
        _record_rank_error(env),
        join_process_group(env, resolve_device(plan).device.partition(":")[0], say, limit_s) as ranks,
    ):
        yield ranks


_AGENT_WAIT_S = 10.0
"""Time for the agent to end this rank: the agent then finds the killed rank and names that."""


@contextmanager
def _record_rank_error(env: RankEnv) -> Iterator[None]:
    """Records an error for the agent, which reports errors of hotloop itself."""
    try:
        yield
    except Exception as raised:
        error = rank_loss_error(raised, env.rank) or raised
        get_error_handler().record_exception(error)
        if isinstance(error, RankLostError) and env.is_watched:
            with suppress(KeyboardInterrupt):
                time.sleep(_AGENT_WAIT_S)
        if isinstance(error, HotloopError) and env.is_watched:
            raise SystemExit(1) from raised
        raise error from raised
