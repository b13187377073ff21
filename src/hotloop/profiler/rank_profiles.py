"""Profiles of steps that ranks share: communication phases of each rank, and the combined profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from hotloop.core.format import format_milliseconds
from hotloop.core.patches import Patches
from hotloop.core.records.profile import Profile, RankTime
from hotloop.core.records.profile_terms import Phase
from hotloop.distributed.comm_stats import CommTime
from hotloop.distributed.world import World
from hotloop.distributed.wrappers.ddp import ParameterHost
from hotloop.lowering.context import LoweringContext
from hotloop.lowering.steps.local_sgd import SYNC_EVERY, WeightAverage
from hotloop.profiler.base.phases import RANK_PHASES
from hotloop.profiler.base.schedule import DEFAULT_STEPS
from hotloop.profiler.base.step_facts import ProfileFacts
from hotloop.profiler.hooks.torch_hooks import wrap_rank_call
from hotloop.profiler.session.session import ProfilerSession
from hotloop.profiler.session.step_sequence import ENOUGH_STEPS, LONGEST_S
from hotloop.profiler.timers.modules import ClockOwner, ModuleClock


class RankCommPhases:
    """Listens to a rank's communication meter: sets timeline phases, and pauses the module clock.

    Communication in other threads overlaps with the training thread, and is ignored.
    """

    def __init__(self, session: ProfilerSession, clock: ModuleClock) -> None:
        self._session, self._clock = session, clock
        self._before: list[ClockOwner | None] = []

    def enter(self, phase: Phase) -> None:
        if self._session.is_training_thread():
            current = self._session.timeline.current
            self._session.timeline.enter(current if current in RANK_PHASES else phase)
            self._before.append(self._clock.pause())

    def leave(self) -> None:
        if self._session.is_training_thread():
            self._session.timeline.leave()
            self._clock.resume(self._before.pop())

    def turn(self, phase: Phase) -> None:
        if self._session.is_training_thread():
            self._session.timeline.turn(phase)
            self._clock.pause()


_SENDING_METHODS = ((ParameterHost, "collect"), (ParameterHost, "broadcast"), (WeightAverage, "take"))


def hook_rank_calls(session: ProfilerSession, patches: Patches) -> None:
    """Adds communication phases to the timeline; the meter reports waiting."""
    wrap = wrap_rank_call(session.is_training_thread, session.timeline, "communication")
    for owner, name in _SENDING_METHODS:
        patches.patch(owner, name, wrap)


def agree_on_steps(steps: int | None, step_s: float, world: World) -> int | None:
    """Returns the number of steps to measure; ranks measure as many as rank 0 has time for, since all end together."""
    if world.is_single or steps is not None:
        return steps
    return world.broadcast_int(min(DEFAULT_STEPS, max(ENOUGH_STEPS, int(LONGEST_S / step_s))))


def flag_sync_steps(facts: ProfileFacts, spent: Sequence[CommTime], *, relayed: bool) -> list[CommTime]:
    """Flags the steps in which ranks communicated, for plans that don't communicate in each step.

    Args:
        spent: this rank's communication in each step.
        relayed: whether ranks pass microbatches along.

    Returns:
        The communication in the measured steps.
    """
    measured = []
    for step in facts.steps if relayed else ():  # no loss is computed between microbatches
        step.phases["python"] = step.phases.get("python", 0.0) + step.phases.pop("loss", 0.0)
    for step, own in zip(facts.steps, spent, strict=True):
        if own.communicated_s:
            step.flags.append("meeting")
        if step.kind in ("clean", "instrumented"):
            measured.append(own)
    return measured


_WRAPPER_PREFIXES = ("DistributedDataParallel.", "FSDP::", "gloo:")
"""Prefixes of profiler events that enclose operators, or run in other threads."""


def merge_rank_profiles(own: Profile, spent: Sequence[CommTime], parts: LoweringContext) -> Profile:
    """Returns a rank's profile with the times of all ranks, which all call this; `spent` has the measured steps."""
    mine = RankTime(
        step_ms=own.step_ms,
        phases=own.phases,
        waiting_ms=1e3 * fmean(one.waited_s for one in spent),
        communication_ms=1e3 * fmean(one.communicated_s for one in spent),
    )
    ranks = parts.world.all_gather(mine)
    for name in ("waiting_ms", "communication_ms"):
        if not any(getattr(one, name) for one in ranks):  # waiting and communication can't be separated
            ranks = [one.model_copy(update={name: None}) for one in ranks]
    operators = [one for one in own.operators if not one.name.startswith(_WRAPPER_PREFIXES)]
    update = {
        "ranks": ranks,
        "slowest": _slowest_rank(ranks),
        "operators": [one.model_copy(update={"module": ""}) for one in operators] if parts.is_pipelined else operators,
        "modules": [] if parts.is_pipelined else own.modules,
        "notes": [*own.notes, *_notes(parts, ranks)],
    }
    return own.model_copy(update=update)


def _notes(parts: LoweringContext, ranks: Sequence[RankTime]) -> Iterator[str]:
    if parts.is_pipelined:
        yield "stages run as exported graphs without separate modules; the operators are those of rank 0"
    every = parts.plan.sync_every or SYNC_EVERY
    if parts.plan.parallel == "local" and every > 1:
        spent = (
            f"rank {rank} {_format_ms(one.waiting_ms)} and {_format_ms(one.communication_ms)}"
            for rank, one in enumerate(ranks)
        )
        yield (
            f"the ranks average their weights every {every} steps; the phases are those of a step without averaging."
            f" Waiting and communication per step, averaged over all steps: {', '.join(spent)}"
        )


def _format_ms(value: float | None) -> str:
    return format_milliseconds(value or 0.0)


def _slowest_rank(ranks: Sequence[RankTime]) -> int | None:
    spent = [one.phases.get("waiting", 0.0) + one.phases.get("communication", 0.0) for one in ranks]
    return min(range(len(ranks)), key=spent.__getitem__) if any(spent) else None
