"""How a process becomes a rank: it finds the others by what torchrun's agent says in the environment."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from hotloop.distributed.crash_frames import recording_frames
from hotloop.distributed.heartbeat import Heartbeat, silent_ranks
from hotloop.distributed.rank_progress import RANK_PROGRESS
from hotloop.distributed.watchdog import LONGEST_WAIT_S, Watchdog, record_collectives
from hotloop.distributed.world import SINGLE_RANK, World, rank_loss_error
from hotloop.errors import PlanError, RankLostError, TrainingError

# Where these are first imported when there is a group already, as torch._dynamo does, it becomes a default argument of
# theirs: its threads outlive its end, and one that lets go of a tensor while Python shuts down aborts the process.
if dist.is_available():
    import torch.distributed.nn.functional

LAUNCH_ID_PREFIX = "hotloop-"
"""How the name of a launch of hotloop's own begins; under the user's torchrun it is another."""

RUN, BEGAN = "hotloop/run", "hotloop/began"
"""Under which keys the store holds the run, and when it began, in s since 1970."""
_EXTRA_TIMEOUT_S = 60.0
"""torch's own timeout comes so much later than that of the watchdog, which says more."""


@dataclass(frozen=True)
class RankEnv:
    """What the environment says of this process.

    Attributes:
        rank, ranks: among all processes.
        local_rank, local_ranks: among those of this machine.
        host, port: of the store through which the ranks find each other.
        launch: a name for this set of processes, the same for all; in a store that outlives them a restart changes it.
        restarts: how often this machine's agent has started its processes again; it may differ between machines.
        outlives: whether an agent holds the store, so that it outlives the ranks; else the first rank opens it.
        elastic: whether torchrun's agent, or hotloop's own, has started it.
        watched: whether an agent of hotloop's own tells the user what happens.
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
        """This process' own; None if nobody has started it as a rank.

        Raises:
            PlanError: only a part of it is there, or it is no number.
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
                f"RANK and WORLD_SIZE are in the environment, and something is amiss with {error}",
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
        """Whether this process must open the store."""
        return self.rank == 0 and not self.outlives_launcher

    @property
    def without_restarts(self) -> bool:
        """Whether torchrun may start the ranks again, and nothing would tell them of the run that they were in."""
        return self.is_elastic and not self.is_watched and not self.outlives_launcher


@dataclass(frozen=True)
class RankSession:
    """A rank among the others, for as long as `join_process_group` lasts; or a process that trains alone.

    Attributes:
        restarts: how often this machine's agent has started its processes again after a loss; not counted are those times
            when machines came or went.
        started: when this machine's torchrun began, and when this process did, in s since 1970; None without torchrun.
        forgetful: see `RankEnv`.
        limit_s: the user's limit on the wait of processes for each other, in seconds; None without such a limit.
    """

    world: World = SINGLE_RANK
    store: dist.Store | None = None
    restarts: int = 0
    is_started: tuple[float, float] | None = None
    without_history: bool = False
    limit_s: float | None = None

    def begun(self) -> str | None:
        """The run of ranks that were started before, and cut short; None if these are the first."""
        return run_in(self.store) if self.store is not None else None

    def is_cut_short(self, named: Path, theirs: bool = False) -> float | None:
        """When the first torchrun began, in s since 1970, if ranks that it started before these began the run named; or None.

        The store that knew of the run has ended with them, where torchrun doesn't share its own.

        Args:
            theirs: they may have gone on with one that was there before.
        """
        if self.is_started is None:
            return None
        agent, own = self.is_started
        again, before_ms, last_ms = self.world.all_reduce_max([self.restarts, -int(1e3 * agent), int(1e3 * own)])
        before, last = -before_ms / 1e3, last_ms / 1e3

        def find() -> float | None:
            record = named / "run.json"
            made = record.stat().st_mtime if record.is_file() else 0.0
            recent = before <= made
            return before if (recent and made < last) or (again and (recent or theirs)) else None

        return self.world.broadcast_object(find)

    def begin(self, run: str, at: float | None = None) -> float:
        """Notes the run, for ranks that may have to go on with it, and when these or ranks before them began it.

        Args:
            at: when that was, in s since 1970; now unless it is said, or noted already.

        Returns:
            How long ago it was, in s.
        """
        if self.store is None:
            return 0.0
        return self.world.broadcast_object(partial(self._note, self.store, run, time.time() if at is None else at))

    @staticmethod
    def _note(store: dist.Store, run: str, at: float) -> float:
        store.set(RUN, run)
        return time.time() - float(store.compare_set(f"{BEGAN}/{run}", "", str(at)))


def run_in(store: dist.Store) -> str | None:
    """The run that ranks have noted there."""
    return store.get(RUN).decode() if store.check([RUN]) else None


@contextmanager
def join_process_group(
    seat: RankEnv, device: str, say: Callable[[str], None], limit_s: float | None = None
) -> Iterator[RankSession]:
    """Makes this process a rank, until the end.

    Args:
        device: the kind that the plan computes on: `cpu` or `cuda`.
        say: is told of ranks that give no sign of life.
        limit_s: how long ranks wait for each other in training; None for as long as follows from a step.

    Raises:
        PlanError: this machine has fewer GPUs than ranks.
    """
    if device == "cuda":
        _check_gpus(seat)
    timeout = timedelta(seconds=max(LONGEST_WAIT_S, limit_s or 0.0) + _EXTRA_TIMEOUT_S)
    record_collectives()
    store = dist.TCPStore(seat.host, seat.port, is_master=seat.serves_store, wait_for_workers=False, timeout=timeout)
    if seat.is_watched or seat.host in ("127.0.0.1", "localhost"):
        _use_store_interface(seat.host, seat.port)
    if device == "cuda":
        torch.cuda.set_device(seat.local_rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=dist.PrefixStore(f"hotloop/{seat.launch}", store),
        rank=seat.rank,
        world_size=seat.ranks,
        timeout=timeout,
    )
    # One for each thread, so that none waits for another.
    own, watched = store.clone(), store.clone()  # type: ignore[attr-defined]
    beats = Heartbeat(own, seat.launch, seat.rank, seat.ranks, say)
    watchdog = Watchdog(watched, seat.launch, seat.rank, seat.ranks, limit_s, partial(_exit_process, seat))
    try:
        with recording_frames(), beats.beat(), watchdog.watch(), _name_lost_ranks(seat, store):
            check_sums(World(seat.rank, seat.ranks), device)
            yield RankSession(
                World(seat.rank, seat.ranks), store, seat.restarts, _start_time(seat), seat.without_restarts, limit_s
            )
            RANK_PROGRESS.phase = "end"
            dist.barrier()  # whoever is ready first stays until the last word of the others has come through
    finally:
        dist.destroy_process_group()


def _exit_process(seat: RankEnv, error: TrainingError, code: int) -> None:
    """Ends the process at once: its main thread waits where nothing can interrupt it."""
    get_error_handler().record_exception(error)
    if not seat.is_watched:
        sys.stderr.write(f"error: {error}\n")
        sys.stderr.flush()
    os._exit(code)


@contextmanager
def _name_lost_ranks(seat: RankEnv, store: dist.Store) -> Iterator[None]:
    """Says which ranks were lost, where no agent of hotloop's own will."""
    try:
        yield
    except Exception as error:
        if seat.is_watched or (loss := rank_loss_error(error, seat.rank)) is None:
            raise
        try:
            names = ", ".join(f"rank {rank}" for rank in silent_ranks(store, seat.launch, seat.ranks))
        except RuntimeError:
            names = "the machine that holds torchrun's store" if seat.outlives_launcher else "rank 0"
        raise RankLostError(f"{loss.given}: {names} gives no sign of life" if names else loss.given) from error


def _start_time(seat: RankEnv) -> tuple[float, float] | None:
    if not seat.is_elastic or seat.is_watched:
        return None
    own = psutil.Process()
    parent = own.parent()
    return (own if parent is None else parent).create_time(), own.create_time()


def check_sums(world: World, device: str) -> None:
    """Adds numbers up whose sum is known; torch's gloo has once averaged wrongly without a word.

    Raises:
        TrainingError: the sum is another.
    """
    number = torch.arange(1, 6, dtype=torch.float64)
    for kind in dict.fromkeys(("cpu", device)):
        total = ((world.rank + 1) * number).to(kind)
        dist.all_reduce(total)
        expected = world.ranks * (world.ranks + 1) // 2 * number
        if not torch.equal(total.cpu(), expected):
            raise TrainingError(
                f"torch.distributed adds up wrongly on {kind}: {total.tolist()}",
                expected=f"{expected.tolist()}, the sum over {world.ranks} ranks",
                fix="use another version of torch, or parallel=none",
            )


def _check_gpus(seat: RankEnv) -> None:
    gpus = torch.cuda.device_count()
    if seat.local_ranks > gpus:
        raise PlanError(
            f"{seat.local_ranks} ranks on a machine with {gpus} CUDA device{'' if gpus == 1 else 's'}",
            expected="one of its own for each rank",
            fix=f"use --ranks {gpus} (--nproc-per-node of torchrun)"
            if gpus > 1
            else "use one process, or --device cpu",
        )


def _use_store_interface(host: str, port: int) -> None:
    """Has gloo and NCCL talk by the device that leads to the store; on loopback the rest of the network can't reach them."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, port))  # which sends nothing
        own = way.getsockname()[0]
    names = (name for name, places in psutil.net_if_addrs().items() if any(p.address == own for p in places))
    for name in list(names)[:1]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def threads_per_rank(seat: RankEnv) -> int | None:
    """Threads for each rank's operations, so that the ranks of a machine don't fight for its cores; None: as asked."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, (psutil.cpu_count(logical=False) or 1) // seat.local_ranks)
