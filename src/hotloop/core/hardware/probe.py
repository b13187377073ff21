"""This machine -> Hardware: the only place that asks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hotloop.core.hardware import benchmarks, machine, speed_cache
from hotloop.core.hardware.devices import check_device, device_names
from hotloop.core.records.hardware import Device, Hardware, Speed

__all__ = ["ProbeProgress", "check_device", "device_names", "measure_hardware", "probe_hardware"]

ProbeProgress = Callable[[str, int, int], None]
"""Called with what is measured next, how many figures are done, and how many there are in all."""


def measure_hardware(
    device: str | None = None, *, refresh: bool = False, progress: ProbeProgress | None = None
) -> Hardware:
    """The facts of this machine, its speed measured (a few seconds, at the first time only) or as stored.

    Args:
        device: look at this device alone; None looks at all.
        refresh: measure anew, whatever is stored.
        progress: told of each figure before it is measured, and once at the end; never if all are stored.

    Raises:
        DeviceError: there is no such device here.
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
    counter = _Counter(progress, sum(len(benchmarks.figure_names(one)) for one in missing))
    for one in missing:
        taken, remarks = benchmarks.measure_speed(one, processor.threads, counter.count_devices(one.name))
        speeds[one.name] = taken
        notes += remarks
        # What couldn't be taken may have met a program that filled the device just now: not to be remembered.
        if benchmarks.is_complete(one, taken):
            notes += speed_cache.write_speed(keys[one.name], taken, remarks)
    counter.end()

    gpus, driver = machine.nvidia_gpus()
    return Hardware(
        system=machine.operating_system(),
        processor=processor,
        devices=tuple(replace(one, speed=speeds[one.name]) for one in found),
        versions=machine.library_versions(driver),
        compiler=machine.find_compiler(),
        allocator=machine.active_allocator(),
        unused_gpus=() if any(name.startswith("cuda") for name in device_names()) else tuple(gpus),
        notes=tuple(notes),
    )


def probe_hardware(device: str = "cpu") -> Hardware:
    """The facts of this machine that take no time: nothing is measured, and no other program is asked.

    The CPU and `device`, a name that `check_device` gave, are described; others are named only, since asking an
    accelerator for its memory takes some of it.
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
        allocator=machine.active_allocator(),
    )


class _Counter:
    """Counts the figures taken, for a progress bar."""

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
