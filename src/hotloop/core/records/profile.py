"""Where the time of a training goes, and what would help: frozen, versioned records. They need no torch to be read."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hotloop.core.records.profile_ratios import CompiledNetwork, Overhead
from hotloop.core.records.profile_terms import Bound, Phase, SlowPattern
from hotloop.core.records.training import Record

TAKE_ROWS = frozenset({"aten::index", "aten::index_select", "aten::embedding"})
"""Operators that take rows of their first matrix."""


class ModuleTime(Record):
    """A module of the network in one step; times are means of the middle half of the steps measured.

    Attributes:
        name: by which its model knows it; empty for the model itself. With several models, the model's name stands
            before: `generator.conv1`. `(loss)` and the like, in parentheses, are parts that belong to no module.
        kind: its class.
        calls: per step.
        forward_ms, backward_ms: with everything inside it; None where it couldn't be told.
        own_forward_ms, own_backward_ms: without the modules inside it.
        update_ms: of its weights and of those inside it; None where the optimizer's update isn't told apart by module.
        share: of the step's time, forward and backward with everything inside it.
        flops, bytes: of forward and backward in a step, its own operators and those inside; None where unknown.
        limit_share: the time that this machine's measured limits allow for them, over the time taken; None if unknown.
        fused_with: other modules that shared a kernel with it, whose time was split by their arithmetic.
    """

    name: str
    kind: str
    calls: float
    forward_ms: float | None
    backward_ms: float | None
    own_forward_ms: float | None = None
    own_backward_ms: float | None = None
    update_ms: float | None = None
    share: float
    flops: float | None = None
    bytes: float | None = None
    limit_share: float | None = None
    fused_with: list[str] = Field(default_factory=list)


class OperatorTime(Record):
    """What one operator takes in one step, at one place, with one kind of input.

    Attributes:
        name: as torch calls it, such as `aten::convolution_backward`.
        phase: of the step.
        module: whose forward it is, or whose forward made this backward; empty where none did.
        where: the user's line that called it, or whose forward made this backward, as `file:line`; empty if unknown.
        function: that this line is in.
        calls, ms: per step, without operators inside it; on an accelerator the time of its kernels.
        shapes: of its inputs, such as `8x10x28x28`.
        dtype: of its first floating-point input, such as `float32`; empty if it has none.
        device: where it ran.
        flops, bytes: per step; None where unknown.
        line_runs: how often that line ran in a step, as Python ran it; None where that wasn't seen.
        used: whether its result took part in a backward; None where that doesn't matter or isn't known.
        copies: from and to which device, such as `cpu>cuda:0`, for copies between devices; empty otherwise.
        within: an optimizer's `step` or `zero_grad` that called it; empty if neither did.
        outer: the outermost of torch's own operators, such as `aten::one_hot`, inside of which it ran; empty for none.
        hooked: whether the user's own Python called it in a backward, between what autograd computes, as hooks do.
        alike: how many modules like this one, or like one that it is in, were given the same input or slices of it; or 0.
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
    """A line on the stack of the thread that trains, from samples of that stack taken during steps.

    Attributes:
        where: as `file:line`; lines of the user's own files, and of libraries only where `library` says so.
        function: that the line is in.
        library: the library whose code it called into when sampled (`torch`, `PIL`, `matplotlib`); empty for none.
        phase: of the step at that instant.
        ms: per step, with everything that the line called.
        own_ms: without other lines of the user's.
        within: the line of the user's that its function was called from, most of the time; empty where there is none.
        looks: samples that `own_ms` comes from; None where nobody counted.
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
    """A parameter group; `ms` of its update is None where torch updates all groups in one go.

    Groups with the same number of `settings` are updated in the same way, whichever optimizer of a kind they belong to.
    """

    name: str
    tensors: int
    numbers: int
    settings: int = 0
    ms: float | None


class OptimizerUse(Record):
    """An optimizer as it was used.

    Attributes:
        kind: its class; `by hand` for updates written out in the loop.
        where: the line that steps it.
        implementation: `forloop`, `foreach`, `fused`, or empty if it has no such choice.
        groups: per parameter group, its name or number, how many tensors and numbers it holds, and its update's ms.
        steps: calls per training step.
        ms: per training step.
        evaluations: how often a call runs the closure that it is given; 0 where there is none.
        made: of its calls, the part that another one of its kind gets, made in its place.
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
    """A DataLoader as it was used for training.

    Attributes:
        where: the line that draws batches from it.
        dataset: class of its data set.
        sample_where: `file:line` of `__getitem__` or `__iter__`; `where` if a library's; empty if torch's own or not Python.
        collate_where: where the user's own function puts a batch together; empty if there is none.
        samples: in the data set; None where it doesn't say.
        stream: whether it gives samples in an order of its own, by no numbers.
        batch_size: samples that the loader asks for at a time; None where it hands on what the data set gives.
        sample_ms: of one call of the data set, which makes one sample or a whole batch, where that is done in this process.
        at_once: whether one call makes a whole batch.
        share: of the steps, for each that draws from the loader used most, how many draw from this one.
        draws: batches in a step that draws any.
        batches: until it begins anew; None where that isn't known.
        opened: times in a step that it begins anew, at the line `opened_where`.
        drawing_ms: in a step, as the loader was seen to take; None where nobody looked.
        opening_ms: of that, until the first sample is asked for, with workers until they gave the first batch.
        evaluating_ms: of that, where the network is in evaluation mode or gradients don't count.
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
    """Time outside training steps, or at most once in many of them; seconds of the part of the run that was watched."""

    warm_up_s: float = 0.0
    compile_s: float = 0.0
    evaluation_s: float = 0.0
    checkpoint_s: float = 0.0
    other_s: float = 0.0
    updates: list[RareUpdate] = Field(default_factory=list)


class RareUpdate(Record):
    """An optimizer that steps beside the one that ends a step, but in less than half of the steps, as a GAN's generator.

    Attributes:
        kind, where: its class and the line that steps it; of several that step together all of the first, one of the second.
        every: so many steps, on average.
        ms: by which such a step is longer than the others, on top of `step_ms`; None where none was measured.
        phases: ms of each phase that make it longer.
    """

    kind: str
    where: str
    every: float
    ms: float | None = None
    phases: dict[Phase, float] = Field(default_factory=dict)


class ThreadUse(Record):
    """How the process used the cores.

    Attributes:
        torch: threads of one operation.
        cores: that this process may use.
        busy: cores that this process kept busy on average, from its CPU time.
        others: cores that other programs kept busy.
        slower: how many times as long operations take with so many threads as with fewer, where that was measured here.
        where: the line that says how many; empty if none does.
    """

    torch: int
    cores: int
    busy: float
    others: float
    slower: float | None = None
    where: str = ""


class PagingRecord(Record):
    """Pages of memory that the system gives to a clean step, each zeroed before, where the process could keep them (glibc);
    and milliseconds of processors' time that the system took in it, for them and for all else.
    """

    pages: float
    system_ms: float


class HardwareLimits(Record):
    """What this machine was measured to reach on the device that trains; None where it wasn't measured.

    `busy` says that other programs used the machine meanwhile, so that the machine reaches more: nothing is judged by that.
    """

    flop_per_s: dict[str, float] = Field(default_factory=dict)
    bytes_per_s: float | None = None
    launch_us: float | None = None
    copy_bytes_per_s: float | None = None
    busy: bool = False


class RankTime(Record):
    """One of the ranks that share a step.

    Attributes:
        step_ms: as it has it by its own clock.
        phases: ms per step, which add up to that.
        waiting_ms, communication_ms: per step, as a training counts them: with what goes on while the rank computes, and
            with steps that only come now and then. None where torch sends by itself, which nobody counts.
    """

    step_ms: float | None
    phases: dict[Phase, float] = Field(default_factory=dict)
    waiting_ms: float | None = None
    communication_ms: float | None = None


class Remedy(Record):
    """What would help.

    Attributes:
        cause: what is wrong, in a few words.
        where: `file:line` or a module's name.
        remedy: what to do: the axis of a plan to set, or what to write instead.
        gain: share of the step that it can win (Amdahl on the measured shares), 0 to 1.
        evidence: the numbers that say so, in one sentence.
        axes: of a plan that do it; empty where the user's own line must change.
        note: whether it costs too little here to count.
        won: the ratio that a race with these axes found, with its interval; None where it wasn't raced.
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
"""What stopped the measuring of a Task."""


class Profile(Record):
    """Where the time of a training step goes.

    Attributes:
        source: the Task's reference, or the script.
        busy: what to say of other programs that used the cores meanwhile, and what to do; empty where they don't count.
        plan: in brief; empty for a script.
        engine, device: of the plan; a script's engine is PyTorch's, `eager`.
        steps: training steps watched; 0 where steps couldn't be told apart, and times are then of the whole watched part.
        step_where: the line that ends a step.
        step_ms: median wall time of the clean steps, from one step's end to the next's, what is `apart` left out.
        phases: ms per step, which add up to the instrumented steps' wall time scaled to `step_ms`.
        attributed: share of the step in phases other than `unattributed`, 0 to 1.
        samples_per_step, batch, one_batch: how many or None, their shapes, and whether they are the same in each step.
        bound: with `bound_evidence`, sentences with the numbers behind it.
        identities: shapes of matrices that rows are taken of, `3000x3000`, of which there are none but identity matrices.
        functions: each at its first line, of a script that has no steps; ms, and those of its lines, are of the whole run.
        reduced: the format of fewer bits in which products of float32 are computed by torch's settings, such as `tf32`, by
            class of operators: `matmul`, `conv`, `rnn`; empty where all are in fp32.
        flops, bytes: of a step; `limit_ms` is the least that this machine's measured limits allow for them.
        peak_memory_bytes: of the device, or of the process on the CPU.
        candidates: remedies that only a measurement tells, such as compiling; they are no advice before one.
        compiled: the race of the compiled network against the eager network; None without `--try`.
        advice: lines that are no remedies: what to measure next, and what a measurement spoke against.
        ranks: that share the step, by number; none of one process. All else but `samples_per_step` is the first one's own.
        slowest: the rank that the others wait for: it spends least in waiting and communication; None of one process.
        trace: file of the Chrome trace, if one was written.
        exit_code: of the script; None for a Task.
        stopped: why watching ended before the script did, or a Task had all its steps; empty if it didn't.
        notes: what couldn't be seen, and why.
    """

    version: int = 1
    source: str
    plan: str = ""
    engine: Literal["eager", "arrays"] = "eager"
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
"""Share of the step from which on something is worth a remedy; below, it's a note at most."""
