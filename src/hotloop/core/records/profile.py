"""Profiles of a training step and remedies: frozen, versioned records, readable without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hotloop.core.records.profile_terms import Bound, Phase, SlowPattern
from hotloop.core.records.training import Record


class CompiledNetwork(Record):
    """A race between the compiled and the eager network, forward and backward.

    Attributes:
        ratio: median of eager time over compiled time; above 1, the compiled network is faster.
        low, high: the ratio's 99 % interval.
        pairs: number of pairs of windows.
        compile_s: seconds of compilation.
        network: the network's class.
        failure: why there are no figures.
    """

    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    pairs: int = 0
    compile_s: float | None = None
    network: str = ""
    failure: str | None = None

    @property
    def is_faster(self) -> bool:
        return self.low is not None and self.low > 1


class Overhead(Record):
    """The cost of instrumentation, measured in a run with alternating steps.

    Attributes:
        ratio: time of an instrumented step over the time of a clean step.
        low, high: the ratio's 95 % interval.
        instrumented, clean: numbers of steps.
    """

    ratio: float
    low: float
    high: float
    instrumented: int
    clean: int


TAKE_ROWS = frozenset({"aten::index", "aten::index_select", "aten::embedding"})
"""Operators that take rows of their first matrix."""


class ModuleTime(Record):
    """A module's times in one step: means of the middle half of the measured steps.

    Attributes:
        name: the model's name for the module; empty for the model itself. With several models, the model's name is a
            prefix: `generator.conv1`. Names in parentheses, such as `(loss)`, are parts without a module.
        kind: its class.
        calls: per step.
        forward_ms, backward_ms: with inner modules; None if unknown.
        own_forward_ms, own_backward_ms: without inner modules.
        share: of the step's time, forward and backward with inner modules.
        flops, bytes: per step, forward and backward with inner modules; None if unknown.
        limit_share: time at this machine's measured limits over the measured time; None if unknown.
        fused_with: modules in the same kernels; the kernels' time is split by arithmetic.
    """

    name: str
    kind: str
    calls: float
    forward_ms: float | None
    backward_ms: float | None
    own_forward_ms: float | None = None
    own_backward_ms: float | None = None
    share: float
    flops: float | None = None
    bytes: float | None = None
    limit_share: float | None = None
    fused_with: list[str] = Field(default_factory=list)


class OperatorTime(Record):
    """An operator's time in one step, at one place, with one kind of input.

    Attributes:
        name: torch's name, such as `aten::convolution_backward`.
        phase: of the step.
        module: the module of the forward, or of the backward's forward; empty without one.
        where: the user's line of the call, or of the backward's forward, as `file:line`; empty if unknown.
        function: the function of this line.
        calls, ms: per step, without inner operators; on an accelerator the kernels' time.
        shapes: of the inputs, such as `8x10x28x28`.
        dtype: of the first floating-point input; empty without one.
        device: of the computation.
        flops, bytes: per step; None if unknown.
        line_runs: executions of the line per step; None if unobserved.
        used: whether a backward used the result; None if irrelevant or unknown.
        copies: source and target of a copy between devices, such as `cpu>cuda:0`.
        within: the optimizer's `step` or `zero_grad` that called the operator.
        outer: the outermost enclosing torch operator, such as `aten::one_hot`.
        hooked: whether the user's Python called the operator within a backward, as hooks do.
        alike: number of modules like this one, or like its parent, with the same input or slices of it; or 0.
    """

    name: str
    phase: Phase
    module: str = ""
    where: str = ""
    function: str = ""
    calls: float
    ms: float
    shapes: list[str] = Field(default_factory=list)
    dtype: str = ""
    device: str = "cpu"
    flops: float | None = None
    bytes: float | None = None
    line_runs: float | None = None
    used: bool | None = None
    copies: str = ""
    within: Literal["", "step", "zero_grad"] = ""
    outer: str = ""
    hooked: bool = False
    alike: int = 0


class LineTime(Record):
    """A line on the stack of the training thread, from samples of the stack.

    Attributes:
        where: `file:line` of the user's code; of a library's code only where `library` says so.
        function: the line's function.
        library: the called library in the samples (`torch`, `PIL`, `matplotlib`); empty for none.
        phase: of the step.
        ms: per step, with calls.
        own_ms: without other lines of the user.
        within: the user's line that most often called the function; empty for none.
        looks: number of samples behind `own_ms`; None if uncounted.
    """

    where: str
    function: str
    library: str = ""
    phase: Phase
    ms: float
    own_ms: float
    within: str = ""
    looks: int | None = None


class GroupTime(Record):
    """A parameter group; the update's `ms` is None if torch updates all groups together.

    Groups with the same number of `settings` have the same kind of update.
    """

    name: str
    tensors: int
    numbers: int
    settings: int = 0
    ms: float | None


class OptimizerUse(Record):
    """An optimizer in use.

    Attributes:
        kind: its class; `by hand` for updates in the loop.
        where: the line that calls `step`.
        implementation: `forloop`, `foreach`, `fused`, or empty without a choice.
        groups: the parameter groups.
        steps: calls per training step.
        ms: per training step.
        evaluations: calls of the closure per call; 0 without one.
        made: share of the calls that a newly created optimizer of the same kind receives.
    """

    kind: str
    where: str
    implementation: str
    groups: list[GroupTime]
    steps: float
    ms: float
    evaluations: float = 0.0
    made: float = 0.0


class LoaderUse(Record):
    """A DataLoader in use.

    Attributes:
        where: the line that takes batches.
        dataset: class of the data set.
        sample_where: `file:line` of `__getitem__` or `__iter__`; `where` for a library's; empty for torch's own or
            non-Python.
        collate_where: the user's collate function; empty without one.
        samples: in the data set; None if unknown.
        stream: whether the data set is iterable-style.
        batch_size: samples per batch; None if the data set returns batches.
        sample_ms: of one call of the data set in this process.
        at_once: whether one call returns a whole batch.
        share: batches of this loader over those of the most used loader.
        draws: batches per step with any.
        batches: per pass; None if unknown.
        opened, opened_where: new passes per step, and their line.
        drawing_ms: loader's time per step; None if unmeasured.
        opening_ms: of that, until the first sample is requested, or until workers return the first batch.
        evaluating_ms: of that, in evaluation mode or without gradients.
    """

    where: str
    dataset: str
    sample_where: str = ""
    collate_where: str = ""
    samples: int | None
    stream: bool = False
    batch_size: int | None
    workers: int
    pinned: bool
    sample_ms: float | None = None
    at_once: bool = False
    share: float = 1.0
    draws: float = 1.0
    batches: int | None = None
    opened: float = 0.0
    opened_where: str = ""
    drawing_ms: float | None = None
    opening_ms: float = 0.0
    evaluating_ms: float = 0.0


class TimeOutsideSteps(Record):
    """Seconds outside training steps, or of rare actions, in the observed part of the run."""

    warm_up_s: float = 0.0
    compile_s: float = 0.0
    evaluation_s: float = 0.0
    checkpoint_s: float = 0.0
    other_s: float = 0.0
    updates: list[RareUpdate] = Field(default_factory=list)


class RareUpdate(Record):
    """An optimizer that steps in less than half of the steps, such as a GAN's generator.

    Attributes:
        kind, where: its class and line; of several that step together, all classes of the first and a line of the
            second.
        every: average number of steps between updates.
        ms: extra time of such a step over `step_ms`; None if unmeasured.
        phases: ms of each phase of the extra time.
    """

    kind: str
    where: str
    every: float
    ms: float | None = None
    phases: dict[Phase, float] = Field(default_factory=dict)


class ThreadUse(Record):
    """The process's use of cores.

    Attributes:
        torch: threads of one operation.
        cores: allowed cores.
        busy: cores in use on average, from CPU time.
        others: cores in use by other programs.
        slower: duration of operations relative to fewer threads, if measured.
        where: the line that sets the number; empty for none.
    """

    torch: int
    cores: int
    busy: float
    others: float
    slower: float | None = None
    where: str = ""


class PagingRecord(Record):
    """Memory pages that the system zeroes and assigns in a clean step although the process could keep them (glibc), and
    milliseconds of the system's CPU time in the step.
    """

    pages: float
    system_ms: float


class HardwareLimits(Record):
    """Measured limits of the training device; None if unmeasured.

    `busy`: other programs used the machine, so the limits are too low and no judgement uses them.
    """

    flop_per_s: dict[str, float] = Field(default_factory=dict)
    bytes_per_s: float | None = None
    launch_us: float | None = None
    copy_bytes_per_s: float | None = None
    busy: bool = False


class RankTime(Record):
    """One rank's step.

    Attributes:
        step_ms: by the rank's own clock.
        phases: ms per step; their sum is `step_ms`.
        waiting_ms, communication_ms: per step as a training counts them, also in parallel with computation and in rare
            steps. None where torch communicates by itself.
    """

    step_ms: float | None
    phases: dict[Phase, float] = Field(default_factory=dict)
    waiting_ms: float | None = None
    communication_ms: float | None = None


class Remedy(Record):
    """A way to make the step faster.

    Attributes:
        cause: the problem in a few words.
        where: `file:line` or a module's name.
        remedy: the plan axis to set, or the code to write.
        gain: largest possible share of the step (Amdahl, measured shares), 0 to 1.
        evidence: the measured numbers, in one sentence.
        axes: of a plan; empty where the user's code must change.
        note: whether the gain is too small to count.
        won: ratio and interval of a race with these axes; None without a race.
    """

    cause: str
    where: str
    remedy: str
    gain: float
    evidence: str = ""
    axes: dict[str, str | int | bool] = Field(default_factory=dict)
    note: bool = False
    won: tuple[float, float, float] | None = None


CTRL_C = "Ctrl-C"
"""Value of `Profile.stopped` after an interruption."""


class Profile(Record):
    """The times of a training step.

    Attributes:
        source: the Task's reference, or the script.
        busy: a remark on other programs that used the cores; empty if they don't matter.
        plan: a short description; empty for a script.
        device: of the plan.
        steps: observed training steps; 0 if no steps were recognised, and times are of the whole observed part.
        step_where: the line that ends a step.
        step_ms: median wall time between the ends of clean steps, without `apart`.
        phases: ms per step; instrumented times, scaled to the sum `step_ms`.
        attributed: share of the step outside `unattributed`, 0 to 1.
        samples_per_step, batch, one_batch: number of samples (or None), shapes, and whether each step has the same
            batch.
        bound, bound_evidence: the limit, and sentences with its numbers.
        identities: shapes, such as `3000x3000`, at which all matrices that rows are taken from are identity matrices.
        functions: of a script without steps, each at its first line; ms of the whole run.
        reduced: format of float32 products by operator class, where torch's settings use fewer bits.
        flops, bytes: per step; `limit_ms` is their time at this machine's measured limits.
        peak_memory_bytes: of the device, or of the process on the CPU.
        candidates: remedies that need a measurement, such as compilation.
        compiled: compiled against eager network; None without `--try`.
        advice: what to measure next, and what a measurement excluded.
        ranks: by number; empty for one process. All other fields except `samples_per_step` are of rank 0.
        slowest: the rank with the least waiting and communication; None for one process.
        trace: the Chrome trace's file.
        exit_code: of the script; None for a Task.
        stopped: why the observation ended early; empty otherwise.
        notes: what couldn't be observed, and why.
    """

    version: int = 1
    source: str
    plan: str = ""
    device: str = "cpu"
    steps: int
    step_where: str = ""
    step_ms: float | None
    phases: dict[Phase, float] = Field(default_factory=dict)
    attributed: float | None = None
    samples_per_step: float | None = None
    one_batch: bool = False
    batch: list[str] = Field(default_factory=list)
    modules: list[ModuleTime] = Field(default_factory=list)
    operators: list[OperatorTime] = Field(default_factory=list)
    identities: list[str] = Field(default_factory=list)
    lines: list[LineTime] = Field(default_factory=list)
    functions: list[LineTime] = Field(default_factory=list)
    optimizers: list[OptimizerUse] = Field(default_factory=list)
    loaders: list[LoaderUse] = Field(default_factory=list)
    habits: list[SlowPattern] = Field(default_factory=list)
    apart: TimeOutsideSteps = Field(default_factory=TimeOutsideSteps)
    threads: ThreadUse | None = None
    paging: PagingRecord | None = None
    limits: HardwareLimits = Field(default_factory=HardwareLimits)
    reduced: dict[str, str] = Field(default_factory=dict)
    overhead: Overhead | None = None
    flops: float | None = None
    bytes: float | None = None
    limit_ms: float | None = None
    bound: Bound = "unknown"
    bound_evidence: list[str] = Field(default_factory=list)
    remedies: list[Remedy] = Field(default_factory=list)
    candidates: list[Remedy] = Field(default_factory=list)
    compiled: CompiledNetwork | None = None
    advice: list[str] = Field(default_factory=list)
    ranks: list[RankTime] = Field(default_factory=list)
    slowest: int | None = None
    peak_memory_bytes: int | None = None
    busy: str = ""
    trace: str | None = None
    exit_code: int | None = None
    stopped: str = ""
    notes: list[str] = Field(default_factory=list)
    machine: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    seconds: float = 0.0


TimeOutsideSteps.model_rebuild()

Profile.model_rebuild()

COUNTS = 0.05
"""Smallest share of the step that makes a finding a remedy and not a note."""
