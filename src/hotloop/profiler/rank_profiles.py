"""Steps that ranks share: what a rank does for the others is heard, and what each of them saw is put together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from hotloop.core.format import milliseconds
from hotloop.core.patches import Patches
from hotloop.core.records.profile import Profile, RankTime
from hotloop.core.records.profile_terms import Phase
from hotloop.distributed.comm_stats import Spent
from hotloop.distributed.world import World
from hotloop.distributed.wrappers.parameter_host import Towers
from hotloop.lowering.context import Ingredients
from hotloop.lowering.steps.local_sgd import SYNC_EVERY, Average
from hotloop.profiler.base.phases import AMONG_RANKS
from hotloop.profiler.base.schedule import DEFAULT_STEPS
from hotloop.profiler.base.step_facts import Facts
from hotloop.profiler.hooks.torch_hooks import among_ranks
from hotloop.profiler.session.session import Watch
from hotloop.profiler.session.step_sequence import LONGEST_S, SETTLED
from hotloop.profiler.timers.modules import ModuleClock, Owner


class Hearing:
    """Hears a rank's meter: puts what it does for others into the timeline, and takes it from the modules' clock.

    Args:
        watch: over the thread that trains; what other threads do goes on beside it, and is no part of its time.
    """

    def __init__(self, watch: Watch, clock: ModuleClock) -> None:
        self._watch, self._clock = watch, clock
        self._before: list[Owner | None] = []

    def enter(self, phase: Phase) -> None:
        if self._watch.mine():
            current = self._watch.timeline.current
            self._watch.timeline.enter(current if current in AMONG_RANKS else phase)
            self._before.append(self._clock.aside())

    def leave(self) -> None:
        if self._watch.mine():
            self._watch.timeline.leave()
            self._clock.back(self._before.pop())

    def turn(self, phase: Phase) -> None:
        if self._watch.mine():
            self._watch.timeline.turn(phase)
            self._clock.aside()


_SENDING = ((Towers, "collect"), (Towers, "spread"), (Average, "take"))
"""What does nothing but send and receive, with all that makes it ready."""


def tell_of_ranks(watch: Watch, patches: Patches) -> None:
    """Has the timeline hear what else than waiting is for the other ranks alone."""
    told = among_ranks(watch.mine, watch.timeline, "communication")
    for owner, name in _SENDING:
        patches.put(owner, name, told)


def agreed(steps: int | None, step_s: float, world: World) -> int | None:
    """How many steps to measure: of ranks as many as the first has time for, since none can end before the others."""
    if world.alone or steps is not None:
        return steps
    return world.of_first(min(DEFAULT_STEPS, max(SETTLED, int(LONGEST_S / step_s))))


def settled(facts: Facts, spent: Sequence[Spent], *, relayed: bool) -> list[Spent]:
    """Flags the steps in which the ranks sent something, for plans under which they don't in each; says which count.

    Args:
        spent: by this rank in each of the steps.
        relayed: whether ranks pass microbatches along.

    Returns:
        Of the steps that were measured.
    """
    measured = []
    for step in facts.steps if relayed else ():  # between microbatches no loss is computed
        step.phases["python"] = step.phases.get("python", 0.0) + step.phases.pop("loss", 0.0)
    for step, own in zip(facts.steps, spent, strict=True):
        if own.communicated_s:
            step.flags.append("meeting")
        if step.kind in ("clean", "instrumented"):
            measured.append(own)
    return measured


_RANGES = ("DistributedDataParallel.", "FSDP::", "gloo:")
"""How names of what stands around operators, or goes on in other threads, begin."""


def put_together(own: Profile, spent: Sequence[Spent], parts: Ingredients) -> Profile:
    """A rank's profile with what each of the ranks saw; all of them call it.

    Args:
        spent: by this rank in each step measured.
    """
    mine = RankTime(
        step_ms=own.step_ms,
        phases=own.phases,
        waiting_ms=1e3 * fmean(one.waited_s for one in spent),
        communication_ms=1e3 * fmean(one.communicated_s for one in spent),
    )
    ranks = parts.world.gathered(mine)
    for name in ("waiting_ms", "communication_ms"):
        if not any(getattr(one, name) for one in ranks):  # it can't be told from the other
            ranks = [one.model_copy(update={name: None}) for one in ranks]
    operators = [one for one in own.operators if not one.name.startswith(_RANGES)]
    update = {
        "ranks": ranks,
        "slowest": _slowest(ranks),
        "operators": [one.model_copy(update={"module": ""}) for one in operators] if parts.relayed else operators,
        "modules": [] if parts.relayed else own.modules,
        "notes": [*own.notes, *_notes(parts, ranks)],
    }
    return own.model_copy(update=update)


def _notes(parts: Ingredients, ranks: Sequence[RankTime]) -> Iterator[str]:
    """What isn't in phases and modules, and why."""
    if parts.relayed:
        yield "stages run as exported graphs, whose modules aren't told apart; these are the operators of rank 0's"
    every = parts.plan.sync_every or SYNC_EVERY
    if parts.plan.parallel == "local" and every > 1:
        spent = [f"rank {rank} {_ms(one.waiting_ms)} and {_ms(one.communication_ms)}" for rank, one in enumerate(ranks)]
        yield (
            f"the ranks average their weights every {every} steps, and the phases are of a step between; spread over all"
            f" steps, they spend in waiting and communication: {', '.join(spent)}"
        )


def _ms(value: float | None) -> str:
    return milliseconds(value or 0.0)


def _slowest(ranks: Sequence[RankTime]) -> int | None:
    spent = [one.phases.get("waiting", 0.0) + one.phases.get("communication", 0.0) for one in ranks]
    return min(range(len(ranks)), key=spent.__getitem__) if any(spent) else None
