"""Collects the facts of this machine as a Hardware record; measured speeds are cached in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.files.user_folders import cache_folder, key_digest
from hotloop.core.hardware import benchmarks, limits, machine
from hotloop.core.hardware.devices import check_device, device_names
from hotloop.core.hardware.machine_load import LoadMeter, wait_until_quiet
from hotloop.core.records.hardware import Device, Hardware, Processor, Speed
from hotloop.errors import HotloopError

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
    keys = {one.name: speed_key(one, processor) for one in found}
    notes: list[str] = []

    speeds: dict[str, Speed] = {}
    for one in [] if refresh else found:
        stored, remarks = read_speed(keys[one.name])
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
            notes += write_speed(keys[one.name], taken, remarks)
    counter.end()
    busy = load.busy() if missing else ""

    gpus, driver = machine.nvidia_gpus()
    return Hardware(
        system=machine.operating_system(),
        processor=processor,
        devices=tuple(replace(one, speed=speeds[one.name]) for one in found),
        versions=machine.library_versions(driver),
        compiler=machine.find_compiler(),
        allocator=limits.active_allocator(),
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
        allocator=limits.active_allocator(),
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


def speed_folder() -> Path:
    return cache_folder() / "devices"


def speed_key(device: Device, processor: Processor) -> dict[str, Any]:
    """Returns everything that a stored speed depends on; the host's name, for shared homes, as a hash."""
    return {
        "method": benchmarks.METHOD,
        "host": hashlib.sha256(platform.node().encode()).hexdigest()[:16],
        "device": device.name,
        "model": device.model,
        "precisions": list(device.precisions),
        "processor": processor.model,
        "threads": processor.threads,
        "torch": torch.__version__,
    }


def read_speed(wanted: dict[str, Any]) -> tuple[Speed | None, list[str]]:
    """Returns the stored speed or None, and notes, such as on a file that can't be used."""
    path = _speed_file(wanted)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(stored, dict) or stored.get("key") != wanted:
            raise ValueError("its content does not match its name")
        return Speed.from_dict(stored.get("speed")), [str(note) for note in stored.get("notes") or ()]
    except FileNotFoundError:
        return None, []
    except (OSError, ValueError, HotloopError) as error:
        return None, [f"the stored figures in {path} can't be used ({error}), so they were measured anew"]


def write_speed(wanted: dict[str, Any], speed: Speed, notes: list[str]) -> list[str]:
    """Stores a speed; returns a note after a failure."""
    content = {"key": wanted, "speed": speed.to_dict(), "notes": notes}
    try:
        write_atomic(_speed_file(wanted), json.dumps(content, indent=2))
    except HotloopError as error:
        return [f"the measured figures couldn't be stored: {error.given}"]
    return []


def _speed_file(wanted: dict[str, Any]) -> Path:
    return speed_folder() / f"{wanted['device'].replace(':', '')}-{key_digest(wanted)}.json"
