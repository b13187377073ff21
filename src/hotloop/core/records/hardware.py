"""Hardware: the facts of one machine, as frozen records. No torch, and nobody is asked here: see `probe`.

Every number is a `Figure`, which knows its unit and where it comes from. What isn't known is None or missing:
it is never filled in with the number of another chip.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, Self, get_args

from hotloop.errors import HotloopError

FORMAT = "hotloop.hardware"
VERSION = 1

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp64")

Unit = Literal["flop_per_s", "bytes_per_s", "bytes", "us"]
Source = Literal["measured", "datasheet", "os"]


class _Record:
    """What all records here have in common: read back, an unknown field is a mistake."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True)
class Figure(_Record):
    """One number with its unit and its source.

    Attributes:
        value: finite and not negative.
        unit: `flop_per_s`, `bytes_per_s`, `bytes` or `us`.
        source: `measured` here, told by the operating system or driver (`os`), or copied from a `datasheet`.
        when: UTC time at which it was taken, ISO 8601; empty for a datasheet.
        how: what was measured, or which datasheet, in a few words.
    """

    value: float
    unit: Unit
    source: Source
    when: str = ""
    how: str = ""

    def __post_init__(self) -> None:
        for name, kind in (("unit", Unit), ("source", Source)):
            if getattr(self, name) not in get_args(kind):
                raise HotloopError(
                    f"a figure with {name} {getattr(self, name)!r}",
                    expected="one of " + ", ".join(get_args(kind)),
                )
        if not (math.isfinite(self.value) and self.value >= 0):
            raise HotloopError(f"a figure of {self.value} {self.unit}", expected="a finite number, 0 or more")


@dataclass(frozen=True)
class Speed(_Record):
    """What a device achieves, as opposed to what its datasheet promises.

    Attributes:
        flop_per_s: precision -> FLOP/s of a large matrix product, a multiplication and an addition being two
            operations. Treat as read-only.
        memory_bandwidth: bytes/s of a large copy within the device's memory, read and written both counted.
        launch_overhead: microseconds per operation of a long row of tiny ones: the cost of asking alone.
        host_to_device: bytes/s of a large copy from the host's memory; None for the CPU itself.
    """

    flop_per_s: dict[str, Figure] = field(default_factory=dict)
    memory_bandwidth: Figure | None = None
    launch_overhead: Figure | None = None
    host_to_device: Figure | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """The inverse of `to_dict`; raises HotloopError naming the first thing that is wrong."""
        return _validated(cls, data)


@dataclass(frozen=True)
class Device(_Record):
    """One device that torch can compute on.

    Attributes:
        name: as torch writes it: `cpu`, `cuda:0`, `mps`, `xpu:0`.
        kind: the part before the colon. AMD GPUs are `cuda` too, as in torch.
        model: what the maker calls it; None if it doesn't say.
        capability: generation of an accelerator, such as `9.0` (NVIDIA) or `gfx942` (AMD).
        precisions: those it has instructions for, in the order of `PRECISIONS`.
        memory_total, memory_free: bytes, within the limits set for this process.
        speed: measured figures.
    """

    name: str
    kind: str
    model: str | None = None
    capability: str | None = None
    precisions: tuple[str, ...] = ()
    memory_total: Figure | None = None
    memory_free: Figure | None = None
    speed: Speed = field(default_factory=Speed)

    @property
    def is_accelerator(self) -> bool:
        return self.kind != "cpu"


@dataclass(frozen=True)
class Processor(_Record):
    """The CPU of a machine and how much of it this process may use.

    Attributes:
        model: what the maker calls it; None if it doesn't say.
        architecture: such as `x86_64` or `arm64`.
        vectors: its vector and matrix extensions, as torch names them.
        kernels: the extension that torch's own CPU kernels were chosen for, such as `AVX2`.
        physical_cores, logical_cores: of the whole machine; None if the system doesn't say.
        allowed_cores: logical cores this process may run on (its affinity).
        quota_cores: CPU time this process may use, in cores, as a container sets it; None without a limit.
        threads: a sensible number of threads for one operation.
    """

    model: str | None
    architecture: str
    vectors: tuple[str, ...]
    kernels: str
    physical_cores: int | None
    logical_cores: int | None
    allowed_cores: int
    quota_cores: float | None
    threads: int


@dataclass(frozen=True)
class Hardware(_Record):
    """The facts of one machine.

    Attributes:
        system: operating system and its release.
        processor: the CPU.
        devices: what torch can compute on, the CPU first.
        versions: `python`, `torch`, `hotloop`; `cuda`, `rocm`, `xpu` as torch was built for;
            `nvidia_driver`. None where there is none.
        compiler: path of the C++ compiler that torch.compile would use; None if there is none.
        allocator: `glibc`, where the memory of this process is its, and it can be told to keep it; else None.
        unused_gpus: NVIDIA GPUs that the driver's own tool lists and torch can't use.
        notes: what went differently from planned while probing, one sentence each.
    """

    system: str
    processor: Processor
    devices: tuple[Device, ...]
    versions: dict[str, str | None]
    compiler: str | None = None
    allocator: str | None = None
    unused_gpus: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def device(self, name: str) -> Device | None:
        """The device of that name; None if this machine has none."""
        return next((device for device in self.devices if device.name == name), None)

    @property
    def compiler_remedy(self) -> str:
        """How to get a C++ compiler here."""
        if self.system.startswith("Darwin"):
            return "run xcode-select --install"
        if self.system.startswith("Windows"):
            return "install the Build Tools for Visual Studio and start from their command prompt"
        return "install g++, such as with apt-get install g++"

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with the format's name and version."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """The inverse of `to_dict`, from JSON too.

        Raises:
            HotloopError: it isn't such a record, is of another version, or a field is missing or wrong.
        """
        found = (data.get("format"), data.get("version")) if isinstance(data, dict) else (None, None)
        if found != (FORMAT, VERSION):
            raise HotloopError(
                f"a record with format {found[0]!r}, version {found[1]!r}",
                expected=f"format {FORMAT!r}, version {VERSION}",
                fix="write it anew with this version of hotloop",
            )
        return _validated(cls, {key: value for key, value in data.items() if key not in ("format", "version")})


def _validated(kind: type[Any], data: Any) -> Any:
    # Imported here, since `hotloop --help` should not wait for it.
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise HotloopError(f"field {place} of a {kind.__name__} record is wrong: {first['msg']}") from None
