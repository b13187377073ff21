"""Who runs: each peer's script, and which workloads it has no spelling of."""

from __future__ import annotations

from dataclasses import dataclass

from bench.speed.workloads import Workload

OURS = "hotloop"
TUTORIAL = "tutorial"

COMPILE_S = 30.0
"""What torch.compile takes for a small network whose cache is empty."""


@dataclass(frozen=True)
class Lane:
    """One peer.

    Attributes:
        name: in tables.
        module: its script in `bench.peers`.
        options: for the script.
        needs: packages of its own.
        written: which workloads it has a spelling of: `all`, `images`, or `small` for those on Fashion-MNIST.
        short: the workloads in which it takes part in a short bench, all if None: large networks have steps of seconds, and
            torch.compile takes more than its share of half an hour to compile most of them.
        compiles: whether it searches or compiles before its first step, and keeps what came of it: such a peer gets a start
            of its own before it is measured, see `searching.py`.
    """

    name: str
    module: str
    options: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    written: str = "all"
    short: tuple[str, ...] | None = None
    compiles: bool = False

    def search_s(self, workload: Workload) -> float:
        """What its first start takes on two cores, roughly."""
        return workload.search_s if self.module == "with_hotloop" else COMPILE_S

    @property
    def goes_on_unsearched(self) -> bool:
        """Whether it can run where there was no search: hotloop's `auto` makes none for a short run."""
        return self.options == ("auto",)

    def missing(self, workload: Workload, *, short: bool = False) -> str:
        """Why the peer doesn't run that workload; empty if it does."""
        if short and self.short is not None and workload.name not in self.short:
            return "left to --full, or to --peers"
        if self.written == "small" and not workload.grey:
            return "no spelling of this network without PyTorch in bench/peers"
        if self.written == "images" and not workload.data.startswith(("fashion", "images")):
            return "texts have no transform"
        return ""


_SMALL = ("W1", "W2", "W3", "W4", "W5")

PEERS = (
    Lane(TUTORIAL, "tutorial"),
    Lane("lightning", "with_lightning", needs=("lightning",)),
    Lane("accelerate", "with_accelerate", needs=("accelerate",), short=_SMALL),
    Lane("jax-scan", "with_jax", ("scan",), needs=("jax",), written="small"),
    Lane("jax-step", "with_jax", ("step",), needs=("jax",), written="small", short=()),
    Lane("keras-jax", "with_keras", ("jax",), needs=("keras", "jax"), written="small"),
    Lane("skorch", "with_skorch", needs=("skorch",), short=_SMALL),
    Lane("keras-torch", "with_keras", ("torch",), needs=("keras",), written="small"),
    Lane("transform", "transform", written="images", short=_SMALL),
    Lane("torch.compile", "compiled", short=("W1", "W4", "W8"), compiles=True),
)
"""The tutorial's loop is the first, since it says how long windows are."""


def ours(plan: str, name: str = OURS) -> Lane:
    """hotloop under a plan, see `bench/peers/with_hotloop.py`."""
    return Lane(name, "with_hotloop", (plan,), compiles=plan != "baseline")
