"""Who runs: each peer's script, and which workloads it has no spelling of."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from importlib.metadata import version

from bench.speed.workloads import Workload

OURS = "hotloop"
TUTORIAL = "tutorial"
BASELINE = f"{OURS}:baseline"
"""hotloop's own eager step, which runs where `--plans auto/baseline` asks for it."""

COMPILE_S = 30.0
"""What torch.compile takes for a small network whose cache is empty."""

BRIEF_S = 8.0
"""What JAX takes to start and compile one."""


@dataclass(frozen=True)
class Lane:
    """One peer.

    Attributes:
        name: in tables.
        module: its script in `bench.peers`.
        options: for the script.
        needs: packages of its own.
        cpu_alone: why it can't be had on another device; empty where it can.
        written: which workloads it has a spelling of: `all`, `images`, or `small` for those on Fashion-MNIST.
        short: the workloads in which it takes part in a short bench, all if None: large networks have steps of seconds, and
            torch.compile takes more than its share of half an hour to compile most of them.
        compiles: whether it searches or compiles before its first step, and keeps what came of it: such a peer gets a start
            of its own before it is measured, see `searching.py`.
        brief: whether that takes but seconds: then it is measured without where there was none.
    """

    name: str
    module: str
    options: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    cpu_alone: str = ""
    written: str = "all"
    short: tuple[str, ...] | None = None
    compiles: bool = False
    brief: bool = False

    def search_s(self, workload: Workload) -> float:
        """What its first start takes on two cores, roughly."""
        if self.module == "with_hotloop":
            return workload.search_s
        return BRIEF_S if self.brief else COMPILE_S

    @property
    def goes_on_unsearched(self) -> bool:
        """Whether it can run where there was no search; hotloop's `tune` then runs `UNSEARCHED`."""
        return self.brief or self.options == ("tune",)

    def missing(self, workload: Workload, device: str = "cpu", *, short: bool = False) -> str:
        """Why the peer doesn't run that workload there; empty if it does."""
        if device != "cpu" and self.cpu_alone:
            return self.cpu_alone
        if short and self.short is not None and workload.name not in self.short:
            return "left to --full, or to --peers"
        if self.written == "small" and not workload.grey:
            return "no spelling of this network without PyTorch in bench/peers"
        if self.written == "images" and not workload.data.startswith(("fashion", "images")):
            return "texts have no transform"
        return ""


_NO_JAX = "the jax that the bench extra installs computes on the CPU alone"

_SMALL = ("W1", "W2", "W3", "W4", "W5")

PEERS = (
    Lane(TUTORIAL, "tutorial"),
    Lane("lightning", "with_lightning", needs=("lightning",)),
    Lane("accelerate", "with_accelerate", needs=("accelerate",), short=_SMALL),
    Lane(
        "jax-scan",
        "with_jax",
        ("scan",),
        needs=("jax",),
        cpu_alone=_NO_JAX,
        written="small",
        compiles=True,
        brief=True,
        short=("W1", "W2", "W4", "W5"),  # a step of W3 takes it 6 s
    ),
    Lane(
        "jax-step",
        "with_jax",
        ("step",),
        needs=("jax",),
        cpu_alone=_NO_JAX,
        written="small",
        compiles=True,
        brief=True,
        short=("W1", "W2", "W3"),
    ),
    Lane(
        "keras-jax",
        "with_keras",
        ("jax",),
        needs=("keras", "jax"),
        cpu_alone=_NO_JAX,
        written="small",
        compiles=True,
        brief=True,
    ),
    Lane("skorch", "with_skorch", needs=("skorch",), short=_SMALL),
    Lane("keras-torch", "with_keras", ("torch",), needs=("keras",), written="small"),
    Lane("transform", "transform", written="images", short=_SMALL),
    Lane("torch.compile", "compiled", short=("W1", "W4", "W8"), compiles=True),
)
"""The tutorial's loop is the first, since it says how long windows are."""


def library(name: str) -> str:
    """What a peer runs: JAX's two ways are one peer, of which a user takes the faster."""
    return "jax" if name in ("jax-scan", "jax-step") else name


def versions_of_peers() -> dict[str, str]:
    """Of the packages that are there."""
    names = sorted({name for peer in PEERS for name in peer.needs} | {"torch", "numpy"})
    return {name: version(name) for name in names if importlib.util.find_spec(name) is not None}


SEARCHING = ("tune",)
"""These search before the first step; `hotloop train --plan auto`, which searches while it trains, is `TRAIN_AUTO`."""

TRAIN_AUTO = "train-auto"

REDUCED = "tune,precision=bf16"
"""With fewer bits, which nobody gets without asking for them."""

FEWER_BITS = f"{OURS}:{REDUCED}"
"""Its lane."""

UNSEARCHED = ("unasked",)
"""hotloop as it trains where no plan was asked for: the plan of the rules."""


def base_of(plan: str) -> str:
    """What `tune,precision=bf16` sets axes on top of; the baseline where they stand alone."""
    first, _, _ = plan.partition(",")
    return "baseline" if "=" in first else first


def axes_of(plan: str) -> dict[str, str]:
    """`compile=package,threads=1` by axis, without the name of the plan that they are set on top of."""
    pairs = (pair.partition("=") for pair in plan.split(",") if "=" in pair)
    return {axis: value for axis, _, value in pairs}


def default_plans(device: str) -> str:
    """Of hotloop: on an accelerator also what it takes where fewer bits are allowed."""
    return "tune" if device == "cpu" else f"tune/{REDUCED}"


def ours(plan: str, name: str = OURS) -> Lane:
    """hotloop under a plan, see `bench/peers/with_hotloop.py`."""
    compiles = base_of(plan) in SEARCHING or axes_of(plan).get("compile", "none") != "none"
    return Lane(name, "with_hotloop", (plan,), compiles=compiles)
