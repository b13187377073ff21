"""Advice for a Task or a script: records a step, measures this machine's, predicts the others', stores the predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hotloop.advisor.chips import Chip, Price, find_chip, read_prices, shipped_prices
from hotloop.advisor.estimate import Estimate, Host, estimate, parse_plan
from hotloop.advisor.ledger import correction, load_predictions, prediction_key, store_prediction
from hotloop.advisor.machines import CROSSING_BATCHES, Advice, Machine, compare_machines
from hotloop.advisor.parallel_ways import at_batch
from hotloop.advisor.this_machine import cpu_rates_here, machines_here, measure_step
from hotloop.core.format import parse_seconds
from hotloop.core.hardware.limits import free_memory_bytes
from hotloop.core.hardware.machine_load import wait_until_quiet
from hotloop.core.records.advice import Correction, HardwareAdvice, MachineAdvice, MeasuredStep, Prediction, StepCurve
from hotloop.core.records.step_costs import StepCosts
from hotloop.core.records.training import SourceRecord
from hotloop.core.reporter import Progress, Say
from hotloop.errors import HotloopError, TaskError, type_name
from hotloop.plan import Plan
from hotloop.profiler.step_costs.trace import trace_step
from hotloop.scripts.script_process import run_script
from hotloop.task import Parameters, Task, override_fields
from hotloop.task_file import LoadedTask

DEFAULT_CHIPS = (
    *("RTX 3060 12GB", "RTX 4090", "M4 Pro", "Tesla T4", "L4", "A10G"),
    *("A100 SXM4 40GB", "A100 SXM4 80GB", "H100 SXM5 80GB"),
)

_GROUP_CHIPS = ("A100 SXM4 80GB", "H100 SXM5 80GB")
_GROUP_SIZES = (2, 4, 8, 16, 32, 64)
"""Machines that are added where no single chip meets the conditions."""

_MEASURABLE_S = 15.0
"""Seconds that measuring this machine's step may take, by its prediction."""
_MEASURED_STEPS = 6

_TOO_LARGE = "the step takes more memory than is free"

_MEMORY_SHARE = 0.6
"""Share of the free memory that a measured step may take."""

_UNKNOWN_BATCHES = 1000
"""Batches of an epoch of a stream of unknown length."""

_CURVES = 3
"""GPUs in the picture of step against batch size."""


@dataclass(frozen=True)
class AdviceRequest:
    """What the user asks.

    Attributes:
        chips: names; a few common ones by default.
        gpus: numbers of chips in a machine; 1 by default, and more where a single chip doesn't meet the conditions.
        batch_sizes: those of the Task by default.
        deadline_s: longest run.
        budget: highest cost of the run.
        prices: by chip; those of the package by default.
        precision: of products, for a plan without its own.
        plan: of the step.
        carbon_g_per_kwh: CO2 of the region's power.
        is_here: whether this machine takes part.
    """

    chips: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()
    batch_sizes: tuple[int, ...] = ()
    deadline_s: float | None = None
    budget: float | None = None
    prices: Mapping[str, Price] | None = None
    precision: str = "fp32"
    plan: Plan = field(default_factory=Plan)
    carbon_g_per_kwh: float | None = None
    is_here: bool = True

    def machines(self) -> list[Machine]:
        """Returns the machines that aren't this one.

        Raises:
            HotloopError: an unknown chip, or a number of chips below 1.
        """
        if any(count < 1 for count in self.gpus):
            raise HotloopError(f"{min(self.gpus)} GPUs", expected="1 or more")
        if any(size < 1 for size in self.batch_sizes):
            raise HotloopError(f"a batch of {min(self.batch_sizes)}", expected="1 row or more")
        found = _unique(find_chip(name) for name in self.chips or DEFAULT_CHIPS)
        return [
            Machine(chip, count) for chip in found for count in self.gpus or (1,) if count == 1 or chip.kind == "gpu"
        ]


def _unique(chips: Iterable[Chip]) -> list[Chip]:
    return list({chip.name: chip for chip in chips}.values())


@dataclass(frozen=True)
class Subject:
    """What is advised on.

    Attributes:
        name: of the Task, or the script.
        costs: of a step by batch size; the first is that of the stage.
        steps: of the whole run by batch size.
        cpu_costs: of a step on this machine's CPU by batch size, where that step isn't measured.
        measured: by batch size and device of this machine.
        loading_s: of a batch by batch size.
        source: of the Task; None without a file.
        busy: a remark on other programs that used the cores while something was measured; empty if none did.
    """

    name: str
    costs: Mapping[int, StepCosts]
    steps: Mapping[int, int]
    epochs: int
    cpu_costs: Mapping[int, StepCosts] = field(default_factory=dict)
    measured: Mapping[tuple[int, str], MeasuredStep] = field(default_factory=dict)
    loading_s: Mapping[int, float] = field(default_factory=dict)
    source: SourceRecord | None = None
    notes: tuple[str, ...] = ()
    busy: str = ""


def advise_task(
    loaded: LoadedTask,
    request: AdviceRequest,
    *,
    say: Say = lambda line: None,
    progress: Progress = lambda doing, share: None,
) -> HardwareAdvice:
    """Returns the advice for a Task; predictions are stored for later runs.

    Raises:
        HotloopError: an unknown chip, or a step that can't be traced.
    """
    request.machines()  # reports an unknown chip before anything runs
    here, busy = request_machines_here(request, progress)
    task, notes = loaded.task, []
    own_size, batches = task.roles.batch_size, task.roles.batches
    if batches is None:
        notes.append(f"the length of the data is unknown: an epoch is taken as {_UNKNOWN_BATCHES:,} batches")
    rows = (batches or _UNKNOWN_BATCHES) * own_size
    sizes = _sizes(own_size, request.batch_sizes)
    costs, own, measured, loading = {}, {}, {}, {}
    for number, size in enumerate(sizes):
        progress(f"tracing a step of batch {size:,}", (2 * number + 1) / (2 * len(sizes) + 1))
        try:
            sized = override_fields(task, {"batch_size": size})
            costs[size] = trace_step(sized, plan=request.plan, batch_size=size, device="cuda")
        except HotloopError as error:
            if not costs and size == sizes[-1]:
                raise
            notes.append(f"batch {size:,} is left out: {error.given}")
            continue
        progress(f"measuring a step of batch {size:,} here", (2 * number + 2) / (2 * len(sizes) + 1))
        for device, machine in here.items():
            reason = _why_not_measured(costs[size], machine, device, request)
            if not reason:
                try:
                    plan = request.plan.with_axes(device=device)
                    step, feed_s, remark = measure_step(sized, plan)
                    if not remark:
                        measured[size, device], loading[size] = step, feed_s
                        continue
                    busy, reason = remark, "the machine was busy"
                except HotloopError as error:
                    reason = error.given
            notes.append(f"the step of batch {size:,} on {machine.title} is predicted, not measured: {reason}")
            if device == "cpu" and reason != _TOO_LARGE:
                own[size] = trace_step(sized, plan=request.plan, batch_size=size, device="cpu")
    if own:
        rates, remarks, remark = cpu_rates_here(
            lambda name: progress(f"measuring this CPU's operators: {name}", 0.9),
            measures=not busy,  # beside other programs that takes minutes, and isn't stored
        )
        here["cpu"], notes, busy = replace(here["cpu"], cpu_rates=rates), notes + remarks, remark or busy
    subject = Subject(
        name=task.name,
        costs=costs,
        cpu_costs=own,
        steps={size: task.epochs * math.ceil(rows / size) for size in sizes},
        epochs=task.epochs,
        measured=measured,
        loading_s=loading,
        source=loaded.record,
        notes=tuple(notes),
        busy=busy,
    )
    return advise_subject(subject, here, request, say=say)


def request_machines_here(request: AdviceRequest, progress: Progress) -> tuple[dict[str, Machine], str]:
    """Returns this machine by device, with measured speeds, and a remark on a busy one; empty if the request leaves it out."""
    if not request.is_here:
        return {}, ""
    return machines_here(lambda what, done, total: progress(f"measuring this machine's speed: {what}", 0.0))


def _sizes(own: int, wanted: Sequence[int]) -> list[int]:
    """Returns the batch sizes, the Task's own first if it is among them."""
    sizes = list(dict.fromkeys(wanted)) or [own]
    return sorted(sizes, key=lambda size: (size != own, size))


def _why_not_measured(costs: StepCosts, machine: Machine, device: str, request: AdviceRequest) -> str:
    """Returns why a step isn't measured here; empty if it is."""
    if costs.peak_bytes > _MEMORY_SHARE * free_memory_bytes(torch.device(device)):
        return _TOO_LARGE
    if request.plan.parallel != "none":
        return f"the plan's parallel={request.plan.parallel} needs several processes"
    step_s = estimate(costs, machine.chip, request.precision, request.plan).step_ms / 1e3
    return "a step takes too long" if step_s * _MEASURED_STEPS > _MEASURABLE_S else ""


def advise_subject(
    subject: Subject,
    here: Mapping[str, Machine],
    request: AdviceRequest,
    *,
    say: Say = lambda line: None,
) -> HardwareAdvice:
    """Returns the advice from the costs of a step by batch size."""
    predictions, notes = load_predictions()
    for note in notes:
        say(note)
    prices = dict(request.prices) if request.prices is not None else shipped_prices()
    others = request.machines()
    found = {size: _advise(subject, size, here, others, prices, predictions, request) for size in subject.costs}
    first = next(iter(found))
    if not request.gpus and not any(row.meets for row in found[first][1].machines):
        others = [*others, *_groups(request)]
        found = {size: _advise(subject, size, here, others, prices, predictions, request) for size in subject.costs}
    advice, costs = found[first][1], subject.costs[first]
    rows = [_with_carbon(row, request) for _, each in found.values() for row in each.machines]
    for note in [] if subject.busy else _store(subject, found, request):
        say(note)
    return HardwareAdvice(
        subject=subject.name,
        stage=advice.stage,
        reason=advice.reason,
        pays_from=advice.pays_from,
        pays_surely_from=advice.pays_surely_from,
        pays=advice.pays_sentence,
        batch_size=first,
        steps=subject.steps[first],
        epochs=subject.epochs,
        precision=request.precision if request.plan.precision == "default" else request.plan.precision,
        plan=request.plan.brief(),
        deadline_s=request.deadline_s,
        budget=request.budget,
        parameters=costs.parameters,
        flops=costs.flops,
        memory={
            "parameters": costs.parameter_bytes,
            "gradients": costs.gradient_bytes,
            "optimizer": costs.optimizer_bytes,
            "buffers": costs.buffer_bytes,
            "batch": costs.input_bytes,
            "activations": costs.activation_peak_bytes,
        },
        machines=rows,
        curves=_curves(costs, found[first][0], advice, request),
        notes=[*subject.notes, *costs.notes],
        busy=subject.busy,
    )


def _groups(request: AdviceRequest) -> list[Machine]:
    linked = _unique(find_chip(name) for name in request.chips or _GROUP_CHIPS)
    return [Machine(chip, count) for chip in linked if chip.kind == "gpu" for count in _GROUP_SIZES]


def _advise(
    subject: Subject, size: int, here: Mapping[str, Machine], others: Iterable[Machine], prices: Mapping[str, Price],
    predictions: Sequence[Prediction], request: AdviceRequest,
) -> tuple[list[Machine], Advice]:  # fmt: skip
    own = [
        replace(
            machine,
            measured=subject.measured.get((size, name)),
            costs=subject.cpu_costs.get(size) if name == "cpu" else None,
        )
        for name, machine in here.items()
    ]
    machines = [replace(one, correction=correction(predictions, one.chip.name)) for one in [*own, *others]]
    return machines, _compare(subject, size, machines, prices, request)


def _compare(
    subject: Subject, size: int, machines: Sequence[Machine], prices: Mapping[str, Price], request: AdviceRequest
) -> Advice:
    return compare_machines(
        subject.costs[size],
        machines,
        subject.steps[size],
        precision=request.precision,
        plan=request.plan,
        prices=prices,
        deadline_s=request.deadline_s,
        budget=request.budget,
        is_sure=not subject.busy,
        host=Host(loading_s=subject.loading_s.get(size, 0.0), overlap=bool(request.plan.workers)),
    )


def _with_carbon(row: MachineAdvice, request: AdviceRequest) -> MachineAdvice:
    if request.carbon_g_per_kwh is None or row.energy_kwh is None:
        return row
    return row.model_copy(update={"carbon_kg": request.carbon_g_per_kwh * row.energy_kwh / 1e3})


def _store(subject: Subject, found: Mapping[int, tuple[list[Machine], Advice]], request: AdviceRequest) -> list[str]:
    """Stores the predictions for single chips; returns a note on failure."""
    for size, (machines, advice) in found.items():
        key = prediction_key(subject.name, size, subject.source, request.plan, request.precision)
        single = [replace(one, measured=None) for one in machines if one.gpus == 1]
        shown = [row for row, machine in zip(advice.machines, machines, strict=True) if machine.gpus == 1]
        plain = _compare(subject, size, [replace(one, correction=Correction()) for one in single], {}, request)
        try:
            for raw, row in zip(plain.machines, shown, strict=True):
                store_prediction(
                    key, raw.chip, (raw.step_ms, raw.low_ms, raw.high_ms), (row.step_ms, row.low_ms, row.high_ms)
                )
        except HotloopError as error:
            return [f"the predictions couldn't be stored: {error.given}"]
    return []


def _curves(costs: StepCosts, machines: Sequence[Machine], advice: Advice, request: AdviceRequest) -> list[StepCurve]:
    """Returns step against batch size of this machine and of the fastest single GPUs, as the rows have it."""
    pairs = [(one, row) for one, row in zip(machines, advice.machines, strict=True) if one.gpus == 1]
    here = [pair for pair in pairs if pair[0].is_here]
    gpus = sorted((pair for pair in pairs if not pair[0].is_here), key=lambda pair: pair[1].step_ms)[:_CURVES]
    curves = []
    for machine, row in [*here, *gpus]:
        scale = row.step_ms / _step_ms(costs, costs.batch_size, machine, request)
        times = [scale * _step_ms(costs, size, machine, request) for size in CROSSING_BATCHES]
        curves.append(
            StepCurve(
                name=machine.title, is_cpu=machine.chip.kind == "cpu", batch_sizes=list(CROSSING_BATCHES), step_ms=times
            )
        )
    return curves


def _step_ms(costs: StepCosts, size: int, machine: Machine, request: AdviceRequest) -> float:
    return estimate(at_batch(costs, size), machine.chip, request.precision, request.plan).step_ms


_LEAST_TIMES = 2


def advise_script(
    path: Path | str,
    arguments: Sequence[str],
    steps: int,
    epochs: int | None,
    request: AdviceRequest,
    *,
    stdout: int | None = None,
    say: Say = lambda line: None,
    progress: Progress = lambda doing, share: None,
) -> HardwareAdvice:
    """Returns the advice for a script, which is stopped as by Ctrl-C after `steps` timed steps.

    Args:
        epochs: complete rounds of the script's data in the whole run; None for the lengths of the script's loops.
        stdout: a file number for the script's output.

    Raises:
        TaskError: no training step was recognised.
    """
    request.machines()
    here, busy = request_machines_here(request, progress)
    wait_until_quiet()
    inside, settings = "hotloop.profiler.step_costs.script_step:wait_for_torch", {"steps": steps}
    end = run_script(path, arguments, inside=inside, settings=settings, stdout=stdout)
    found = end.result or {}
    if "costs" not in found:
        reason = found.get("note", f"exit code {end.exit_code}, and fewer than two updates by an optimizer")
        raise TaskError(
            f"no training step of {path} was recognised ({reason})",
            expected="a script that trains a torch model: a backward pass and an optimizer's step",
        )
    costs, times_ms = StepCosts.from_dict(found["costs"]), found["times_ms"]
    size, busy = costs.batch_size, found["busy"] or busy
    notes = [
        f"{len(times_ms)} steps of the script were timed, then it was stopped",
        "the time of loading batches isn't in the predictions",
    ]
    batches = found["steps_of_epoch"] or (found["loops"][-1] if found["loops"] else None)  # of the innermost loop
    if batches is None:
        notes.append(f"the length of the data is unknown: an epoch is taken as {_UNKNOWN_BATCHES:,} batches")
    if epochs is None and (epochs := _epochs(found)) is None:
        epochs = 1
        notes.append("the number of the script's epochs is unknown, and taken as 1: --epochs sets another")
    sizes = _sizes(size, request.batch_sizes)
    device = found["device"]
    is_measured = len(times_ms) >= _LEAST_TIMES and size in sizes and not found["busy"]
    subject = Subject(
        name=Path(str(path)).name,
        costs={one: at_batch(costs, one) for one in sizes},
        steps={one: epochs * math.ceil((batches or _UNKNOWN_BATCHES) * size / one) for one in sizes},
        epochs=epochs,
        measured={(size, device): MeasuredStep.from_times(times_ms)} if is_measured else {},
        notes=tuple(notes),
        busy=busy,
    )
    return advise_subject(subject, here, request, say=say)


def _epochs(found: dict[str, Any]) -> int | None:
    """Returns how often the loops around the innermost run it; None where a length isn't known."""
    outer = found["loops"][:-1]
    return None if None in outer or not found["loops"] else math.prod(outer)


def advise(
    task: Task,
    *,
    chips: Sequence[str] = (),
    gpus: Sequence[int] = (),
    batch_sizes: Sequence[int] = (),
    deadline: str | None = None,
    budget: float | None = None,
    prices: str | Path | None = None,
    precision: str = "fp32",
    plan: Plan | str = "baseline",
    carbon: float | None = None,
    say: Say = lambda line: None,
) -> HardwareAdvice:
    """Returns which hardware a Task needs: predicted steps, run times, memory and costs of machines, and the answer.

    The step is traced without memory. This machine's own step is measured where that takes a few seconds.

    Args:
        chips: names of chips, such as `["RTX 4090", "H100"]`; a few common ones by default.
        gpus: numbers of chips in a machine; 1 by default, and more where a single chip isn't enough.
        batch_sizes: rows of a step; the Task's by default.
        deadline: longest run, such as `8h`.
        budget: highest cost of the run.
        prices: a CSV file with columns `name` and `price per hour`; the package's dated US dollars by default.
        precision: of products: fp32, tf32, fp16, bf16 or fp8.
        plan: of the step: a Plan, `baseline`, or axes such as `compile=step`.
        carbon: grams of CO2 per kWh.
        say: reports stored predictions that can't be used.

    Raises:
        HotloopError: an unknown chip, precision or plan, prices that can't be read, or a step that can't be traced.
    """
    if not isinstance(task, Task):
        raise TaskError(f"advise got {type_name(task)}", expected="a hotloop.Task", fix="see hotloop.estimate_step")
    request = AdviceRequest(
        chips=tuple(chips),
        gpus=tuple(gpus),
        batch_sizes=tuple(batch_sizes),
        deadline_s=None if deadline is None else parse_seconds(deadline, "deadline"),
        budget=budget,
        prices=None if prices is None else read_prices(prices),
        precision=precision,
        plan=parse_plan(plan),
        carbon_g_per_kwh=carbon,
    )
    return advise_task(LoadedTask(task, None, {}), request, say=say)


def estimate_step(
    task_or_model: Task | nn.Module | Callable[[], nn.Module],
    inputs: Any = None,
    chip: str = "H100 SXM",
    precision: str = "fp32",
    plan: Plan | str = "baseline",
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    optimizer: Callable[[Parameters], Optimizer] | None = None,
    gpus: int = 1,
) -> Estimate:
    """Returns the predicted time and memory of a training step on a chip that needn't be here.

    Args:
        task_or_model: a Task; a module; or a factory of a module, which is called without memory.
        inputs: of a module, an example batch: a tensor, a tuple of positional arguments or a dict of keyword arguments;
            with `loss`, the last of a tuple is the target. Shapes and dtypes count, values don't.
        chip: name, such as `RTX 4090`, or a CPU as `cpu 16 cores avx512 2.5 GHz`.
        precision: of products: fp32, tf32, fp16, bf16 or fp8.
        plan: a Plan, `baseline`, or axes such as `compile=step graphs=32`.
        loss: `loss(output, target)`; default the output's `loss`, else the mean of the output.
        optimizer: a factory as in a Task; default Adam.
        gpus: chips that share the batch by data parallelism.

    Returns:
        `step_ms` with the 90 % interval `low_ms` to `high_ms`, `memory_bytes` of each chip, `parts` in milliseconds, and
        `source`, what the prediction rests on.

    Raises:
        HotloopError: an unknown chip, precision or plan, or a step that can't be traced.
    """
    plan, place = parse_plan(plan), find_chip(chip)
    device = "cpu" if place.kind == "cpu" else "cuda"
    costs = trace_step(task_or_model, inputs, loss=loss, optimizer=optimizer, plan=plan, device=device)
    return estimate(costs, place, precision, plan, gpus)
