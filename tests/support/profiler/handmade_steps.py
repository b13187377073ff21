"""Profiles of steps made by hand: well made, but for what is given."""

from __future__ import annotations

from typing import Any

from hotloop.core.records.profile import (
    GroupTime,
    HardwareLimits,
    LineTime,
    LoaderUse,
    OperatorTime,
    OptimizerUse,
    Profile,
    Remedy,
)
from hotloop.profiler.detectors import diagnose

LIMITS = HardwareLimits(flop_per_s={"fp32": 100e9, "fp64": 50e9}, bytes_per_s=10e9, launch_us=3.0)
STEP_MS = 10.0


def operator(name: str, ms: float, calls: float = 1, **fields: Any) -> OperatorTime:
    given = dict(phase="forward", where="train.py:10", dtype="float32", shapes=["64x256"])
    return OperatorTime(name=f"aten::{name}", ms=ms, calls=calls, **(given | fields))


def product(ms: float, **fields: Any) -> OperatorTime:
    """A matrix product that reaches half of the machine's limit."""
    return operator("addmm", ms, flops=ms / 2 * 100e6, bytes=1e5, **fields)


def line(phase: str, own_ms: float, where: str = "train.py:20", **fields: Any) -> LineTime:
    return LineTime(**(dict(where=where, function="train", phase=phase, ms=own_ms, own_ms=own_ms) | fields))


def seen(phases: dict[str, float] | None = None, **fields: Any) -> Profile:
    """A profile of a step of 10 ms that is well made, but for what is given."""
    phases = phases or {}
    rest = STEP_MS - sum(phases.values())
    filled = {"forward": 0.4 * rest, "backward": 0.6 * rest} | phases
    others = fields.pop("operators", [])
    work = [
        product(left, phase=phase, module="net")
        for phase in ("forward", "backward")
        if (left := _left(filled, phase, others))
    ]
    given = dict(
        source="train.py",
        steps=50,
        step_ms=STEP_MS,
        step_where="train.py:30",
        phases=filled,
        samples_per_step=64,
        batch=["64x256"],
        limits=LIMITS,
    )
    return Profile(**(given | {"operators": [*work, *others]} | fields))


def _left(phases: dict[str, float], phase: str, operators: list[OperatorTime]) -> float:
    """Milliseconds of a phase that none of the operators takes."""
    return max(0.0, phases[phase] - sum(one.ms for one in operators if one.phase == phase))


def remedies(profile: Profile) -> list[Remedy]:
    return diagnose(profile).remedies


def first(profile: Profile) -> Remedy:
    return remedies(profile)[0]


def loader(**fields: Any) -> LoaderUse:
    given = dict(where="train.py:8", dataset="Files", sample_where="data.py:5", samples=1000, batch_size=64, workers=0)
    return LoaderUse(**(given | {"pinned": False} | fields))


def adam(ms: float, implementation: str = "forloop", tensors: int = 100, numbers: int = 10_000, **fields: Any) -> Any:
    group = GroupTime(name="0", tensors=tensors, numbers=numbers, ms=None)
    given = dict(kind="Adam", where="train.py:13", implementation=implementation, groups=[group], steps=1, ms=ms)
    return OptimizerUse(**(given | fields))


def loop(calls: int, each_ms: float, where: str = "net.py:7", **fields: Any) -> list[OperatorTime]:
    """Small operations that a line starts again and again."""
    names = ("mul", "tanh", "add")
    return [operator(name, calls * each_ms, calls, where=where, flops=10.0, bytes=100.0, **fields) for name in names]


def table(shape: str, gradient: str = "", asked: str = "64x8", **fields: Any) -> list[OperatorTime]:
    """A look into an embedding, and the `dense` or `sparse` gradient that it gives, if any."""
    found = [operator("embedding", 0.01, shapes=[shape, asked], **(dict(where="net.py:20") | fields))]
    backward = dict(phase="backward", where="net.py:20", shapes=[asked]) | fields
    return found + ([operator(f"embedding_{gradient}_backward", 0.01, **backward)] if gradient else [])


def each_once(modules: int, **fields: Any) -> list[OperatorTime]:
    """Small operations that a line starts once for each of several modules."""
    given = dict(where="net.py:7", flops=10.0, bytes=100.0, line_runs=float(modules)) | fields
    return [operator("addmm", 0.04, module=f"net.{n}", **given) for n in range(modules)]


def as_task(profile: Profile) -> Profile:
    return profile.model_copy(update={"plan": "baseline"})
