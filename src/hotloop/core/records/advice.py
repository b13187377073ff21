"""Advice on hardware and stored predictions: frozen, versioned records, readable without torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from hotloop.core.records.training import Record

NORMAL_90 = 1.645
"""Standard deviations between the median and the ends of a 90 % interval."""

OBSERVATION_SPREAD = 0.15
"""Standard deviation of the logarithm of measured over predicted time between Tasks on one chip."""

LEAST_MEASURED_SPREAD = 0.05
"""Share of a measured step that its interval has on each side at least: later runs differ from the measured second."""


class MachineAdvice(Record):
    """A machine, with the predicted step and run.

    Attributes:
        name: of the machine, such as `8 x A100 SXM4 80GB`.
        chip, gpus: kind and number of its chips.
        form: `here`, `consumer`, `laptop` or `workstation`.
        batch_size: rows in a step.
        step_ms, low_ms, high_ms: median and 90 % interval of a step.
        run_s: seconds of the whole run.
        memory_bytes, memory_there_bytes: of each chip: peak of tensors, and what the chip has; None if unknown.
        fits: `fits`, `fits with accumulation`, `sharded`, `no` or `unknown`.
        accumulation: pieces of a batch with which the step fits.
        way: how several chips share a step.
        cost, cost_per_1000_steps: in the currency of the prices; None without a price.
        price_source: provider or file, with its date.
        energy_kwh: board power times `run_s`; None if the power is unknown.
        carbon_kg: CO2 of that energy; None without a carbon intensity.
        bound: largest part of the step.
        parts: milliseconds by part.
        source: what the figures rest on.
        meets: whether the step fits, and deadline and budget are met.
        marks: `cheapest`, `fastest`.
    """

    name: str
    chip: str
    gpus: int
    form: str
    batch_size: int
    step_ms: float
    low_ms: float
    high_ms: float
    run_s: float
    memory_bytes: int
    memory_there_bytes: float | None
    fits: str
    accumulation: int
    way: str
    cost: float | None
    cost_per_1000_steps: float | None
    price_source: str = ""
    energy_kwh: float | None
    carbon_kg: float | None = None
    bound: str
    parts: dict[str, float]
    source: str
    meets: bool
    marks: list[str] = Field(default_factory=list)


class StepCurve(Record):
    """Predicted step by batch size."""

    name: str
    is_cpu: bool
    batch_sizes: list[int]
    step_ms: list[float]


class HardwareAdvice(Record):
    """Which hardware a training needs.

    Attributes:
        subject: the Task's name, or the script.
        stage: 1 this machine; 2 one consumer GPU or a laptop with one; 3 a workstation or one cloud GPU; 4 several GPUs.
        reason: of the stage, a sentence.
        pays_from: smallest batch from which a GPU is probably faster than this CPU, by the median of the speed-up; None for
            no batch, or without a CPU here.
        pays_surely_from: the same by the low end of the speed-up's 90 % interval.
        pays: a sentence about a GPU at this batch; empty where `pays_from` has no meaning.
        batch_size: rows of the batch that the stage holds for.
        steps, epochs: of the whole run at that batch size.
        precision, plan: of the step.
        deadline_s, budget: conditions of the user.
        parameters: elements.
        flops: of a step.
        memory: bytes by purpose, of the whole step on one chip.
        machines: a row for each machine and batch size.
        curves: step against batch size.
        notes: what was estimated or assumed.
        busy: a remark on other programs that used the cores while something was measured; empty if none did.
    """

    version: int = 1
    subject: str
    stage: int
    reason: str
    pays_from: int | None = None
    pays_surely_from: int | None = None
    pays: str = ""
    batch_size: int
    steps: int
    epochs: int
    precision: str
    plan: str
    deadline_s: float | None = None
    budget: float | None = None
    parameters: int
    flops: int
    memory: dict[str, int]
    machines: list[MachineAdvice]
    curves: list[StepCurve] = Field(default_factory=list)
    notes: list[str] = Field(default_factory=list)
    busy: str = ""

    @property
    def answer(self) -> str:
        """The first line."""
        unsure = " (not sure: the machine was busy)" if self.busy else ""
        start = f"Stage {self.stage} of 4{unsure}: {self.reason}."
        return f"{start} {self.pays}" if self.pays else start


class Prediction(Record):
    """A stored prediction of a step on one chip, with what later runs measured.

    Attributes:
        key: subject, batch size, source, plan and versions.
        chip: name of the chip.
        raw_ms, raw_spread: the prediction without this user's measurements, and the spread of its logarithm.
        step_ms, low_ms, high_ms: what was shown.
        created: date.
        measured_ms: steps of later runs.
    """

    version: int = 1
    key: dict[str, Any]
    chip: str
    raw_ms: float
    raw_spread: float
    step_ms: float
    low_ms: float
    high_ms: float
    created: str
    measured_ms: list[float] = Field(default_factory=list)

    @property
    def measured(self) -> float | None:
        return statistics.median(self.measured_ms) if self.measured_ms else None


class MeasuredStep(Record):
    """A step measured on the machine at hand: mean milliseconds, and the interval that 90 % of the steps are within."""

    step_ms: float
    low_ms: float
    high_ms: float

    @classmethod
    def from_times(cls, times_ms: Sequence[float]) -> MeasuredStep:
        """Returns mean and quantiles of two or more times; the interval has at least 5 % on each side of the mean."""
        mean = statistics.fmean(times_ms)
        quantiles = statistics.quantiles(times_ms, n=20, method="inclusive")
        low, high = quantiles[0], quantiles[-1]
        return cls(
            step_ms=mean,
            low_ms=min(low, mean * (1 - LEAST_MEASURED_SPREAD)),
            high_ms=max(high, mean * (1 + LEAST_MEASURED_SPREAD)),
        )


class Correction(Record):
    """What this user's measurements say about predictions on a chip.

    Attributes:
        factor: measured over predicted time, shrunk towards 1.
        spread: standard deviation of the logarithm of measured over corrected time.
        count: measured predictions.
    """

    factor: float = 1.0
    spread: float | None = None
    count: int = 0

    @classmethod
    def from_predictions(cls, predictions: Sequence[Prediction]) -> Correction:
        """Returns the posterior of a normal factor on a log scale, whose prior has the spread of the predictions."""
        known = [(one, math.log(one.measured / one.raw_ms)) for one in predictions if one.measured]
        if not known:
            return cls()
        prior = statistics.fmean(max(one.raw_spread, 0.05) for one, _ in known) ** 2
        noise = OBSERVATION_SPREAD**2
        count = len(known)
        mean = sum(log for _, log in known) / (count + noise / prior)
        variance = prior * noise / (noise + count * prior) + noise
        return cls(factor=math.exp(mean), spread=math.sqrt(variance), count=count)


class Score(Record):
    """Error and coverage of the measured predictions.

    Attributes:
        predictions: stored ones, with and without measurement.
        measured: number of those with a measurement.
        median_error, mean_error: of the shown step against the measured, as a share of the measured.
        coverage: share of measured steps within the 90 % interval.
    """

    version: int = 1
    predictions: list[Prediction]
    measured: int
    median_error: float | None = None
    mean_error: float | None = None
    coverage: float | None = None

    @classmethod
    def from_predictions(cls, predictions: Sequence[Prediction]) -> Score:
        pairs = [(one, one.measured) for one in predictions if one.measured]
        if not pairs:
            return cls(predictions=list(predictions), measured=0)
        errors = [abs(one.step_ms / ms - 1) for one, ms in pairs]
        return cls(
            predictions=list(predictions),
            measured=len(pairs),
            median_error=statistics.median(errors),
            mean_error=statistics.fmean(errors),
            coverage=statistics.fmean(one.low_ms <= ms <= one.high_ms for one, ms in pairs),
        )
