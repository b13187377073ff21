"""The Plan: how to run a Task, as a small frozen value with one field per axis.

A Plan imports no torch, inspects no machine, and serialises to TOML without loss.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationError

from hotloop.errors import REMOVED, PlanError, did_you_mean, shorten

Steps = Annotated[int, Field(ge=2)]
"""Number of steps in one replay."""

_AXES_OF_RANKS = ("ranks", "workforce")
"""Axes that only several processes have."""

AXES_OF_PARALLEL = {
    "local": ("sync_every",),
    "stages": ("pipeline", "microbatches", "split"),
    "async": ("staleness",),
}
"""Axes that belong to one value of `parallel`."""


def axes_dropped_with(before: str, now: str) -> tuple[str, ...]:
    """Returns the axes that lose their meaning when `parallel` changes."""
    if before == now:
        return ()
    return (*AXES_OF_PARALLEL.get(before, ()), *(_AXES_OF_RANKS if now == "none" else ()))


@dataclass(frozen=True, eq=False)
class Placement(Mapping[str, str]):
    """Devices of modules by name; equal to a dict of the same pairs.

    As text `encoder=cuda:0,head=cuda:1`, sorted by name.
    """

    pairs: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, given: Any) -> Placement | None:
        """Returns the placement of a mapping (possibly nested, as from TOML's dotted keys) or a text; None for no
        module.

        Raises:
            ValueError: another type, or a repeated module.
        """
        pairs = sorted(_parse_pairs(given) if isinstance(given, str) else _mapping_pairs(given))
        names = [name for name, _ in pairs]
        if not all(map(all, pairs)) or len(set(names)) < len(names):
            raise ValueError("modules, each once, and their devices, such as encoder=cuda:0,head=cuda:1")
        return cls(tuple(pairs)) if pairs else None

    def __getitem__(self, name: str) -> str:
        return dict(self.pairs)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(dict(self.pairs))

    def __len__(self) -> int:
        return len(self.pairs)

    def __hash__(self) -> int:
        return hash(self.pairs)

    def __str__(self) -> str:
        return ",".join(f"{name}={device}" for name, device in self.pairs)


def _parse_pairs(text: str) -> Iterator[tuple[str, str]]:
    """Yields the pairs of a text; a malformed pair has an empty name."""
    for pair in text.split(","):
        name, _, device = pair.rpartition("=")  # device names have no equals sign
        yield name.strip(), device.strip()


def _mapping_pairs(given: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields the pairs of a nested mapping; a malformed entry has an empty device."""
    if isinstance(given, Mapping) and (given or not name):
        for own, value in given.items():
            yield from _mapping_pairs(value, f"{name}.{own}".removeprefix("."))
    else:
        yield name, given.strip() if isinstance(given, str) else ""


class Plan(BaseModel):
    """How to run the training step.

    Attributes:
        device: torch's name: `cpu`, `cuda:0`, `mps`, `xpu:0`.
        precision: number format of products; parameters and updates stay fp32. `default`: torch's settings at the start
            of the run (fp32 unless changed; TF32 for convolutions on CUDA); `fp32`: regardless of the settings;
            `tf32`: fp32 operands with 10 bits of mantissa (NVIDIA); `bf16`, `fp16`: autocast, `fp16` with a scaled
            loss.
        layout: order of the dimensions of images and their weights in memory.
        residency: location of the training data. `stream`: as given, data sets loaded sample by sample; `host`: read
            once into memory; `device`: on the device, which also cuts the batches.
        compile: the compiled part. `forward`: forward and backward; `step`: the whole step with clipping and update;
            `package`: the step as a package that later runs load in milliseconds.
        rewrites: equivalent forms of parts of the network that compile to faster programs.
            `conv_in_pool`: a first convolution and its pooling as sums of shifted views; `pool_as_max`: max pooling as a
            maximum of shifted views; `mm_by_onednn`: fp32 matrix products by oneDNN; `draw_by_words`: dropout masks
            from bytes of random words; on a GPU `mm_as_sum`: tiny products as sums, and `mm_in_parts`: products of many
            terms and few results in parts; `all` applicable rewrites that are likely faster.
        graphs: a CUDA graph of a `step`, or of so many steps per replay.
        optimizer: implementation of the update: `default` (the Task's), parameter by parameter (`forloop`), over lists
            of parameters (`foreach`), or one kernel (`fused`).
        accumulation: pieces of a batch, computed one after the other to save memory; their gradients are summed.
        workers: processes that load samples of a map-style data set; None is the DataLoader's own number, else 0.
        threads: threads of one CPU operation; None is torch's choice.
        allocator: treatment of memory that a CPU step frees. `default`: the C library's; `keep`: the process keeps it
            for the next step, whereas glibc would return it to the system, which zeroes it (Linux).
        cudnn: choice of a convolution's algorithm on CUDA. `default`: by the process's setting, normally a heuristic;
            `benchmark`: cuDNN times its algorithms for each new shape. A process reuses its first choice for a
            shape. Each recording of a graph (`graphs`) chooses again, so a resumed run may differ in its last bits.
        parallel: how several processes, the ranks, share the training. `data`: each computes a part of each batch;
            `sharded`: the same, with sharded parameters and optimizer state; `async`: a parameter server and workers;
            `local`: ranks that average their weights periodically; `stages`: the model split by layers; `tensor`: split
            linear layers; `towers`: parameters on the CPU, replicas on the devices.
        ranks: number of ranks; None is the number of devices.
        sync_every: steps between averages of `local`; None is 16.
        pipeline: order of microbatches in `stages`. `gpipe`: all forward, then all backward; `1f1b`: alternating, with
            less memory.
        microbatches: pieces of a batch in `stages`; None is four per rank.
        split: first modules of the second and later `stages`, comma-separated; `auto` measures the layers, and the
            Program's plan names the result.
        staleness: largest number of batches by which workers of `async` may be apart; None for any. The server divides
            the step size of an old gradient by the updates in between.
        workforce: the ranks or `async` workers: `processes` of this machine, or processes that `ray` places in its
            cluster; Ray restarts killed workers.
        placement: devices of modules by name, in one process: `{"encoder": "cuda:0", "head": "cuda:1"}`, or as text
            `encoder=cuda:0,head=cuda:1`. The other modules, the data and the loss are on `device`; inputs and
                outputs of
            placed modules are copied between devices.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: str = "cpu"
    precision: Literal["default", "fp32", "tf32", "bf16", "fp16"] = "default"
    layout: Literal["contiguous", "channels_last"] = "contiguous"
    residency: Literal["stream", "host", "device"] = "stream"
    compile: Literal["none", "forward", "step", "package"] = "none"
    rewrites: Literal[
        "none",
        "conv_in_pool",
        "pool_as_max",
        "mm_by_onednn",
        "mm_as_sum",
        "mm_in_parts",
        "draw_by_words",
        "all",
    ] = "none"
    graphs: Literal["none", "step"] | Steps = "none"
    optimizer: Literal["default", "forloop", "foreach", "fused"] = "default"
    accumulation: int = Field(default=1, ge=1)
    workers: int | None = Field(default=None, ge=0)
    threads: int | None = Field(default=None, ge=1)
    allocator: Literal["default", "keep"] = "default"
    cudnn: Literal["default", "benchmark"] = "default"
    parallel: Literal["none", "data", "sharded", "async", "local", "stages", "tensor", "towers"] = "none"
    ranks: int | None = Field(default=None, ge=1)
    sync_every: int | None = Field(default=None, ge=1)
    pipeline: Literal["gpipe", "1f1b"] = "1f1b"
    microbatches: int | None = Field(default=None, ge=1)
    split: str = "auto"
    staleness: int | None = Field(default=None, ge=0)
    workforce: Literal["processes", "ray"] = "processes"
    placement: Annotated[
        Placement | None,
        PlainValidator(lambda given: None if given is None else Placement.of(given)),
        PlainSerializer(dict, when_used="unless-none"),
    ] = None

    def __init__(self, **axes: Any) -> None:
        """Raises PlanError with the axis and its allowed values."""
        try:
            super().__init__(**axes)
        except ValidationError as error:
            raise _explain(error) from None

    @property
    def ranked(self) -> bool:
        """Whether its processes are ranks, which a launcher starts; `async` starts its workers by itself."""
        return self.parallel not in ("none", "async")

    def with_axes(self, **axes: Any) -> Plan:
        """Returns the plan with changed axes; axes that neither sets stay unset, such as the device."""
        return Plan(**(self.model_dump(include=self.model_fields_set) | axes))

    def brief(self) -> str:
        """Returns the axes that differ from the baseline on one line: `device=cuda:0 compile=step`."""
        changed = [f"{axis}={value}" for axis, value in self if value != getattr(BASELINE, axis)]
        return " ".join(changed) or "baseline"

    def relevant_axes(self, requested: Collection[str] = ()) -> set[str]:
        """Returns the axes that say something: the device, requested axes, and axes that differ from the baseline.

        An axis that belongs to the value of another one counts with it, such as `rewrites` of a compiled plan.
        """
        changed = {axis for axis, value in self if value != getattr(BASELINE, axis)}
        belonging = [*AXES_OF_PARALLEL.get(self.parallel, ())]
        belonging += _AXES_OF_RANKS if self.parallel != "none" else ()
        belonging += ["rewrites"] if self.compile != "none" else []
        return {"device", *changed, *requested, *belonging}

    def to_toml(self, axes: Collection[str] | None = None) -> str:
        """Returns TOML without the axes that are None, since TOML has no null.

        Args:
            axes: the axes to write; default all, as a run's file has them.
        """
        return tomli_w.dumps(self.model_dump(include=None if axes is None else set(axes), exclude_none=True))

    @classmethod
    def from_toml(cls, text: str, *, source: str = "plan") -> Self:
        try:
            return cls(**tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise _not_toml(source, str(error)) from None
        except RecursionError:
            raise _not_toml(source, "it is nested too deep") from None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Returns the plan in a TOML file; a run's file sets every axis. Errors name the file."""
        if not path.is_file():
            raise PlanError(f"no plan file at {path}", expected="a TOML file", fix="check the path")
        try:
            return cls.from_toml(path.read_text(encoding="utf-8"), source=str(path))
        except UnicodeDecodeError:
            raise _not_toml(str(path), "its bytes are no text in UTF-8") from None
        except PlanError as error:
            inside = "" if str(path) in error.given else f"{path}: "
            raise PlanError(f"{inside}{error.given}", expected=error.expected, fix=error.fix) from None


BASELINE = Plan()
"""Eager on the CPU with torch's own settings."""


def _not_toml(source: str, why: str) -> PlanError:
    return PlanError(f"{source} is not TOML ({why})", expected='lines such as device = "cpu"', fix="correct that line")


def _explain(error: ValidationError) -> PlanError:
    problems = [(str(one["loc"][0]), one) for one in error.errors()]
    for axis, one in problems:
        if (instead := REMOVED.get(axis) or REMOVED.get(f"{axis}={one['input']}")) is not None:
            return PlanError(f"{axis}={shorten(one['input'])} was removed from plans", fix=instead)
    axis, first = problems[0]
    if first["type"] == "extra_forbidden":
        return PlanError(
            f"unknown axis {shorten(axis)} of a plan",
            expected="one of " + ", ".join(Plan.model_fields),
            fix=did_you_mean(axis, Plan.model_fields) or "check the spelling",
        )
    limits = first.get("ctx", {})
    if len(first["loc"]) > 1:  # no member of a union of types fits
        allowed = f"{limits.get('expected')} or a number of steps, 2 or more"
    elif "ge" in limits:
        allowed = f"{limits['ge']} or more"
    elif first["type"].startswith("int_"):
        allowed = "a whole number"
    else:
        allowed = limits.get("expected") or re.sub("^(Input should be|Value error,) ", "", first["msg"])
    near = did_you_mean(str(first["input"])[:80], re.findall(r"'(\w+)'", str(allowed)))
    return PlanError(f"{axis}={shorten(first['input'])} in the plan", expected=str(allowed), fix=near)
