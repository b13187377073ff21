"""The list of checks, the most valuable first. This file imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

CUDA, MPS, CPU = "cuda", "mps", "cpu"
PROVING = (CUDA, CPU)
"""A proof compares with float64, which `mps` lacks."""


@dataclass(frozen=True)
class Part:
    """A piece of a check with a result of its own; a run that is cut off loses at most one part.

    Attributes:
        name: within its check.
        estimate_s: expected seconds on a data-centre GPU, the start of its process included.
        limit_s: seconds after which the part is ended as failed.
        kinds: kinds of devices that the part applies to; a rehearsal runs all parts on the CPU.
    """

    name: str
    estimate_s: float
    limit_s: float
    kinds: tuple[str, ...] = (CUDA, MPS, CPU)


@dataclass(frozen=True)
class Check:
    """A check: parts that run one after the other in one process, as long as they pass.

    Attributes:
        name: on the command line.
        title: what the check proves, in a few words.
        module: has `run(part: str, setting: Setting) -> Result`.
    """

    name: str
    title: str
    module: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Job:
    """One part of one check."""

    check: Check
    part: Part

    @property
    def key(self) -> str:
        """Its name in records and on the command line, such as `train/W1`."""
        return f"{self.check.name}/{self.part.name}"


def jobs_of(checks: tuple[Check, ...]) -> list[Job]:
    return [Job(check, part) for check in checks for part in check.parts]


def _check(name: str, title: str, *parts: Part) -> Check:
    return Check(name, title, f"bench.gpu.checks.{name}", parts)


MLPS = tuple(f"mlp-1e{power}" for power in range(3, 9))
"""Perceptrons of so many parameters."""

WORKLOADS = tuple(f"W{number}" for number in range(1, 10))

CHECKS = (
    _check("devices", "measured rates of the chip", Part("rates", 25, 120)),
    _check(
        "train",
        "hotloop train --tune beside the tutorial's loop",
        Part("W1", 80, 240),
        Part("W4", 60, 240),
        Part("W6", 140, 420),
    ),
    _check(
        "check",
        "plans for this device compute what the baseline computes",
        Part("W1", 45, 180, PROVING),
        Part("W6", 90, 300, PROVING),
        Part("W7", 80, 300, PROVING),
        Part("W6-bf16", 60, 240, PROVING),
    ),
    _check("race", "race and tune find a proven plan", Part("race-W2", 60, 240), Part("tune-W4", 70, 240)),
    _check(
        "profile",
        "profile agrees with torch.profiler and names what is planted",
        Part("task", 25, 120),
        Part("script", 25, 120),
        Part("synchronisation", 20, 120),
        Part("slow-operator", 20, 120),
    ),
    _check(
        "steps",
        "a step on the CPU and on the device, by network and batch",
        *(Part(name, 12, 90) for name in WORKLOADS),
        *(Part(name, 10, 90) for name in MLPS),
    ),
    _check(
        "beside",
        "large networks beside the tutorial's loop and torch.compile",
        *(Part(f"{name}{suffix}", 70, 300) for name in ("W6", "W7", "W9") for suffix in ("", "-bf16")),
    ),
    _check(
        "resume",
        "SIGKILL and resume come to the same bits",
        Part("eager", 45, 240),
        Part("graphs", 45, 240, (CUDA,)),
    ),
    _check(
        "faults",
        "the proof finds planted faults and refuses no honest plan",
        Part("tf32-product", 12, 120, PROVING),
        Part("bf16-convolution", 10, 120, PROVING),
        Part("wrong-reduction", 15, 120, PROVING),
        Part("stale-input", 10, 120, (CUDA,)),
        Part("dropped-gradient", 15, 120, PROVING),
        *(Part(f"honest-{name}", 30, 240, PROVING) for name in ("mlp", "cnn", "residual", "gpt", "vae")),
    ),
    _check(
        "tests",
        "tests/gpu, mixed devices, several ranks",
        Part("mixed-devices", 15, 120),
        Part("suite", 150, 420),
        Part("ranks", 40, 180, (CUDA, CPU)),
    ),
)
