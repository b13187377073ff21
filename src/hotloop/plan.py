"""Plan: *how* to run a Task, as a small frozen value.

One field group per axis. A Plan imports no torch, asks no machine, and serialises to TOML and back without loss, so
that it can be written, compared and kept anywhere.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, PlainValidator, ValidationError

from hotloop.errors import PlanError, did_you_mean, shorten

Steps = Annotated[int, Field(ge=2)]
"""In one replay."""

AXES_OF_PARALLEL = {
    "local": ("sync_every", "outer"),
    "stages": ("pipeline", "microbatches", "split"),
    "async": ("staleness", "correction"),
}
"""Axes that say something of one value of `parallel` alone."""


def axes_dropped_with(before: str, now: str) -> tuple[str, ...]:
    """Axes of a plan that say nothing any more where its `parallel` was one and is another now."""
    if before == now:
        return ()
    return (*AXES_OF_PARALLEL.get(before, ()), *(["ranks", "workforce"] if now == "none" else []))


@dataclass(frozen=True, eq=False)
class Placement(Mapping[str, str]):
    """Modules of a model, by name, and the devices that they are on; equal to a dict of the same.

    As text `encoder=cuda:0,head=cuda:1`, in the order of the names.
    """

    pairs: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, given: Any) -> Placement | None:
        """What a user gave as a mapping, which may be nested as TOML's dotted keys are, or as text; None for no module.

        Raises:
            ValueError: it is neither, or it names a module twice.
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
    """The pairs of a text; what isn't a pair is an empty name."""
    for pair in text.split(","):
        name, _, device = pair.rpartition("=")  # no device has an equals sign in its name
        yield name.strip(), device.strip()


def _mapping_pairs(given: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The pairs of a mapping; what is none, and no device, is an empty one."""
    if isinstance(given, Mapping) and (given or not name):
        for own, value in given.items():
            yield from _mapping_pairs(value, f"{name}.{own}".removeprefix("."))
    else:
        yield name, given.strip() if isinstance(given, str) else ""


class Plan(BaseModel):
    """How to run the training step.

    Attributes:
        engine: what computes the step. `eager`: PyTorch, operation by operation. `arrays`: written out in array
            operations on NumPy or CuPy, without autograd, for models of known layers.
        device: where it runs, as torch names it: `cpu`, `cuda:0`, `mps`, `xpu:0`.
        precision: the number format of the arithmetic. `default`: torch's settings as they are when a run begins, by
            default fp32, and TF32 in convolutions on CUDA; `fp32`: fp32 whatever the settings say; `tf32`: products of
            fp32 numbers with 10 bits of mantissa (NVIDIA); `bf16` and `fp16`: autocast, `fp16` with a scaled loss.
            Parameters and updates stay fp32.
        layout: the order of the dimensions of images and their weights in memory.
        residency: where the training data lies. `stream`: as it was given, arrays in memory, data sets loaded sample
            by sample; `host`: read once into memory; `device`: the same on the device, batches cut there.
        compile: what is compiled. `forward`: forward and backward; `step`: the whole step with clipping and update;
            `package`: the same, as a package that a later run loads in milliseconds.
        rewrites: equal forms of parts of the network that the compiler makes faster programs of. `pool_first`: ReLU after
            max pooling; `conv_in_pool`: a first convolution with the pooling behind it as sums of shifted views;
            `conv_as_gemm`: a first convolution of few channels as a matrix product; `pool_as_max`: max pooling as a maximum
            of shifted views; `mm_by_onednn`: products of fp32 matrices by oneDNN; `draw_by_words`: masks of dropout out
            of the bytes of random words; on a GPU `mm_as_sum`: very small products as sums, and `mm_in_parts`: products of
            many terms and few results as several; `all` of them that apply and are likely to win.
        graphs: a CUDA graph of the whole `step`, or of so many steps in one replay.
        optimizer: how the update is written: `default` (as the Task's factory has it), parameter by parameter
            (`forloop`), over lists of them (`foreach`), or as one kernel (`fused`).
        accumulation: pieces that a batch is cut into, so that less memory is needed; their gradients add up.
        workers: processes that load samples of a map-style data set; None keeps the DataLoader's own number, else 0.
        threads: threads of one operation on the CPU; None leaves torch's choice.
        allocator: what becomes of the memory that a step on the CPU frees. `default`: as the C library has it; `keep`: it
            stays for the next step, where glibc would give it back to the system and have it zeroed again (Linux).
        cudnn: how cuDNN chooses the algorithm of a convolution on CUDA. `default`: as the process has it, by a heuristic
            unless the program chose otherwise; `benchmark`: cuDNN times its algorithms on each new shape and takes the
            fastest. A process keeps its first choice for a shape. A recorded step (`graphs`) chooses anew while it is
            recorded, and each recording may choose another algorithm, so a resumed run may differ in its last bits.
        parallel: how several processes, the ranks, share the training. `data`: each computes a part of each batch;
            `sharded`: the same, with parameters and optimizer state spread over the ranks; `async`: a parameter server
            and workers; `local`: ranks that average their weights now and then; `stages`: the model split by layers;
            `tensor`: linear layers split; `towers`: parameters on the CPU, replicas on the devices.
        ranks: how many there are; None as many as there are devices.
        sync_every: steps after which the ranks of `local` average their weights; None for 16.
        outer: what ranks of `local` do with the average. `none`: go on from it; `nesterov`: take a step towards it, with
            momentum, as DiLoCo does.
        pipeline: in which order the ranks of `stages` take microbatches. `gpipe`: all forward, then all backward; `1f1b`:
            forward and backward in turn, which keeps less in memory; `interleaved`: the same with two stages per rank.
        microbatches: pieces that `stages` cut a batch into; None for four per rank.
        split: with which modules the second and later of the `stages` begin, with commas between; `auto` measures the
            layers, and the Program's plan then names them.
        staleness: more than so many batches no worker of `async` begins while another computes one; None for any.
        correction: what the server of `async` does about gradients of parameters that have changed since. `divide`: the
            step size is divided by the updates in between; `compensate`: the gradient is corrected for them; `both`;
            `none`.
        workforce: what the ranks, or the workers of `async`, are: `processes` of this machine, or where `ray` places them
            in its cluster; there workers come back when they are killed.
        placement: modules on devices of their own, by name, in one process: `{"encoder": "cuda:0", "head": "cuda:1"}`, or
            as text `encoder=cuda:0,head=cuda:1`. The rest of the model, the data and the loss are on `device`; what a
            placed module is called with and what it puts out are copied there and back.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: Literal["eager", "arrays"] = "eager"
    device: str = "cpu"
    precision: Literal["default", "fp32", "tf32", "bf16", "fp16"] = "default"
    layout: Literal["contiguous", "channels_last"] = "contiguous"
    residency: Literal["stream", "host", "device"] = "stream"
    compile: Literal["none", "forward", "step", "package"] = "none"
    rewrites: Literal[
        "none",
        "pool_first",
        "conv_in_pool",
        "conv_as_gemm",
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
    outer: Literal["none", "nesterov"] = "none"
    pipeline: Literal["gpipe", "1f1b", "interleaved"] = "1f1b"
    microbatches: int | None = Field(default=None, ge=1)
    split: str = "auto"
    staleness: int | None = Field(default=None, ge=0)
    correction: Literal["divide", "compensate", "both", "none"] = "divide"
    workforce: Literal["processes", "ray"] = "processes"
    placement: Annotated[
        Placement | None,
        PlainValidator(lambda given: None if given is None else Placement.of(given)),
        PlainSerializer(dict, when_used="unless-none"),
    ] = None

    def __init__(self, **axes: Any) -> None:
        """Raises PlanError naming the axis and what it allows."""
        try:
            super().__init__(**axes)
        except ValidationError as error:
            raise _explain(error) from None

    @property
    def ranked(self) -> bool:
        """Whether its processes are ranks, which an agent starts; `async` starts its workers by itself."""
        return self.parallel not in ("none", "async")

    def with_axes(self, **axes: Any) -> Plan:
        """This plan with some axes changed; those that neither it nor `axes` set stay open, such as the device."""
        return Plan(**{**self.model_dump(include=self.model_fields_set), **axes})

    def brief(self) -> str:
        """The axes that differ from the baseline, on one line: `device=cuda:0 compile=step`."""
        changed = [f"{axis}={value}" for axis, value in self if value != getattr(BASELINE, axis)]
        return " ".join(changed) or "baseline"

    def to_toml(self) -> str:
        """The plan as TOML; axes left to their default None are left out, since TOML has no null."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))

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
        """The plan in a TOML file; a run's own names every axis, so that all of them are set."""
        if not path.is_file():
            raise PlanError(f"no plan file at {path}", expected="a TOML file", fix="check the path")
        try:
            return cls.from_toml(path.read_text(encoding="utf-8"), source=str(path))
        except UnicodeDecodeError:
            raise _not_toml(str(path), "its bytes are no text in UTF-8") from None


BASELINE = Plan()
"""Eager on the CPU under torch's own settings, as a textbook would write it."""


def _not_toml(source: str, why: str) -> PlanError:
    return PlanError(f"{source} is not TOML ({why})", expected='lines such as device = "cpu"', fix="correct that line")


def _explain(error: ValidationError) -> PlanError:
    first = error.errors()[0]
    axis = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return PlanError(
            f"unknown axis {shorten(axis)} of a plan",
            expected="one of " + ", ".join(Plan.model_fields),
            fix=did_you_mean(axis, Plan.model_fields) or "check the spelling",
        )
    limits = first.get("ctx", {})
    if len(first["loc"]) > 1:  # of several kinds of values none fits
        allowed = f"{limits.get('expected')} or a number of steps, 2 or more"
    elif "ge" in limits:
        allowed = f"{limits['ge']} or more"
    elif first["type"].startswith("int_"):
        allowed = "a whole number"
    else:
        allowed = limits.get("expected") or re.sub("^(Input should be|Value error,) ", "", first["msg"])
    near = did_you_mean(str(first["input"])[:80], re.findall(r"'(\w+)'", str(allowed)))
    return PlanError(f"{axis}={shorten(first['input'])} in the plan", expected=str(allowed), fix=near)
