"""Formats a Hardware record as tables for a terminal, with one line of advice."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hotloop.core.format import format_digits
from hotloop.core.records.hardware import PRECISIONS, Device, Figure, Hardware

COLUMNS = 4  # devices in one table
UNKNOWN = "unknown"


def hardware_page(hardware: Hardware) -> RenderableType:
    """Returns all tables, notes and advice."""
    groups = [hardware.devices[start : start + COLUMNS] for start in range(0, len(hardware.devices), COLUMNS)]
    words = [*(f"Note: {note}" for note in [*hardware.notes, *filter(None, [hardware.busy])]), advice(hardware)]
    return Group(*(device_table(group) for group in groups), machine_table(hardware), *(Text(word) for word in words))


def device_table(devices: tuple[Device, ...]) -> Table:
    """Returns the devices side by side, with memory and measured speeds."""
    table = Table(title="Devices", title_justify="left", title_style="bold")
    table.add_column("")
    for device in devices:
        table.add_column(Text(device.name), overflow="fold")
    rows = {
        "model": [device.model or UNKNOWN for device in devices],
        "memory": [format_figure(device.memory_total) for device in devices],
        "memory free": [format_figure(device.memory_free) for device in devices],
        **{
            f"{precision} products": [_measured_product(device, precision) for device in devices]
            for precision in PRECISIONS
        },
        "memory bandwidth": [format_figure(device.speed.memory_bandwidth) for device in devices],
        "launch overhead": [format_figure(device.speed.launch_overhead) for device in devices],
        "from host memory": [
            format_figure(device.speed.host_to_device) if device.is_accelerator else "-" for device in devices
        ],
        "measured": [_measured_at(device) for device in devices],
    }
    for name, cells in rows.items():
        if set(cells) != {"-"}:
            table.add_row(name, *(Text(cell) for cell in cells))
    return table


def _measured_product(device: Device, precision: str) -> str:
    if precision not in device.precisions:
        return "-"
    return format_figure(device.speed.flop_per_s.get(precision))


def _measured_at(device: Device) -> str:
    times = [figure.when for figure in device.speed.flop_per_s.values()]
    return min(times).replace("T", " ").replace("+00:00", " UTC") if times else UNKNOWN


def machine_table(hardware: Hardware) -> Table:
    """Returns the processor and the software."""
    table = Table(title="Machine", title_justify="left", title_style="bold", show_header=False)
    table.add_column("")
    table.add_column("", overflow="fold")
    for name, cell in _machine(hardware):
        table.add_row(name, Text(cell))
    return table


def _machine(hardware: Hardware) -> Iterator[tuple[str, str]]:
    cpu = hardware.processor
    yield "system", hardware.system
    yield "processor", f"{cpu.model or UNKNOWN} ({cpu.architecture})"
    yield "vector extensions", f"{', '.join(cpu.vectors) or UNKNOWN}; torch's kernels use {cpu.kernels}"
    yield "cores", f"{cpu.physical_cores or UNKNOWN} physical, {cpu.logical_cores or UNKNOWN} logical"
    quota = "" if cpu.quota_cores is None else f", for {cpu.quota_cores:g} cores' time in all"
    yield "usable here", f"{cpu.allowed_cores} logical{quota}"
    yield "threads", f"{cpu.threads} for one operation"
    yield "C++ compiler", hardware.compiler or "none"
    for name, version in hardware.versions.items():
        if version is not None:
            yield name.replace("_", " "), version


SCALES = {
    "flop_per_s": ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s")),
    "bytes_per_s": ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s")),
    "bytes": ((2**30, "GiB"), (2**20, "MiB")),
    "us": ((1e3, "ms"), (1.0, "us")),
}


def format_figure(figure: Figure | None) -> str:
    """Returns a figure with three digits and a fitting unit, such as `1.23 TFLOP/s`."""
    if figure is None:
        return UNKNOWN
    scales = SCALES[figure.unit]
    factor, unit = next((scale for scale in scales if figure.value >= scale[0]), scales[-1])
    return f"{format_digits(figure.value / factor)} {unit}"


def advice(hardware: Hardware) -> str:
    """Returns a line about the device to train on, and about missing software."""
    words = _where_to_train(hardware)
    if hardware.compiler is None:
        words += f" torch.compile needs a C++ compiler for the CPU, and there is none: {hardware.compiler_remedy}."
    return words


def _where_to_train(hardware: Hardware) -> str:
    accelerators = [device for device in hardware.devices if device.is_accelerator]
    if accelerators:
        return _compare_with_cpu(max(accelerators, key=_fp32), hardware.device("cpu"))
    if hardware.unused_gpus:
        return _unused_devices_advice(hardware)
    return "No accelerator here: small networks train well on the CPU; for large ones take a machine with a GPU."


def _fp32(device: Device) -> float:
    figure = device.speed.flop_per_s.get("fp32")
    return figure.value if figure else 0.0


def _compare_with_cpu(best: Device, cpu: Device | None) -> str:
    if cpu is None or not _fp32(cpu) or not _fp32(best):
        return f"Train with --device {best.name}; very small networks may train as fast on the CPU."
    ratio = _fp32(best) / _fp32(cpu)
    if ratio < 1:
        return f"{best.name} is slower than the CPU at large fp32 matrix products: train with --device cpu."
    return (
        f"{best.name} does large fp32 matrix products {format_digits(ratio)} times as fast as the CPU: "
        f"train with --device {best.name}; very small networks may train as fast on the CPU."
    )


def _unused_devices_advice(hardware: Hardware) -> str:
    gpu, torch = hardware.unused_gpus[0], f"torch {hardware.versions.get('torch')}"
    if hardware.versions.get("cuda") is None:
        return (
            f"There is a GPU here ({gpu}), but {torch} is not a CUDA build and can't use it: install one, "
            "see https://pytorch.org/get-started/locally/."
        )
    return (
        f"There is a GPU here ({gpu}), but {torch} can't use it: update its driver, and check that "
        "CUDA_VISIBLE_DEVICES doesn't hide it."
    )
