"""Summarizes recorded facts as a Profile: regular steps, times of a step, and time outside of regular steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, median, median_low
from typing import Any

from hotloop.core.number_formats import reduced_formats
from hotloop.core.records.profile import (
    CompiledNetwork,
    LineTime,
    LoaderUse,
    ModuleTime,
    OperatorTime,
    OptimizerUse,
    Overhead,
    PagingRecord,
    Profile,
    RareUpdate,
    ThreadUse,
    TimeOutsideSteps,
)
from hotloop.core.records.profile_terms import Phase, SlowPattern
from hotloop.profiler.base.phases import without_cold_steps
from hotloop.profiler.base.steps import DEFAULT_STEPS, DELAYED, Kind, ProfileFacts, StepFact, mean_phases, middle_mean
from hotloop.profiler.detectors.optimizer_updates import merge_alike_optimizers
from hotloop.profiler.timers.line_sampler import shift_phases
from hotloop.profiler.trace.events import clamp_ops_to_phases
from hotloop.tuning.races.statistics import ratio_of

_MIN_STEPS = 8
_CONFIDENCE = 0.95

_MAX_OPTIMIZERS = 20
"""Reported optimizers; if there are more, alike optimizers of one line are merged, and the longest reported."""

_MIN_PAGES = 16.0
"""Pages per step; any step has a few."""


def summarize(facts: ProfileFacts, source: str, *, plan: str = "") -> Profile:
    """Returns a Profile without limits and remedies."""
    measured = [step for step in facts.steps if step.kind in ("clean", "instrumented")]
    usual = _usual_flags(measured)
    clean, instrumented = (_regular(without_cold_steps(measured), kind, usual) for kind in ("clean", "instrumented"))
    step_ms = median(step.ms for step in clean or instrumented) if measured else None
    scale = step_ms / median(step.ms for step in instrumented) if instrumented and step_ms else 1.0
    lengths = StepLengths(facts.steps, instrumented)
    lines, functions = (
        [LineTime.model_validate(record | _scale_record(record, scale)) for record in records]
        for records in (facts.lines, facts.functions)
    )
    traced = [lengths.operator(one) for one in facts.operators]
    operators = [OperatorTime.model_validate(one | _scale_record(one, scale, one["device"])) for one in traced]
    modules = [_module_time(one, scale, step_ms, facts.device) for one in facts.modules]
    habits = [one | _scale_record(one, scale) for one in map(lengths.habit, facts.habits)]
    timed = shift_phases(_phases(instrumented, step_ms), facts.turned)
    phases = refine_phases(timed, lines)
    if not measured:
        phases = next((step.phases for step in facts.steps if step.kind == "whole"), {})
    return Profile(
        source=source,
        plan=plan,
        device=facts.device,
        steps=len(measured),
        step_where=facts.anchor if measured else "",
        step_ms=step_ms,
        phases=phases,
        attributed=1 - phases.get("unattributed", 0.0) / sum(phases.values()) if phases else None,
        samples_per_step=facts.samples_per_step,
        one_batch=facts.one_batch,
        batch=facts.batch,
        modules=modules,
        operators=clamp_ops_to_phases(operators, timed),
        identities=facts.identities,
        lines=lines,
        functions=functions,
        optimizers=_merge_many([OptimizerUse.model_validate(one) for one in _optimizer_records(facts, phases, scale)]),
        loaders=[LoaderUse.model_validate(one) for one in facts.loaders],
        habits=[_pattern(one, measured, phases, step_ms) for one in (*habits, *facts.collections)],
        apart=_irregular(facts, measured, usual, step_ms),
        threads=ThreadUse.model_validate(facts.threads | {"where": facts.threads_set_at}) if facts.threads else None,
        paging=_paging_of(clean),
        reduced=reduced_formats(facts.switches, facts.device.partition(":")[0]),
        overhead=_overhead(without_cold_steps(measured), usual),
        peak_memory_bytes=facts.peak_memory_bytes,
        trace=facts.trace,
        compiled=None if facts.compiled is None else CompiledNetwork.model_validate(facts.compiled),
        notes=[*facts.notes, *_notes(facts, measured)],
        versions=facts.versions,
        seconds=facts.watched_s,
    )


def _scale_record(record: dict, scale: float, device: str = "cpu") -> dict:
    """Scales host times of a record from instrumented to clean steps; times of device kernels stay.

    The overhead of recording may be as long as a small step.
    """
    times = {name: ms for name, ms in record.items() if name == "ms" or name.endswith("_ms")}
    return {name: ms * scale for name, ms in times.items() if ms is not None and device == "cpu"}


def _module_time(record: dict, scale: float, step_ms: float | None, device: str) -> ModuleTime:
    known = record | _scale_record(record, scale, device)
    if step_ms and device == "cpu":
        known["share"] = ((known["forward_ms"] or 0.0) + (known["backward_ms"] or 0.0)) / step_ms
    return ModuleTime.model_validate(known)


def _usual_flags(steps: Sequence[StepFact]) -> set[str]:
    """Events of at least half of the steps, which are part of a step therefore."""
    counts = Counter(flag for step in steps for flag in set(step.flags))
    return {flag for flag, count in counts.items() if 2 * count >= len(steps)}


def _regular(steps: Sequence[StepFact], kind: str, usual: set[str]) -> list[StepFact]:
    """Steps of a kind with usual events only, and without delays."""
    of_kind = [step for step in steps if step.kind == kind]
    regular = [step for step in of_kind if usual.issuperset(step.flags)] or of_kind
    if not regular:
        return []
    limit = DELAYED * median(step.ms for step in regular)
    return [step for step in regular if step.ms <= limit]


def _phases(steps: Sequence[StepFact], step_ms: float | None) -> dict[Phase, float]:
    """Milliseconds per phase, scaled to the duration of a clean step."""
    if not steps or not step_ms:
        return {}
    means = mean_phases(steps)
    total = sum(means.values())
    return {name: mean * step_ms / total for name, mean in means.items() if mean}


def _paging_of(steps: Sequence[StepFact]) -> PagingRecord | None:
    """A mean, since system time is counted in ticks; None if the system provided few pages."""
    if not steps or not (pages := sum(step.pages for step in steps) / len(steps)) > _MIN_PAGES:
        return None
    return PagingRecord(pages=pages, system_ms=sum(step.system_ms for step in steps) / len(steps))


def _optimizer_records(facts: ProfileFacts, phases: dict[Phase, float], scale: float) -> list[dict]:
    if facts.optimizers or facts.updates or facts.awaited or not facts.by_hand or "update" not in phases:
        return _scale_to_phase(facts.optimizers, phases.get("update"), scale)
    updating = [one for one in facts.operators if one["phase"] == "update" and one["where"]]
    where = max(updating, key=lambda one: one["ms"])["where"] if updating else facts.anchor
    by_hand: dict[str, Any] = {"kind": "by hand", "where": where, "implementation": "", "groups": [], "steps": 1.0}
    return [{**by_hand, "ms": phases["update"]}]


def _scale_to_phase(found: list[dict], update_ms: float | None, scale: float) -> list[dict]:
    """Scales to a clean step; the sum is at most the update phase, which includes clipping and `zero_grad`."""
    clocked_ms = sum(one["ms"] for one in found)
    factor = min(scale, update_ms / clocked_ms) if update_ms and clocked_ms else scale

    def scaled(group: dict) -> dict:
        return group | {"ms": None if group["ms"] is None else group["ms"] * factor}

    return [one | {"ms": one["ms"] * factor, "groups": [*map(scaled, one["groups"])]} for one in found]


def _merge_many(uses: list[OptimizerUse]) -> list[OptimizerUse]:
    if len(uses) <= _MAX_OPTIMIZERS:
        return uses
    return sorted(merge_alike_optimizers(uses), key=lambda one: -one.ms)[:_MAX_OPTIMIZERS]


def _pattern(record: dict, steps: Sequence[StepFact], phases: dict[Phase, float], step_ms: float | None) -> SlowPattern:
    """Adds the costs that all steps tell: memory growth, and the pattern's share of the backward or of the step."""
    known = {name: value for name, value in record.items() if name not in ("part", "share")}
    if share := record.get("share"):
        known["ms"] = share * (step_ms or 0.0)
    if part := record.get("part"):
        known["ms"] = (record["ms"] or 0.0) + part * phases.get("backward", 0.0)
    return SlowPattern.model_validate({**known, "bytes": _memory_growth(record["what"], steps)})


def _memory_growth(what: str, steps: Sequence[StepFact]) -> float | None:
    """Bytes per step by which memory grew, for patterns that keep a graph."""
    if what not in ("kept graph", "carried graph") or len(steps) < _MIN_STEPS:
        return None
    memory = [step.memory for step in steps if step.memory]
    half = len(memory) // 2
    if not half:
        return None
    earlier, later = median(memory[:half]), median(memory[half:])
    return max(0.0, (later - earlier) / (len(steps) / 2))


def _irregular(
    facts: ProfileFacts, steps: Sequence[StepFact], usual: set[str], step_ms: float | None
) -> TimeOutsideSteps:
    """Extra time of irregular steps over a regular one, and recorded times of unusual events in other steps."""
    spent = {"evaluation": 0.0, "checkpoint": 0.0, "other": 0.0}
    for step in steps:
        excess = max(0.0, step.ms - (step_ms or 0.0))
        unusual = set(step.flags) - usual
        if not unusual and excess <= (DELAYED - 1) * (step_ms or 0.0):
            continue
        for what in ("checkpoint", "evaluation"):
            taken = min(excess, step.apart_ms.get(what, 0.0)) if what in unusual else 0.0
            spent[what] += taken
            excess -= taken
        loaded = any(flag.startswith("loader") for flag in unusual)
        if loaded or not any(flag.startswith("update") for flag in unusual):  # rare updates are reported separately
            spent["evaluation" if loaded else "other"] += excess
    for what in {"evaluation", "checkpoint"} - usual:  # in steps that are not measured
        others = (step for step in facts.steps if step.kind not in ("early", "clean", "instrumented"))
        spent[what] += facts.between_ms.get(what, 0.0) + sum(step.apart_ms.get(what, 0.0) for step in others)
    return TimeOutsideSteps(
        warm_up_s=facts.warm_up_s,
        compile_s=facts.compile_s,
        evaluation_s=spent["evaluation"] / 1e3,
        checkpoint_s=spent["checkpoint"] / 1e3,
        other_s=spent["other"] / 1e3,
        updates=_rare_updates(facts, steps, usual),
    )


def _rare_updates(facts: ProfileFacts, steps: Sequence[StepFact], usual: set[str]) -> list[RareUpdate]:
    """Optimizers that step in some steps, merged if they step together, with the extra time of these steps."""
    unusual = [set(step.flags) - usual for step in steps]
    regular = {kind: _regular(steps, kind, usual) for kind in ("clean", "instrumented")}
    groups: dict[tuple[int, ...], list[dict]] = {}
    for one in facts.seldom:
        if one["flag"] not in usual:
            groups.setdefault(tuple(n for n, flags in enumerate(unusual) if one["flag"] in flags), []).append(one)
    found = []
    for numbers, ones in groups.items():
        together = {one["flag"] for one in ones}
        ms, phases = _extra_time([steps[n] for n in numbers if unusual[n] == together], regular)
        kind = " and ".join(dict.fromkeys(one["kind"] for one in ones))
        found.append(RareUpdate(kind=kind, where=ones[0]["where"], every=ones[0]["every"], ms=ms, phases=phases))
    return found


def _extra_time(
    steps: Sequence[StepFact], regular: dict[str, list[StepFact]]
) -> tuple[float | None, dict[Phase, float]]:
    usual_ms = {kind: median(step.ms for step in ones) for kind, ones in regular.items() if ones}
    excess = [step.ms - usual_ms[step.kind] for step in steps if step.kind in usual_ms]
    if not excess:
        return None, {}
    ms, timed = max(0.0, median(excess)), [step for step in steps if step.kind == "instrumented"]
    names = dict.fromkeys(name for step in timed for name in step.phases)
    more = {name: _mean_ms(timed, name) - _mean_ms(regular["instrumented"], name) for name in names}
    total = sum(extra for extra in more.values() if extra > 0)
    return ms, {name: extra * ms / total for name, extra in more.items() if extra > 0}


def _mean_ms(steps: Sequence[StepFact], phase: Phase) -> float:
    return middle_mean([step.phases.get(phase, 0.0) for step in steps]) if steps else 0.0


def _overhead(steps: Sequence[StepFact], usual: set[str]) -> Overhead | None:
    """Compares pairs of neighboring clean and instrumented steps; None with too few pairs for an interval."""
    regular = {id(step) for kind in ("clean", "instrumented") for step in _regular(steps, kind, usual)}
    pairs = [
        sorted((first, second), key=lambda step: step.kind)  # the clean one first
        for first, second in zip(steps[::2], steps[1::2], strict=False)
        if id(first) in regular and id(second) in regular
    ]
    if not pairs:
        return None
    ratio = ratio_of([second.ms for _, second in pairs], [first.ms for first, _ in pairs], confidence=_CONFIDENCE)
    if ratio.low is None or ratio.high is None:
        return None
    return Overhead(ratio=ratio.median, low=ratio.low, high=ratio.high, instrumented=len(pairs), clean=len(pairs))


def _notes(facts: ProfileFacts, measured: Sequence[StepFact]) -> list[str]:
    if not facts.torch:
        return ["the script never imported torch, so there are no steps; times are of the whole run"]
    if not facts.trained and facts.children:
        many = f"{facts.children} other processes" if facts.children > 1 else "another process"
        return [
            f"the script never trained in this process, but started {many}, in which training isn't recorded; "
            "train in one process to profile the training"
        ]
    if not facts.trained and facts.closed:
        return []
    if not facts.trained:
        return [
            "the script imported torch, but computed no gradient and stepped no optimizer: it never trained here; "
            "times of lines are of the whole run"
        ]
    if not measured:
        rest = "times are of a period of training as a whole" if facts.steps else "no times are known"
        return [f"no steps were found in {facts.trained} updates and backwards: too few or too irregular; {rest}"]
    notes = []
    if len(measured) < 2 * _MIN_STEPS:
        notes.append(f"only {len(measured)} step{'s'[: len(measured) - 1]} could be measured, so the times are rough")
    if facts.by_hand and (facts.updates or facts.awaited):
        notes.append(_too_few_updates(facts, measured))
    elif facts.by_hand:
        notes.append(
            "no optimizer stepped while recorded: each backward counts as a step, and the code after it as the update"
        )
    elif facts.updates_inside and not facts.updates:
        notes.append("updates run inside the backward: each backward counts as a step")
    if facts.functional:
        notes.append("no module was called, so the times of batch, forward and loss can't be separated")
    return notes


def _too_few_updates(facts: ProfileFacts, measured: Sequence[StepFact]) -> str:
    times = f"stepped only {facts.updates} time{'s'[: facts.updates - 1]}" if facts.updates else "didn't step"
    longer = f"record with --steps {max(DEFAULT_STEPS, 2 * len(measured))}" if facts.closed else "train for longer"
    return (
        f"an optimizer {times} while recorded, too seldom to find its steps: each backward counts as one, and updates "
        f"are left out; {longer} to profile them"
    )


_LOGGING_LIBRARIES = frozenset(
    {"PIL", "matplotlib", "tensorboard", "tensorboardX", "tqdm", "wandb", "mlflow", "logging", "imageio"}
)
_LOOP_PHASES: tuple[Phase, ...] = ("batch", "python", "loss", "update")
_MIN_SHARE = 0.03
"""Least share of the step; shorter phases have too few samples."""


def refine_phases(phases: dict[Phase, float], lines: Sequence[LineTime]) -> dict[Phase, float]:
    """Moves milliseconds of sampled calls into drawing and logging libraries to the logging phase; the sum stays."""
    phases, step = dict(phases), sum(phases.values())
    for phase in _LOOP_PHASES:
        if phases.get(phase, 0.0) > _MIN_SHARE * step:
            _move(phases, phase, "logging", _logging_share(phase, lines))
    return phases


def _move(phases: dict[Phase, float], source: Phase, target: Phase, share: float) -> None:
    if share:
        moved = phases[source] * share
        phases[source] -= moved
        phases[target] = phases.get(target, 0.0) + moved


def _logging_share(phase: Phase, lines: Sequence[LineTime]) -> float:
    sampled = [line for line in lines if line.phase == phase]
    total = sum(line.own_ms for line in sampled)
    return sum(line.own_ms for line in sampled if line.library in _LOGGING_LIBRARIES) / total if total else 0.0


_PER_STEP = ("ms", "calls", "per_step", "flops", "bytes")

_WITH_CALLS = 0.5
"""Least number per network call at which an operator or a pattern scales with the calls."""


class StepLengths:
    """The lengths of steps, in calls of networks.

    Graphs and operators are recorded in a few steps only. If these steps are shorter or longer than the timed steps,
    their figures per step are wrong by the same factor.

    Args:
        steps: all recorded steps.
        timed: the steps with phases, whose length is the usual one.
    """

    def __init__(self, steps: Sequence[StepFact], timed: Sequence[StepFact]) -> None:
        calls = [step.calls for step in timed]
        self._steps, self._usual = steps, middle_mean(calls) if len(set(calls)) > 1 else 0.0

    def operator(self, record: dict) -> dict:
        """Returns an operator of the traced steps, per usual step. The update runs once in a step of any length."""
        if not (recorded := self._record_lengths("traced")) or record["phase"] == "update":
            return record
        limit = DELAYED * median_low([step.ms for step in recorded])
        calls = fmean([step.calls for step in recorded if step.ms <= limit])
        return self._correct(record, record["calls"], calls)

    def habit(self, record: dict) -> dict:
        """Returns a pattern, recorded as the median of the pattern steps, per usual step."""
        if not (recorded := self._record_lengths("habits")):
            return record
        return self._correct(record, record["per_step"], median_low([step.calls for step in recorded]))

    def _record_lengths(self, kind: Kind) -> list[StepFact]:
        return [step for step in self._steps if self._usual and step.kind == kind and step.calls]

    def _correct(self, record: dict, many: float, calls: float) -> dict:
        ratio, runs = self._usual / calls, record.get("line_runs")
        corrected = {"line_runs": runs * ratio} if runs and runs >= _WITH_CALLS * calls else {}
        if many >= _WITH_CALLS * calls:
            corrected |= {name: record[name] * ratio for name in _PER_STEP if record.get(name)}
        return record | corrected
