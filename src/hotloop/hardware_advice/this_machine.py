"""The chips of this machine with measured rates, and the measured step of a Task."""

from __future__ import annotations

from dataclasses import replace

from hotloop.advisor.chips import Chip, cpu_chip, find_chip
from hotloop.advisor.machines import Machine
from hotloop.core.hardware import machine
from hotloop.core.hardware.machine_load import LoadMeter, wait_until_quiet
from hotloop.core.hardware.probe import ProbeProgress, measure_hardware
from hotloop.core.random.rng import preserve_generators
from hotloop.core.records.advice import MeasuredStep
from hotloop.core.records.hardware import Device, Hardware, Processor
from hotloop.core.records.race import Verdict
from hotloop.errors import HotloopError
from hotloop.hardware_advice.ledger import measure_prediction, prediction_key
from hotloop.lowering.build import lower
from hotloop.plan import Plan
from hotloop.task import Task
from hotloop.task_file import LoadedTask
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
            found[device.name] = Machine(_chip(device, hardware), name=_title(device), memory_bytes=total, is_here=True)
    return found, hardware.busy


def _title(device: Device) -> str:
    return f"this machine ({'CPU' if device.kind == 'cpu' else device.model or device.name})"


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


def compare_with_predictions(loaded: LoadedTask, verdict: Verdict, batch_size: int | None = None) -> list[str]:
    """Returns a line for each raced plan whose step `hotloop advise` predicted for this machine's chip.

    Args:
        batch_size: rows of a step; the Task's by default.
    """
    size = batch_size or loaded.task.roles.batch_size
    lines: dict[str, str] = {}
    for timing in verdict.plans:
        plan = timing.as_plan
        key, chip = prediction_key(loaded.task.name, size, loaded.record, plan), chip_name(plan.device)
        if timing.step_ms is None or f"{key} {chip}" in lines:
            continue  # plans that a prediction doesn't distinguish count once, the first
        line = measure_prediction(key, chip, timing.step_ms, verdict.busy)
        if line is not None:
            lines[f"{key} {chip}"] = f"{timing.name}: {line}"
    return list(lines.values())
