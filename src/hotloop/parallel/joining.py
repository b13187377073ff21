"""How a process becomes a rank: it finds the others by what torchrun's agent says in the environment."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist

from hotloop.errors import PlanError, TrainingError
from hotloop.parallel.beats import Beats
from hotloop.parallel.world import ALONE, World

LAUNCHED = "hotloop-"
"""How the name of a launch of hotloop's own begins; under the user's torchrun it is another."""

RUN = "hotloop/run"
"""Under which key the store holds the run."""
_WAITS = timedelta(minutes=30)
"""For a rank that has stopped and may go on; the end of one is heard at once."""


@dataclass(frozen=True)
class Seat:
    """What the environment says of this process.

    Attributes:
        rank, ranks: among all processes.
        local_rank, local_ranks: among those of this machine.
        host, port: of the store through which the ranks find each other.
        launch: a name for this set of processes, the same for all; in a store that outlives them a restart changes it.
        restarts: how often this machine's agent has started its processes again; it may differ between machines.
        serves: whether this process must open the store, since no agent does.
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
    serves: bool
    watched: bool

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> Seat | None:
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
            serves=rank == 0 and not outlives,
            watched=launch.startswith(LAUNCHED),
        )


@dataclass(frozen=True)
class Joined:
    """A rank among the others, for as long as `joined` lasts; or a process that trains alone.

    Attributes:
        restarts: how often this machine's agent has started its processes again.
        since: when that agent began, in s since 1970.
    """

    world: World = ALONE
    store: dist.Store | None = None
    restarts: int = 0
    since: float = 0.0

    def begun(self) -> str | None:
        """The run of ranks that were started before, and cut short; None if these are the first."""
        return run_in(self.store) if self.store is not None else None

    def launched(self) -> tuple[int, float]:
        """How often an agent has started its ranks again, at most, and when the first agent began, in s since 1970."""
        restarts, before_ms = self.world.largest([self.restarts, -int(1e3 * self.since)])
        return restarts, -before_ms / 1e3

    def begin(self, run: str) -> None:
        """Notes the run, for ranks that may have to go on with it."""
        if self.store is not None and self.world.first:
            self.store.set(RUN, run)


def run_in(store: dist.Store) -> str | None:
    """The run that ranks have noted there."""
    return store.get(RUN).decode() if store.check([RUN]) else None


@contextmanager
def joined(seat: Seat, device: str, say: Callable[[str], None]) -> Iterator[Joined]:
    """Makes this process a rank, until the end.

    Args:
        device: the kind that the plan computes on: `cpu` or `cuda`.
        say: is told of ranks that give no sign of life.
    """
    store = dist.TCPStore(seat.host, seat.port, is_master=seat.serves, wait_for_workers=False, timeout=_WAITS)
    if seat.host in ("127.0.0.1", "localhost"):
        _keep_to_loopback()
    if device == "cuda":
        torch.cuda.set_device(seat.local_rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=dist.PrefixStore(f"hotloop/{seat.launch}", store),
        rank=seat.rank,
        world_size=seat.ranks,
        timeout=_WAITS,
    )
    own = store.clone()  # type: ignore[attr-defined]  # so that no thread waits for the other
    beats = Beats(own, seat.launch, seat.rank, seat.ranks, say)
    try:
        with beats.beating():
            check_sums(World(seat.rank, seat.ranks), device)
            yield Joined(World(seat.rank, seat.ranks), store, seat.restarts, _agent_began())
            dist.barrier()  # whoever is ready first stays until the last word of the others has come through
    finally:
        dist.destroy_process_group()


def _agent_began() -> float:
    parent = psutil.Process().parent()
    return time.time() if parent is None else parent.create_time()


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


def _keep_to_loopback() -> None:
    """Has gloo and NCCL listen where the rest of the network can't reach them."""
    names = (name for name, places in psutil.net_if_addrs().items() if any(p.address == "127.0.0.1" for p in places))
    for name in list(names)[:1]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def threads_for(seat: Seat) -> int | None:
    """Threads for each rank's operations, so that the ranks of a machine don't fight for its cores; None: as asked."""
    if "OMP_NUM_THREADS" in os.environ:
        return None
    return max(1, (psutil.cpu_count(logical=False) or 1) // seat.local_ranks)
