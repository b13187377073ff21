"""Which machine to use: the predicted steps of several machines, their cost, and the stage of hardware that a task needs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hotloop.advisor.chips import Chip, Price
from hotloop.advisor.estimate import Estimate, Host, estimate, parse_plan
from hotloop.advisor.parallel_ways import at_batch
from hotloop.advisor.rates import CPU_INTERVAL, cpu_step_time
from hotloop.core.records.advice import NORMAL_90, Correction, MachineAdvice, MeasuredStep
from hotloop.core.records.step_costs import CpuRates, StepCosts
from hotloop.plan import Plan


def with_article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEFHLMNRSX' or name[:1] == '8' else 'a'} {name}"


def times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.2g}"


def duration(seconds: float) -> str:
    """Returns `45 s`, `12 min`, `3.4 h` or `2.1 days`."""
    for limit, unit, size in ((100, "s", 1), (6000, "min", 60), (48 * 3600, "h", 3600)):
        if seconds < limit:
            value = seconds / size
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"
    return f"{seconds / 86400:,.1f} days"


Step = tuple[float, float, float]
"""Milliseconds of a step: the median and the ends of the 90 % interval."""


@dataclass(frozen=True)
class Speedup:
    """The CPU's step divided by the GPU's, with its 90 % interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, cpu: Step, gpu: Step) -> Speedup:
        """Returns the ratio of two steps whose errors are independent."""
        ratio = cpu[0] / gpu[0]
        below = math.hypot(math.log(cpu[0] / cpu[1]), math.log(gpu[2] / gpu[0]))
        above = math.hypot(math.log(cpu[2] / cpu[0]), math.log(gpu[0] / gpu[1]))
        return cls(ratio, ratio * math.exp(-below), ratio * math.exp(above))


CROSSING_BATCHES = tuple(2**power for power in range(17))


def pays_from(ratios: Sequence[Speedup], is_sure: bool = True) -> tuple[str, int | None, int | None]:
    """Returns a clause, and the batches from which a GPU is probably and surely faster, None for no batch.

    Args:
        ratios: speed-up at each of `CROSSING_BATCHES`.
        is_sure: whether a GPU may be said to pay surely.
    """
    probably = _start([ratio.median > 1 for ratio in ratios])
    surely = _start([ratio.low > 1 for ratio in ratios])
    if not probably:
        return f"A GPU probably pays at no batch up to {CROSSING_BATCHES[-1]:,}", None, None
    if not is_sure:
        return f"A GPU probably pays from batch {probably:,} on", probably, None
    if not surely:
        return f"A GPU probably pays from batch {probably:,} on, surely at no batch", probably, None
    start = f"A GPU surely pays from batch {surely:,} on"
    return (start if surely == probably else f"{start}, probably from {probably:,} on"), probably, surely


def _start(holds: Sequence[bool]) -> int | None:
    """Returns the first batch of those at the end for all of which a condition holds."""
    first = max((number + 1 for number, one in enumerate(holds) if not one), default=0)
    return CROSSING_BATCHES[first] if first < len(holds) else None


RESERVED_BYTES = 0.8e9
"""Device memory that the driver's context and libraries take."""

USABLE_SHARE = 0.94
"""Share of the remaining memory that an allocator with rounding and gaps can fill."""

ENOUGH_S = 600.0
"""A run of at most so many seconds needs no other machine."""

Fits = Literal["fits", "fits with accumulation", "sharded", "no", "unknown"]


@dataclass(frozen=True)
class Machine:
    """A machine to consider.

    Attributes:
        chip: its chip.
        gpus: number of chips.
        name: for the table; chip and number by default.
        memory_bytes: device memory; that of the chip by default.
        is_here: whether this is the machine at hand, which costs nothing.
        measured: measured step on it, used in place of the prediction.
        correction: factor and spread from the user's measurements on that chip.
        cpu_rates: rates of operators measured on it, used for eager fp32 steps of a CPU in place of published rates.
        costs: record of the step as this machine runs it, where its operators differ from those of other machines.
    """

    chip: Chip
    gpus: int = 1
    name: str = ""
    memory_bytes: float | None = None
    is_here: bool = False
    measured: MeasuredStep | None = None
    correction: Correction = field(default_factory=Correction)
    cpu_rates: CpuRates | None = None
    costs: StepCosts | None = None

    @property
    def title(self) -> str:
        return self.name or (self.chip.name if self.gpus == 1 else f"{self.gpus} x {self.chip.name}")

    @property
    def form(self) -> str:
        if self.is_here:
            return "here"
        if self.chip.kind == "integrated":
            return "laptop"
        return (
            "consumer"
            if self.chip.name.startswith(("RTX 2", "RTX 3", "RTX 4", "RTX 5", "GTX", "RX ", "Arc"))
            else "workstation"
        )


@dataclass(frozen=True)
class Advice:
    """The answer.

    Attributes:
        stage: 1 this machine, 2 one consumer GPU or a laptop with one, 3 a workstation or one cloud GPU, 4 several GPUs.
        reason: a sentence.
        machines: rows, in the order given.
        pays_from: smallest batch from which the median of the best single GPU's speed-up is above 1; None for no batch.
        pays_surely_from: the same for the low end of the speed-up's 90 % interval.
        pays_sentence: both batches, and the speed-up at this batch with its interval.
    """

    stage: int
    reason: str
    machines: tuple[MachineAdvice, ...]
    pays_from: int | None = None
    pays_surely_from: int | None = None
    pays_sentence: str = ""


def compare_machines(
    costs: StepCosts,
    machines: Sequence[Machine],
    steps: int,
    *,
    precision: str = "fp32",
    plan: Plan | str = "baseline",
    prices: Mapping[str, Price] | None = None,
    deadline_s: float | None = None,
    budget: float | None = None,
    is_sure: bool = True,
    host: Host | None = None,
) -> Advice:
    """Returns a row for each machine, the cheapest and the fastest that meet deadline and budget, and the stage.

    Args:
        costs: record of the step.
        machines: machines to consider, that at hand among them.
        steps: steps of the whole run.
        precision, plan, host: as for `estimate`.
        prices: by chip.
        deadline_s: longest run in seconds.
        budget: highest cost of the run.
        is_sure: whether a GPU may be said to pay surely; not beside other programs.
    """
    options = {"precision": precision, "plan": plan, "host": host}
    rows = [_row(costs, machine, steps, prices or {}, deadline_s, budget, options) for machine in machines]
    rows = _marked(rows)
    stage, reason = _stage(rows, deadline_s, budget)
    return Advice(stage, reason, tuple(rows), *_pays(costs, machines, rows, options, is_sure))


def _row(
    costs: StepCosts, machine: Machine, steps: int, prices: Mapping[str, Price], deadline_s: float | None, budget: float | None,
    options: dict[str, Any],
) -> MachineAdvice:  # fmt: skip
    result, fits, pieces = _fitting(machine.costs or costs, machine, options)
    step_ms = machine.measured.step_ms if machine.measured else result.step_ms * machine.correction.factor
    scale = step_ms / result.step_ms
    low_ms, high_ms = _interval(machine, result, step_ms)
    run_s = step_ms * steps / 1e3
    price = prices.get(machine.chip.name)
    per_hour = 0.0 if machine.is_here else price.per_hour * machine.gpus if price else None
    cost = per_hour * run_s / 3600 if per_hour is not None else None
    watts = machine.chip.board_w
    is_in_time = deadline_s is None or run_s <= deadline_s
    is_in_budget = budget is None or (cost is not None and cost <= budget)
    return MachineAdvice(
        name=machine.title,
        chip=machine.chip.name,
        gpus=machine.gpus,
        step_ms=step_ms,
        low_ms=low_ms,
        high_ms=high_ms,
        run_s=run_s,
        memory_bytes=result.memory_bytes,
        memory_there_bytes=machine.memory_bytes or machine.chip.memory_bytes,
        fits=fits,
        accumulation=pieces,
        way=result.way,
        cost=cost,
        cost_per_1000_steps=per_hour * step_ms / 3600 if per_hour is not None else None,
        energy_kwh=watts * machine.gpus * run_s / 3.6e6 if watts else None,
        bound=result.bound,
        parts={name: value * scale for name, value in result.parts.items()},
        source=_source(machine, result),
        meets=is_in_time and is_in_budget and fits != "no",
        form=machine.form,
        batch_size=costs.batch_size,
        price_source="" if price is None or machine.is_here else price.source,
    )


def _interval(machine: Machine, result: Estimate, step_ms: float) -> tuple[float, float]:
    """Returns the 90 % interval."""
    if machine.measured:
        return machine.measured.low_ms, machine.measured.high_ms
    low, high = result.low_ms / result.step_ms, result.high_ms / result.step_ms
    if machine.correction.spread is not None:
        own = math.exp(NORMAL_90 * machine.correction.spread)
        low, high = max(low, 1 / own), min(high, own)
    return low * step_ms, high * step_ms


def _source(machine: Machine, result: Estimate) -> str:
    if machine.measured:
        return "a step measured here"
    count = machine.correction.count
    return f"{result.source}, corrected by {count} of your measurements" if count else result.source


def _fitting(costs: StepCosts, machine: Machine, options: dict[str, Any]) -> tuple[Estimate, Fits, int]:
    """Returns the first way that fits: the whole batch, a batch in pieces, sharded state, both; else that of the least memory."""
    there = machine.memory_bytes or machine.chip.memory_bytes
    ways = ("none",) if machine.gpus == 1 else ("data", "sharded")
    first: Estimate | None = None
    for way in ways:
        for pieces in (1, 2, 4, 8, 16, 32, 64):
            if pieces > 1 and pieces * machine.gpus > costs.batch_size:
                break
            result = in_pieces(costs, machine, way, pieces, options)
            first = first or result
            if there is None:
                return result, "unknown", 1
            if result.memory_bytes <= (there - RESERVED_BYTES * (machine.chip.kind != "cpu")) * USABLE_SHARE:
                fits: Fits = "sharded" if way == "sharded" else "fits" if pieces == 1 else "fits with accumulation"
                return result, fits, pieces
    assert first is not None
    return first, "no", 1


def predicted(costs: StepCosts, machine: Machine, way: str, options: dict[str, Any]) -> Estimate:
    """Returns the estimate of a step on a machine, by its own measured rates where it has them."""
    result = estimate(costs, machine.chip, gpus=machine.gpus, way=way, **options)  # type: ignore[arg-type]
    if machine.cpu_rates is None or machine.chip.kind != "cpu" or not _is_eager_fp32(options):
        return result
    time = cpu_step_time(costs, machine.cpu_rates)
    seconds = {"compute": time.products, "memory": time.traffic + time.memory, "launches": time.host}
    parts = {name: value * 1e3 for name, value in seconds.items()}
    parts |= {"communication": 0.0, "data loading": result.parts["data loading"]}
    step_ms = sum(parts.values())
    return replace(
        result,
        step_ms=step_ms,
        low_ms=step_ms * CPU_INTERVAL[0],
        high_ms=step_ms * CPU_INTERVAL[1],
        parts=parts,
        bound=max(parts, key=lambda name: parts[name]),
        source="predicted from operators measured here",
    )


def _is_eager_fp32(options: Mapping[str, Any]) -> bool:
    """Returns whether measured rates hold for a way of running."""
    plan = parse_plan(options.get("plan", "baseline"))
    precision = plan.precision if plan.precision != "default" else options.get("precision", "fp32")
    return plan.compile == "none" and precision == "fp32"


def in_pieces(costs: StepCosts, machine: Machine, way: str, pieces: int, options: dict[str, Any]) -> Estimate:
    """Returns the estimate of a batch computed in pieces: forward and backward once a piece, the update once."""
    whole = predicted(costs, machine, way, options)
    if pieces == 1:
        return whole
    piece = predicted(at_batch(costs, costs.batch_size / pieces), machine, way, options)
    update = replace(costs, operators=tuple(costs.in_phase("update")), input_bytes=0, module_calls=0, gradient_bytes=0)
    once_ms = min(predicted(update, machine, way, options).step_ms, piece.step_ms)
    step_ms = max(whole.step_ms, pieces * piece.step_ms - (pieces - 1) * once_ms)
    scale = step_ms / piece.step_ms
    return replace(
        piece,
        step_ms=step_ms,
        low_ms=piece.low_ms * scale,
        high_ms=piece.high_ms * scale,
        parts={name: value * scale for name, value in piece.parts.items()},
    )


def _marked(rows: list[MachineAdvice]) -> list[MachineAdvice]:
    met = [row for row in rows if row.meets]
    priced = [row for row in met if row.cost is not None]
    cheapest = min(priced, key=lambda row: (row.cost, row.run_s), default=None)
    fastest = min(met, key=lambda row: row.run_s, default=None)
    names = (("cheapest", cheapest), ("fastest", fastest))
    return [row.model_copy(update={"marks": [name for name, best in names if best is row]}) for row in rows]


def _stage(rows: Sequence[MachineAdvice], deadline_s: float | None, budget: float | None) -> tuple[int, str]:
    """Returns the smallest stage with a machine that meets the conditions, and the reason."""
    here = next((row for row in rows if row.form == "here"), None)
    single = [row for row in rows if row.meets and row.gpus == 1 and row.form != "here"]
    several = [row for row in rows if row.meets and row.gpus > 1]
    best = min(single, key=lambda row: row.run_s, default=None)
    if here and here.meets:
        faster = here.run_s / best.run_s if best else 1.0
        if deadline_s is not None:
            return (
                1,
                f"this machine is enough: the run takes {duration(here.run_s)} of the {duration(deadline_s)} allowed",
            )
        if here.run_s <= ENOUGH_S:
            return 1, f"this machine is enough: the run takes {duration(here.run_s)}"
        if best is None or faster < 1.5:
            return 1, "this machine is enough: no other single machine is 1.5 times as fast"
    small = min((row for row in single if row.form in ("consumer", "laptop")), key=lambda row: row.run_s, default=None)
    why = _why_not(here, deadline_s)
    if small and (
        deadline_s is not None or small.run_s <= 24 * 3600 or best is None or small.run_s <= 1.5 * best.run_s
    ):
        return 2, f"{why}; one {small.name} takes {duration(small.run_s)}, bound by {small.bound}"
    if best:
        lack = "no consumer GPU has the memory" if not small else f"a {small.name} takes {duration(small.run_s)}"
        return 3, f"{lack}; one {best.name} takes {duration(best.run_s)}, bound by {best.bound}"
    if several:
        group = min(several, key=lambda row: (row.gpus, row.run_s))
        return (
            4,
            f"no single machine meets the conditions; {group.name} take {duration(group.run_s)}, {group.fits}, bound by {group.bound}",
        )
    conditions = (
        " and ".join(filter(None, ("the deadline" if deadline_s else "", "the budget" if budget else "")))
        or "the memory"
    )
    nearest = min((row for row in rows if row.fits != "no"), key=lambda row: row.run_s, default=None)
    tail = f"; the fastest, {nearest.name}, takes {duration(nearest.run_s)}" if nearest else ""
    return 4, f"none of these machines meets {conditions}{tail}"


def _why_not(here: MachineAdvice | None, limit: float | None) -> str:
    if here is None:
        return "the machine at hand isn't among the machines"
    if here.fits == "no":
        return "the step doesn't fit into this machine's memory"
    return f"this machine takes {duration(here.run_s)}" + (f" of the {duration(limit)} allowed" if limit else "")


def _pays(
    costs: StepCosts, machines: Sequence[Machine], rows: Sequence[MachineAdvice], options: dict[str, Any], is_sure: bool
) -> tuple[int | None, int | None, str]:
    """Returns the batches from which a GPU is probably and surely faster than the CPU at hand, and a sentence."""
    here = next((machine for machine in machines if machine.is_here and machine.chip.kind == "cpu"), None)
    fitting = [
        (row, machine)
        for row, machine in zip(rows, machines, strict=True)
        if machine.chip.kind != "cpu" and machine.gpus == 1 and row.fits != "no"
    ]
    if here is None or not fitting:
        return None, None, ""
    row, gpu = min(fitting, key=lambda pair: (pair[1].form not in ("consumer", "here"), pair[0].step_ms))
    own = next(one for one, machine in zip(rows, machines, strict=True) if machine is here)
    ratios = [
        Speedup.of(_at(costs, here, batch, options), _at(costs, gpu, batch, options)) for batch in CROSSING_BATCHES
    ]
    start, probably, surely = pays_from(ratios, is_sure)
    now = Speedup.of((own.step_ms, own.low_ms, own.high_ms), (row.step_ms, row.low_ms, row.high_ms))
    return (
        probably,
        surely,
        f"{start}; at your batch of {costs.batch_size:,} {with_article(gpu.title)} would be {times(now.median)} times as fast "
        f"as this CPU ({times(now.low)} to {times(now.high)}).",
    )


def _at(costs: StepCosts, machine: Machine, batch: float, options: dict[str, Any]) -> tuple[float, float, float]:
    """Returns the step at another batch, whose error has the same factor as the measured step at this one, and its interval."""
    costs = machine.costs or costs
    result = predicted(at_batch(costs, batch), machine, "none", options)
    factor = machine.correction.factor
    if machine.measured:
        factor = machine.measured.step_ms / predicted(costs, machine, "none", options).step_ms
    step_ms = result.step_ms * factor
    return step_ms, *_interval(replace(machine, measured=None), result, step_ms)
