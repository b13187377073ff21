"""Proof of a plan: single steps compared with float64, then a free run compared with the baseline."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from hotloop.core.hardware.devices import check_device
from hotloop.core.hardware.limits import format_binary_bytes, free_memory_bytes
from hotloop.core.number_formats import REDUCED, lowest_format
from hotloop.core.random.rng import preserve_generators
from hotloop.core.records.race import STATES, Parity
from hotloop.core.state import State
from hotloop.core.task_parts.optimizers import NamedOptimizers
from hotloop.data.batch_tree import tree_tensors
from hotloop.errors import HotloopError, MemoryExhausted, describe_error, error_summary, is_out_of_memory
from hotloop.lowering.build import lower
from hotloop.lowering.program import Program
from hotloop.parity.comparison import Evidence, StepErrors
from hotloop.parity.free_run import NUDGES, FreeRunResult, compare_free_runs, free_run_steps
from hotloop.parity.references import (
    Float64Reference,
    ReferenceRun,
    baseline_references,
    has_image_normalization,
    reduced_precision_references,
    references_in_formats,
)
from hotloop.parity.rng_tests import check_own_draws, check_word_draws
from hotloop.parity.shared_rng import PieceDraws, WordDraws, find_random_ops
from hotloop.parity.step_collector import StepCollector
from hotloop.parity.verdict import classify
from hotloop.plan import Plan
from hotloop.task import Task

_WEIGHT_COPIES, _STATE_COPIES = 14, 6
"""Copies of the weights and of the optimizer's state in host memory, measured on the CPU: float64 takes twice the bytes
of fp32. An accelerator's host, which stores a copy of each step, is assumed to need as much."""

_PROGRAM_COUNT = 3
"""Program sizes on an accelerator: one for the baseline, two for the float64 reference."""

_SAFE_SHARE = 0.75
"""Share of the free memory: allocators return only part of it, and activations come on top."""


def missing_memory(programs: Sequence[Program]) -> str:
    """Returns why there is too little memory for a proof of these Programs; empty if there is enough."""
    for device, need in needed_bytes(programs).items():
        free = free_memory_bytes(device)
        if need > _SAFE_SHARE * free:
            where = "" if device.type == "cpu" else f" on {device}"
            takes = f"a proof takes about {format_binary_bytes(need)} of memory{where}"
            return f"{takes}, of which {format_binary_bytes(free)} are free"
    return ""


def needed_bytes(programs: Sequence[Program]) -> dict[torch.device, int]:
    """Returns the bytes that a proof needs on host and device, beside the Programs and activations."""
    weights, state = _weight_and_state_bytes(programs[0])
    device, host = programs[0].device, torch.device("cpu")
    others, whole = (len(programs) - 1) * (weights + state), 2 * weights + state  # with gradients
    needed = {host: _WEIGHT_COPIES * weights + _STATE_COPIES * state + others}
    if device != host:
        needed[device] = _PROGRAM_COUNT * whole
    if has_image_normalization(programs[0]):  # one more reference Program
        needed[device] += whole
    return needed


def _weight_and_state_bytes(program: Program) -> tuple[int, int]:
    """Returns the bytes of parameters with buffers, and of the optimizer's state; an estimate before the first step."""
    weights = sum(value.nbytes for value in (*program.model.parameters(), *program.model.buffers()))
    if not program.optimizer.state:
        return weights, int(weights * _state_per_weight(program.optimizer))
    return weights, _bytes_of_state(program.optimizer)


def _bytes_of_state(optimizer: torch.optim.Optimizer) -> int:
    values = tree_tensors(list(optimizer.state.values()))
    return sum(value.nbytes for value in values if value.ndim)  # without step counts


def _state_per_weight(optimizer: torch.optim.Optimizer) -> float:
    """Returns bytes of state per byte of weights, from a step of a small optimizer; else 2, as Adam."""
    weight = torch.nn.Parameter(torch.zeros(8, 8))
    weight.grad = torch.ones_like(weight)
    known = inspect.signature(type(optimizer)).parameters
    try:
        with preserve_generators():
            twin = type(optimizer)(
                [weight], **{name: value for name, value in optimizer.defaults.items() if name in known}
            )
            twin.step()
    except Exception:  # a user's optimizer may need other arguments
        return 2.0
    return _bytes_of_state(twin) / weight.nbytes


ProofProgress = Callable[[int, int], None]
"""Called with the number of compared states and the number of all states."""

SharedDraws = PieceDraws | WordDraws | None
"""Random draws that differ from the baseline's; None if candidates draw as the baseline does."""


def prove(task: Task, plan: Plan, *, progress: ProofProgress = lambda done, total: None) -> Parity:
    """Compares a plan with the baseline on its device; see `prove_programs`.

    Raises:
        PlanError: the plan can't be run here.
    """
    program = lower(task, plan)
    try:
        return prove_programs(task, [program], progress=progress)[0]
    finally:
        program.close()


def prove_plans(
    task: Task, plans: Sequence[Plan], *, progress: ProofProgress = lambda done, total: None
) -> list[Parity]:
    """Compares plans with the baseline, those of one device and reduced precision together; see `prove_programs`.

    A plan that can't be run, or for which there is no memory, is unproven.
    """
    found: dict[Plan, Parity] = {}
    groups: dict[tuple[str, str], list[Program]] = {}
    for plan in dict.fromkeys(plans):
        try:
            asked = plan.precision if plan.precision in REDUCED else "none"
            groups.setdefault((plan.device, asked), []).append(lower(task, plan))
        except Exception as error:
            why, passing = error_summary(error)
            if not (passing or isinstance(error, HotloopError)):
                raise
            found[plan] = _unproven_parity(plan, _memory_reason(error) if is_out_of_memory(error) else why, passing)
    for programs in groups.values():
        try:
            parities = prove_programs(task, programs, progress=progress)
        finally:
            for program in programs:
                program.close()
        found |= zip([program.parts.plan for program in programs], parities, strict=True)
    return [found[plan] for plan in plans]


def prove_programs(
    task: Task,
    programs: Sequence[Program],
    *,
    later: State | None = None,
    progress: ProofProgress = lambda done, total: None,
) -> list[Parity]:
    """Compares Programs of one Task, on one device and in one reduced precision or none, with the baseline there.

    From States along the baseline's path each Program takes one step with the same batch and random numbers, and so
    does the baseline in float64. Losses, gradients, updates, the optimizer's state and buffers may differ from float64
    by a small multiple of the differences of harmlessly changed baselines. A free run across the end of an epoch
    follows. A Program with products in fewer bits than the baseline is at best `reduced-precision`. The Programs'
    States are restored. Without enough memory, the Programs are unproven.

    Args:
        later: a State of the training: after its first steps the baseline's path goes on from there.

    Raises:
        HotloopError: a step of the baseline itself fails, and so would the training.
    """
    if any(isinstance(program.optimizer, NamedOptimizers) for program in programs):
        why = "the step updates several optimizers in turn, and a proof compares one update in a step"
        return [_unproven_parity(program.parts.plan, why, False) for program in programs]
    if why := missing_memory(programs):
        return [_unproven_parity(program.parts.plan, why, True) for program in programs]
    found: dict[int, Parity] = {}
    try:
        for draws, together in _group_by_draws(task, programs):
            found |= zip(map(id, together), _prove_group(task, together, draws, progress, later), strict=True)
    except Exception as error:
        if not (is_out_of_memory(error) or isinstance(error, MemoryExhausted)):
            raise
        none_left = _memory_reason(error)
        return [found.get(id(program), _unproven_parity(program.parts.plan, none_left, True)) for program in programs]
    return [found[id(program)] for program in programs]


def _unproven_parity(plan: Plan, reason: str, short_of_memory: bool) -> Parity:
    return Parity(plan=plan.brief(), parity="unproven", reason=reason, states=0, short_of_memory=short_of_memory)


def _memory_reason(error: Exception) -> str:
    return (
        "there was no memory left for the proof, which holds the model in float64, baselines and all plans at once"
        f" ({describe_error(error)}); hotloop check proves one plan alone"
    )


def _group_by_draws(task: Task, programs: Sequence[Program]) -> list[tuple[SharedDraws, list[Program]]]:
    """Returns groups of Programs with the same random draws, each with the draws that differ from the baseline's."""
    by_words = [program for program in programs if program._step.draws_by_words]
    others = [program for program in programs if not program._step.draws_by_words]
    return [*([(WordDraws(), by_words)] if by_words else []), *(_group_by_pieces(task, others) if others else [])]


def _group_by_pieces(task: Task, programs: Sequence[Program]) -> list[tuple[SharedDraws, list[Program]]]:
    """Returns groups of Programs with the same number of pieces per batch, each with the draws of these pieces."""
    plans = [program.parts.plan for program in programs]
    cut = {plan.accumulation for plan in plans if plan.precision not in REDUCED} - {1}
    if not cut or not task.roles.is_exact:
        return [(None, list(programs))]
    baseline = lower(task, Plan(device=plans[0].device, workers=0))
    try:
        seen = find_random_ops(baseline)
    finally:
        baseline.close()
    if not seen.places and not seen.irregular:
        return [(None, list(programs))]
    device = baseline.device
    groups: list[tuple[SharedDraws, list[Program]]] = []
    for count in sorted({plan.accumulation for plan in plans}):
        pieces = PieceDraws(device, count, seen.places, seen.irregular) if count in cut else None
        alike = [program for program in programs if program.parts.plan.accumulation == count]
        groups.append((pieces, alike))
    return groups


def _prove_group(
    task: Task, programs: Sequence[Program], draws: SharedDraws, progress: ProofProgress, later: State | None
) -> list[Parity]:
    compare = partial(_compare_programs, task, draws=draws, progress=progress, later=later)
    parities = compare(programs, brief=True)
    # More baselines can only allow larger errors, so a plan that passes with few baselines passes with all.
    broken = [number for number, parity in enumerate(parities) if parity.parity == "broken"]
    unrequested = [
        number
        for number in broken
        if parities[number].reductions and programs[number].parts.plan.precision not in REDUCED
    ]
    others = [number for number in broken if number not in unrequested]
    again: dict[int, Parity] = {}
    if others:
        compared = compare([programs[number] for number in others], brief=False)
        again |= zip(others, compared, strict=True)
    for number in unrequested:
        formats = parities[number].arithmetic
        (again[number],) = compare([programs[number]], brief=False, in_formats=formats)
    for number, parity in again.items():
        seconds = (parities[number].seconds or 0.0) + (parity.seconds or 0.0)
        parities[number] = parity.model_copy(update={"seconds": seconds})
    return parities


def _compare_programs(
    task: Task,
    programs: Sequence[Program],
    *,
    draws: SharedDraws,
    progress: ProofProgress,
    later: State | None,
    brief: bool,
    in_formats: Mapping[str, str] | None = None,
) -> list[Parity]:
    """Compares Programs as `prove_programs` does; `brief` uses few baselines, which allows smaller errors.

    Args:
        in_formats: formats of the only Program's products, where they have fewer bits than the baseline's without
            request: the baseline computes in the same formats.
    """
    began = time.monotonic()
    plans = [program.parts.plan for program in programs]
    before = [program.state() for program in programs]
    device = check_device(plans[0].device)
    common: dict[str, Any] = {"states": 0, "versions": {"torch": torch.__version__}}

    def all_unproven(reason: str) -> list[Parity]:
        return [Parity(plan=plan.brief(), parity="unproven", reason=reason, **common) for plan in plans]

    if not task.roles.is_exact:
        return all_unproven("the data is a stream with an order of its own, so runs can't be compared step by step")
    if draws is not None and draws.irregular:
        return all_unproven(_why_not_in_pieces(draws.irregular))
    with preserve_generators(device, *(other for program in programs for other in program.parts.elsewhere)):
        try:
            truth = Float64Reference(task, device)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return all_unproven(f"the model can't be converted to float64: {describe_error(error)}")
        references = baseline_references(task, plans[0].device, few=brief)
        plain = references[0].program
        reduced = reduced_precision_references(task, plans[0], plain, few=brief)
        asked = bool(reduced)
        if in_formats is not None:
            reduced = references_in_formats(programs[0], plain, lowest_format(in_formats))
        whole = [truth.program, *(reference.program for reference in [*references, *reduced])]
        try:
            with nullcontext() if draws is None else draws.follow(whole):
                evidence, free = _collect_evidence(truth, references, reduced, programs, progress, later, brief)
            if isinstance(draws, WordDraws) and not evidence.unproven:
                able = [record for record in evidence.candidates if record.is_able]
                check_word_draws(evidence.last, references[0].program, able)
            elif truth.watch.draws and not evidence.unproven:
                watched = list(zip(programs, evidence.candidates, strict=True))
                check_own_draws(evidence.last, references[0].program, watched)
        finally:
            for reference in [*references, *reduced]:
                reference.program.close()
            for program, state in zip(programs, before, strict=True):
                program.restore(state)
    evidence.shared_draws, evidence.requested = "" if draws is None else draws.description, asked
    for program, record in zip(programs, evidence.candidates, strict=True):
        if truth.watch.draws and program.parts.elsewhere:
            record.unproven = "it draws random numbers on several devices, and these differ from the baseline's"
        elif truth.watch.draws and program.parts.plan.accumulation > 1 and (draws is None or draws.irregular):
            record.unproven = _why_not_in_pieces("" if draws is None else draws.irregular)
    common |= {"states": len(evidence.steps), "seconds": time.monotonic() - began}
    return [
        Parity(
            plan=record.name,
            free_steps=free[id(program)].steps if id(program) in free else 0,
            **common,
            **classify(record, evidence, free.get(id(program))),
        )
        for program, record in zip(programs, evidence.candidates, strict=True)
    ]


def _why_rarely_compiled(record: StepErrors) -> str:
    """Returns why a compiled plan can't be judged: fewer than about half of the single steps ran compiled; else empty.

    The first step, which makes the optimizer's state, and a smaller last batch of an epoch run eagerly.
    """
    states, own = len(record.errors), len(record.errors) - len(record.eager_states)
    if own and 2 * (own + 1) >= min(states, STATES):
        return ""
    taken = f"{own} of the {states} steps that were compared" if own else "no step that was compared"
    return f"{taken} took its compiled program: such batches run eagerly"


def _why_not_in_pieces(odd: str) -> str:
    reason = "it draws random numbers for each piece of a batch, and these differ from the baseline's"
    return f"{reason}: {odd}" if odd else reason


def _collect_evidence(
    truth: Float64Reference,
    references: Sequence[ReferenceRun],
    reduced: Sequence[ReferenceRun],
    programs: Sequence[Program],
    progress: ProofProgress,
    later: State | None,
    brief: bool,
) -> tuple[Evidence, dict[int, FreeRunResult]]:
    """Returns the evidence of single steps, and the free run of each Program that can take the steps, by its id."""
    nudging = next((one for one in reduced or references if one.unit), None)
    asked, others = ([one for one in every if not (brief and one.unit)] for every in (references, reduced))
    collector = StepCollector(truth, asked, others, programs, free_run_steps(programs), nudging, later)
    evidence = collector.collect(lambda states: progress(states, STATES))
    if evidence.unproven:
        return evidence, {}
    for record in evidence.candidates:
        if record.is_able and (few := _why_rarely_compiled(record)):
            record.unproven = few
    records = zip(programs, evidence.candidates, strict=True)
    able = [program for program, record in records if record.is_able]
    truth.release()
    fp32, other = ([one for one in every if one.is_active] for every in (references, reduced))
    runs = compare_free_runs(evidence.last, fp32, other, able, nudges=1 if brief else NUDGES)
    return evidence, dict(zip(map(id, able), runs, strict=True))
