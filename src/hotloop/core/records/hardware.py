"""Facts of one machine as frozen records; this file imports no torch and probes nothing.

Every number is a `Figure` with unit and source. Unknown numbers are None or missing, never taken from another chip.
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
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True)
class Figure(_Record):
    """One number with its unit and source.

    Attributes:
        value: finite and not negative.
        unit: `flop_per_s`, `bytes_per_s`, `bytes` or `us`.
        source: `measured` here, reported by the system or driver (`os`), or copied from a `datasheet`.
        when: UTC time, ISO 8601; empty for a datasheet.
        how: what was measured, or which datasheet.
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
    """The measured speed of a device.

    Attributes:
        flop_per_s: FLOP/s of a large matrix product by precision; a multiplication and an addition are two operations.
        memory_bandwidth: bytes/s of a large copy within device memory, reads plus writes.
        launch_overhead: microseconds per operation in a long sequence of tiny operations.
        host_to_device: bytes/s of a large copy from host memory; None for the CPU.
    """

    flop_per_s: dict[str, Figure] = field(default_factory=dict)
    memory_bandwidth: Figure | None = None
    launch_overhead: Figure | None = None
    host_to_device: Figure | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Reads the result of `to_dict`; raises HotloopError for the first wrong field."""
        return _validated(cls, data)


@dataclass(frozen=True)
class Device(_Record):
    """A device that torch can compute on.

    Attributes:
        name: torch's name: `cpu`, `cuda:0`, `mps`, `xpu:0`.
        kind: the part before the colon; `cuda` for AMD GPUs too, as in torch.
        model: the maker's name; None if unknown.
        capability: generation, such as `9.0` (NVIDIA) or `gfx942` (AMD).
        precisions: with instructions on the device, in the order of `PRECISIONS`.
        memory_total, memory_free: bytes, within this process's limits.
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
    """The CPU, and this process's share.

    Attributes:
        model: the maker's name; None if unknown.
        architecture: such as `x86_64` or `arm64`.
        vectors: vector and matrix extensions, by torch's names.
        kernels: the extension of torch's own CPU kernels, such as `AVX2`.
        physical_cores, logical_cores: of the machine; None if unknown.
        allowed_cores: logical cores in this process's affinity.
        quota_cores: CPU time limit of a container, in cores; None without a limit.
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
        system: operating system and release.
        processor: the CPU.
        devices: the CPU first.
        versions: `python`, `torch`, `hotloop`; `cuda`, `rocm`, `xpu` of torch's build; `nvidia_driver`; None if absent.
        compiler: path of the C++ compiler for torch.compile; None if absent.
        allocator: `glibc` if the process uses it and can configure it; else None.
        unused_gpus: NVIDIA GPUs that the driver lists and torch can't use.
        notes: problems while probing, one sentence each.
        busy: a remark on other programs that used the cores while speeds were measured; empty if none did.
    """

    system: str
    processor: Processor
    devices: tuple[Device, ...]
    versions: dict[str, str | None]
    compiler: str | None = None
    allocator: str | None = None
    unused_gpus: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    busy: str = ""

    def device(self, name: str) -> Device | None:
        """Returns the device of that name; None if this machine has none."""
        return next((device for device in self.devices if device.name == name), None)

    @property
    def compiler_remedy(self) -> str:
        if self.system.startswith("Darwin"):
            return "run xcode-select --install"
        if self.system.startswith("Windows"):
            return "install the Build Tools for Visual Studio and start from their command prompt"
        return "install g++, such as with apt-get install g++"

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Reads the result of `to_dict`, from JSON too.

        Raises:
            HotloopError: another kind of record, another version, or a missing or wrong field.
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
    from pydantic import TypeAdapter, ValidationError  # slow to import

    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise HotloopError(f"field {place} of a {kind.__name__} record is wrong: {first['msg']}") from None
