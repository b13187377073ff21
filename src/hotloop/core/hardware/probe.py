"""Collects the facts of this machine as a Hardware record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hotloop.core.hardware import allocators, benchmarks, machine, speed_cache
from hotloop.core.hardware.devices import check_device, device_names
from hotloop.core.hardware.machine_load import LoadMeter, wait_until_quiet
from hotloop.core.records.hardware import Device, Hardware, Speed

__all__ = ["ProbeProgress", "check_device", "device_names", "measure_hardware", "probe_hardware"]

ProbeProgress = Callable[[str, int, int], None]
"""Called with the next figure's name, the number of measured figures, and their total."""


def measure_hardware(
    device: str | None = None, *, refresh: bool = False, progress: ProbeProgress | None = None
) -> Hardware:
    """Returns the facts of this machine with speeds, which are measured in a few seconds or read from the cache.

    Speeds beside other programs aren't stored.

    Args:
        device: the only device to describe; None is all.
        refresh: measure again in spite of the cache.
        progress: called before each figure and once at the end; never if the cache has all speeds.

    Raises:
        DeviceError: the device is missing.
    """
    names = device_names() if device is None else [str(check_device(device))]
    processor = machine.read_processor()
    found = [machine.describe_device(name, processor.vectors) for name in names]
    keys = {one.name: speed_cache.speed_key(one, processor) for one in found}
    notes: list[str] = []

    speeds: dict[str, Speed] = {}
    for one in [] if refresh else found:
        stored, remarks = speed_cache.read_speed(keys[one.name])
        notes += remarks
        if stored is not None:
            speeds[one.name] = stored

    missing = [one for one in found if one.name not in speeds]
    if missing:
        wait_until_quiet()
    load = LoadMeter()
    counter = _Counter(progress, sum(len(benchmarks.figure_names(one)) for one in missing))
    for one in missing:
        taken, remarks = benchmarks.measure_speed(one, processor.threads, counter.count_devices(one.name))
        speeds[one.name] = taken
        notes += remarks
        if (
            benchmarks.is_complete(one, taken) and not load.busy()
        ):  # a missing figure may have a passing cause, such as a full device
            notes += speed_cache.write_speed(keys[one.name], taken, remarks)
    counter.end()
    busy = load.busy() if missing else ""

    gpus, driver = machine.nvidia_gpus()
    return Hardware(
        system=machine.operating_system(),
        processor=processor,
        devices=tuple(replace(one, speed=speeds[one.name]) for one in found),
        versions=machine.library_versions(driver),
        compiler=machine.find_compiler(),
        allocator=allocators.active_allocator(),
        unused_gpus=() if any(name.startswith("cuda") for name in device_names()) else tuple(gpus),
        notes=tuple(notes),
        busy=busy,
    )


def probe_hardware(device: str = "cpu") -> Hardware:
    """Returns the facts of this machine without measurements and without other programs.

    Only the CPU and `device`, a name from `check_device`, are described; other devices have only names, since a query
    of an accelerator's memory takes some of it.
    """
    processor = machine.read_processor()
    described = ("cpu", device)
    return Hardware(
        system=machine.operating_system(),
        processor=processor,
        devices=tuple(
            machine.describe_device(name, processor.vectors)
            if name in described
            else Device(name, name.partition(":")[0])
            for name in device_names()
        ),
        versions=machine.library_versions(None),
        compiler=machine.find_compiler(),
        allocator=allocators.active_allocator(),
    )


class _Counter:
    def __init__(self, progress: ProbeProgress | None, total: int) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def count_devices(self, device: str) -> Callable[[str], None]:
        def tick(figure: str) -> None:
            if self.progress:
                self.progress(f"{device}: {figure}", self.done, self.total)
            self.done += 1

        return tick

    def end(self) -> None:
        if self.progress and self.total:
            self.progress("", self.total, self.total)
