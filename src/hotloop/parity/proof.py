"""Is this plan's result as true as the baseline's? Single steps against float64, then a free run."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from hotloop.core.hardware.devices import check_device
from hotloop.core.hardware.limits import format_binary_bytes, free_memory_bytes
from hotloop.core.number_formats import REDUCED, lowest_format
from hotloop.core.random.rng import preserve_generators
from hotloop.core.records.race import STATES, Parity
from hotloop.core.task_parts.named_optimizers import NamedOptimizers
from hotloop.data.batch_tree import tree_tensors
from hotloop.errors import HotloopError, MemoryExhausted, describe_error, error_summary, is_out_of_memory
from hotloop.lowering.build import lower
from hotloop.lowering.program import Program
from hotloop.parity.evidence import Evidence, StepErrors
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

_WEIGHTS, _STATE = 14, 6
"""Times the bytes of the weights and of the optimizer's state that a proof takes of the host's memory, as measured on the CPU:
the truth and its step are in float64, which takes twice what fp32 does, those of the baseline and the plan are as they are.
The host of an accelerator, to which each step is copied, is taken to need as much; nobody has measured it there."""

_PROGRAM_COUNT = 3
"""Times what a Program holds, on an accelerator: the baseline, and the truth in float64."""

_SAFE_SHARE = 0.75
"""Of what is free: allocators give back what is freed only in part, and activations come on top."""


def missing_memory(programs: Sequence[Program]) -> str:
    """What a proof of these Programs needs and what there is; empty where it is enough."""
    for device, need in needed_bytes(programs).items():
        room = free_memory_bytes(device)
        if need > _SAFE_SHARE * room:
            where = "" if device.type == "cpu" else f" on {device}"
            return f"a proof takes about {format_binary_bytes(need)} of memory{where}, of which {format_binary_bytes(room)} are free"
    return ""


def needed_bytes(programs: Sequence[Program]) -> dict[torch.device, int]:
    """Of the host and of where they compute, beside what they hold themselves; what activations take isn't counted."""
    weights, state = _held_bytes(programs[0])
    device, host = programs[0].device, torch.device("cpu")
    others, whole = (len(programs) - 1) * (weights + state), 2 * weights + state  # with its gradients
    needed = {host: _WEIGHTS * weights + _STATE * state + others}
    if device != host:
        needed[device] = _PROGRAM_COUNT * whole
    if has_image_normalization(programs[0]):  # by another Program, from the beginning
        needed[device] += whole
    return needed


def _held_bytes(program: Program) -> tuple[int, int]:
    """Bytes of parameters and buffers, and of the optimizer's state; before that is made, as many as it will have."""
    weights = sum(value.nbytes for value in (*program.model.parameters(), *program.model.buffers()))
    if not program.optimizer.state:
        return weights, int(weights * _state_per_weight(program.optimizer))
    return weights, _bytes_of_state(program.optimizer)


def _bytes_of_state(optimizer: torch.optim.Optimizer) -> int:
    # counts are nothing
    return sum(value.nbytes for value in tree_tensors(list(optimizer.state.values())) if value.ndim)


def _state_per_weight(optimizer: torch.optim.Optimizer) -> float:
    """Bytes of state for each byte of weights, by a step of another of its kind; 2, as Adam's, where there can't be one."""
    weight = torch.nn.Parameter(torch.zeros(8, 8))
    weight.grad = torch.ones_like(weight)
    known = inspect.signature(type(optimizer)).parameters
    try:
        with preserve_generators():
            twin = type(optimizer)(
                [weight], **{name: value for name, value in optimizer.defaults.items() if name in known}
            )
            twin.step()
    except Exception:  # an optimizer of the user's may ask for anything: this is an estimate, and that of most
        return 2.0
    return _bytes_of_state(twin) / weight.nbytes


ProofProgress = Callable[[int, int], None]
"""Told of states done, and how many there are."""

SharedDraws = PieceDraws | WordDraws | None
"""What candidates draw otherwise than the baseline, if they do."""


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

    One that can't be run, or for which there is no memory, is unproven.
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
    task: Task, programs: Sequence[Program], *, progress: ProofProgress = lambda done, total: None
) -> list[Parity]:
    """Compares Programs of one Task, on one device and in one reduced precision or none, with the baseline there.

    From States along the baseline's path each takes one step, with the same batch and the same draws, and so does the
    baseline in float64. Losses, gradients, updates, the optimizer's state and buffers may be off from the truth by a
    small multiple of what several baselines are that differ harmlessly. A free run across the end of an epoch follows.
    What computes products in fewer bits than the baseline is no better than `reduced-precision`, however small its errors.
    Their States are put back afterwards. Where there is no memory for all of that, they are unproven.

    Raises:
        HotloopError: a step of the baseline itself can't be run, and so the training can't.
    """
    if any(isinstance(program.optimizer, NamedOptimizers) for program in programs):
        why = "the step updates several optimizers in turn, and the proof follows one update in a step"
        return [_unproven_parity(program.parts.plan, why, False) for program in programs]
    if why := missing_memory(programs):
        return [_unproven_parity(program.parts.plan, why, True) for program in programs]
    found: dict[int, Parity] = {}
    try:
        for draws, together in _group_by_draws(task, programs):
            found |= zip(map(id, together), _prove_group(task, together, draws, progress), strict=True)
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
    """Programs that draw the same random numbers, and what these are where they aren't the baseline's."""
    by_words = [program for program in programs if program._step.draws_by_words]
    others = [program for program in programs if not program._step.draws_by_words]
    return [*([(WordDraws(), by_words)] if by_words else []), *(_group_by_pieces(task, others) if others else [])]


def _group_by_pieces(task: Task, programs: Sequence[Program]) -> list[tuple[SharedDraws, list[Program]]]:
    """Programs that cut batches into as many pieces, and what these draw."""
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


def _prove_group(task: Task, programs: Sequence[Program], draws: SharedDraws, progress: ProofProgress) -> list[Parity]:
    found = _compare_programs(task, programs, draws, progress, brief=True)
    # More baselines can only allow more, so what passes beside one passes beside all of them.
    left = [number for number, parity in enumerate(found) if parity.parity == "broken"]
    plain = [number for number in left if not _has_unrequested_reduction(programs[number], found[number])]
    again: dict[int, Parity] = {}
    if plain:
        parities = _compare_programs(task, [programs[number] for number in plain], draws, progress, brief=False)
        again |= zip(plain, parities, strict=True)
    for number in [number for number in left if number not in plain]:
        again[number] = _compare_programs(
            task, [programs[number]], draws, progress, brief=False, in_formats=found[number].arithmetic
        )[0]
    for number, parity in again.items():
        seconds = (found[number].seconds or 0.0) + (parity.seconds or 0.0)
        found[number] = parity.model_copy(update={"seconds": seconds})
    return found


def _has_unrequested_reduction(program: Program, found: Parity) -> bool:
    """Whether a plan computes in fewer bits than the baseline, though it doesn't say so."""
    return bool(found.reductions) and program.parts.plan.precision not in REDUCED


def _compare_programs(
    task: Task,
    programs: Sequence[Program],
    draws: SharedDraws,
    progress: ProofProgress,
    *,
    brief: bool,
    in_formats: Mapping[str, str] | None = None,
) -> list[Parity]:
    """As `prove_programs` does; `brief` beside few baselines, which allows less.

    Args:
        in_formats: those of the only Program's products, where they have fewer bits than the baseline's without being asked
            for: it is held against the baseline in the same ones.
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
            return all_unproven(f"the model can't be turned into float64: {describe_error(error)}")
        witnesses = baseline_references(task, plans[0].device, few=brief)
        plain = witnesses[0].program
        reduced = reduced_precision_references(task, plans[0], plain, few=brief)
        asked = bool(reduced)
        if in_formats is not None:
            reduced = references_in_formats(programs[0], plain, lowest_format(in_formats))
        whole = [truth.program, *(witness.program for witness in [*witnesses, *reduced])]
        try:
            with nullcontext() if draws is None else draws.follow(whole):
                evidence, free = _collect_evidence(truth, witnesses, reduced, programs, progress, brief)
            if isinstance(draws, WordDraws) and not evidence.unproven:
                able = [account for account in evidence.candidates if account.is_able]
                check_word_draws(evidence.last, witnesses[0].program, able)
            elif truth.watch.draws and not evidence.unproven:
                watched = list(zip(programs, evidence.candidates, strict=True))
                check_own_draws(evidence.last, witnesses[0].program, watched)
        finally:
            for witness in [*witnesses, *reduced]:
                witness.program.close()
            for program, state in zip(programs, before, strict=True):
                program.restore(state)
    evidence.shared_draws, evidence.requested = "" if draws is None else draws.description, asked
    for program, account in zip(programs, evidence.candidates, strict=True):
        if truth.watch.draws and program.parts.elsewhere:
            account.unproven = "it draws random numbers on several devices, so they are other ones than the baseline's"
        elif truth.watch.draws and program.parts.plan.accumulation > 1 and (draws is None or draws.irregular):
            account.unproven = _why_not_in_pieces("" if draws is None else draws.irregular)
    common |= {"states": len(evidence.steps), "seconds": time.monotonic() - began}
    return [
        Parity(
            plan=account.name,
            free_steps=free[id(program)].steps if id(program) in free else 0,
            **common,
            **classify(account, evidence, free.get(id(program))),
        )
        for program, account in zip(programs, evidence.candidates, strict=True)
    ]


def _why_rarely_compiled(account: StepErrors) -> str:
    """Why a compiled plan can't be judged: about half of the single steps are the least; empty where there are as many.

    The very first makes the optimizer's state, and is eager, as the epoch's last batch is where it is smaller.
    """
    states, own = len(account.errors), len(account.errors) - len(account.is_eager)
    if own and 2 * (own + 1) >= min(states, STATES):
        return ""
    taken = f"{own} of the {states} steps that were compared" if own else "no step that was compared"
    return f"{taken} took its compiled program: such batches run eagerly"


def _why_not_in_pieces(odd: str) -> str:
    """Why pieces can't be compared."""
    reason = "it draws random numbers for each piece of a batch, so they are other ones than the baseline's"
    return f"{reason}, and {odd}" if odd else reason


def _collect_evidence(
    truth: Float64Reference,
    witnesses: Sequence[ReferenceRun],
    reduced: Sequence[ReferenceRun],
    programs: Sequence[Program],
    progress: ProofProgress,
    brief: bool,
) -> tuple[Evidence, dict[int, FreeRunResult]]:
    """Of single steps, and of the free run of each Program that could take them, by its id."""
    nudging = next((one for one in reduced or witnesses if one.unit), None)
    asked, others = ([one for one in every if not (brief and one.unit)] for every in (witnesses, reduced))
    collector = StepCollector(truth, asked, others, programs, free_run_steps(programs), nudging)
    evidence = collector.collect(lambda states: progress(states, STATES))
    if evidence.unproven:
        return evidence, {}
    for account in evidence.candidates:
        if account.is_able and (few := _why_rarely_compiled(account)):
            account.unproven = few
    accounts = zip(programs, evidence.candidates, strict=True)
    able = [program for program, account in accounts if account.is_able]
    truth.release()
    fp32, other = ([one for one in every if one.is_active] for every in (witnesses, reduced))
    runs = compare_free_runs(evidence.last, fp32, other, able, nudges=1 if brief else NUDGES)
    return evidence, dict(zip(map(id, able), runs, strict=True))
