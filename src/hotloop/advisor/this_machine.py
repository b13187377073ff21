"""The chips of this machine with measured rates, which the user's cache folder stores, and the measured step of a Task."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hotloop.advisor.chips import Chip, cpu_chip, find_chip
from hotloop.advisor.machines import Machine
from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.files.user_folders import cache_folder, key_digest
from hotloop.core.hardware import machine
from hotloop.core.hardware.machine import read_processor
from hotloop.core.hardware.machine_load import LoadMeter, wait_until_quiet
from hotloop.core.hardware.probe import ProbeProgress, measure_hardware
from hotloop.core.random.rng import preserve_generators
from hotloop.core.records.advice import MeasuredStep
from hotloop.core.records.hardware import Device, Hardware, Processor
from hotloop.core.records.step_costs import CpuRates
from hotloop.errors import HotloopError
from hotloop.lowering.build import lower
from hotloop.plan import Plan
from hotloop.profiler.step_costs import cpu_probe
from hotloop.task import Task
from hotloop.tuning.races.runner import Runner, mean_feed_time

_VECTOR_BITS = (("avx512_f", 512), ("avx2", 256))
_NEON_BITS = 128
_MEASURE_S = 1.0
_LEAST_STEPS, _MOST_STEPS = 3, 1000
_UNKNOWN_CLOCK_HZ = 2.5e9  # without effect where the rates were measured


def chip_name(device: str) -> str:
    """Returns the name under which predictions for a device of this machine are stored."""
    processor = machine.read_processor()
    return _name(machine.describe_device(device, processor.vectors), processor)


def _name(device: Device, processor: Processor) -> str:
    if device.kind == "cpu":
        return f"{processor.model or processor.architecture}, {processor.threads} threads"
    try:
        return find_chip(device.model or "").name
    except HotloopError:
        return device.model or device.name


def machines_here(progress: ProbeProgress | None = None) -> tuple[dict[str, Machine], str]:
    """Returns this machine once for each kind of device, by torch's name of the first: the CPU first.

    Also returns a remark if the machine was busy while its speeds were measured, else an empty text.
    """
    hardware = measure_hardware(progress=progress)
    found: dict[str, Machine] = {}
    for device in hardware.devices:
        if device.kind not in (name.partition(":")[0] for name in found):
            total = device.memory_total.value if device.memory_total else None
            title = "CPU" if device.kind == "cpu" else device.model or device.name
            chip, name = _chip(device, hardware), f"this machine ({title})"
            found[device.name] = Machine(chip, name=name, memory_bytes=total, is_here=True)
    return found, hardware.busy


def _chip(device: Device, hardware: Hardware) -> Chip:
    processor = hardware.processor
    if device.kind != "cpu":
        try:
            return find_chip(device.model or "")
        except HotloopError:
            pass
    bits = next((bits for name, bits in _VECTOR_BITS if name in processor.vectors), _NEON_BITS)
    known = cpu_chip(processor.threads, bits, _UNKNOWN_CLOCK_HZ)
    rates = {name: figure.value for name, figure in device.speed.flop_per_s.items() if name != "fp64"}
    bandwidth = device.speed.memory_bandwidth
    fp32 = rates.get("fp32", known.vector_flop_per_s)
    return replace(
        known,
        name=_name(device, processor),
        kind="cpu" if device.kind == "cpu" else "gpu",
        flop_per_s={"fp32": fp32} | rates,
        vector_flop_per_s=fp32,
        bandwidth_bytes_per_s=bandwidth.value if bandwidth else known.bandwidth_bytes_per_s,
        source="measured on this machine",
        details="measured on this machine",
        is_measured=True,
    )


def measure_step(task: Task, plan: Plan) -> tuple[MeasuredStep, float, str]:
    """Returns a training step of the Task here with loading, and seconds of loading a batch alone.

    Also returns a remark if the machine was busy meanwhile, else an empty text.

    Raises:
        HotloopError: the Task can't run here.
    """
    with preserve_generators():
        program = lower(task, plan)
        try:
            runner = Runner(program)
            runner.warm_up()
            steps = plan.graphs if isinstance(plan.graphs, int) else 1  # steps of one graph have no times of their own
            wait_until_quiet()
            load = LoadMeter()
            times_s: list[float] = []
            while len(times_s) < _LEAST_STEPS or (sum(times_s) < _MEASURE_S and len(times_s) < _MOST_STEPS):
                times_s.append(runner.window(steps))
            measured = MeasuredStep.from_times([1e3 * time_s / steps for time_s in times_s])
            return measured, mean_feed_time(program) or 0.0, load.busy()
        finally:
            program.close()


def cpu_rates_here(
    tick: Callable[[str], None] = lambda _: None, *, measures: bool = True
) -> tuple[CpuRates | None, list[str], str]:
    """Returns this CPU's rates with torch's current number of threads, notes, and a remark on a busy machine, else empty.

    Args:
        tick: called with the name of each probe; never if the rates are stored.
        measures: whether rates that aren't stored are measured; else they are None.
    """
    key = _key()
    notes: list[str] = []
    path = cache_folder() / "cpu-rates" / f"{key_digest(key)}.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(stored, dict) or stored.get("key") != key:
            raise ValueError("its content does not match its name")
        return CpuRates.from_dict(stored.get("rates")), notes, ""
    except FileNotFoundError:
        pass
    except (OSError, ValueError, HotloopError) as error:
        notes.append(f"the stored rates in {path} can't be used ({error}), so they were measured anew")
    if not measures:
        return None, notes, ""
    wait_until_quiet()
    load = LoadMeter()
    rates = cpu_probe.measure_cpu_rates(tick=tick)
    busy = load.busy()
    return rates, notes if busy else notes + _store(path, key, rates), busy


def _key() -> dict[str, Any]:
    """Returns everything that the rates depend on; the host's name, for shared homes, as a hash."""
    processor = read_processor()
    return {
        "method": cpu_probe.METHOD,
        "host": hashlib.sha256(platform.node().encode()).hexdigest()[:16],
        "processor": processor.model,
        "vectors": list(processor.vectors),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _store(path: Path, key: dict[str, Any], rates: CpuRates) -> list[str]:
    """Returns a note after a failure."""
    try:
        write_atomic(path, json.dumps({"key": key, "rates": rates.to_dict()}))
    except HotloopError as error:
        return [f"the measured rates couldn't be stored: {error.given}"]
    return []
