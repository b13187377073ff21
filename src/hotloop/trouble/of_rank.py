"""What went wrong on one of several ranks, told without asking the others, which may be gone or waiting."""

from __future__ import annotations

from hotloop.errors import (
    HotloopError,
    MemoryExhausted,
    NonFiniteError,
    PartsDifferError,
    RankLostError,
    blame,
    out_of_memory,
)
from hotloop.lowering import Program
from hotloop.parallel.world import is_loss
from hotloop.trouble.explain import explained
from hotloop.trouble.place import step_under_way


def explained_of_rank(error: Exception, program: Program, saved_step: int | None, during: str = "") -> HotloopError:
    """The same as `explained`, which says so where it came of one rank of several."""
    world = program.parts.world
    if world.alone:
        return explained(error, program, saved_step, during)
    if is_loss(error):
        return RankLostError(f"rank {world.rank} lost another rank in {step_under_way(program.position)}")
    if out_of_memory(error):
        place = during or step_under_way(program.position)
        fix = "use a smaller batch_size, or more ranks, each of which computes a smaller part of it"
        return MemoryExhausted(f"rank {world.rank}: {place} ran out of memory: {blame(error)}", fix=fix)
    found = explained(error, program, saved_step, during)
    if isinstance(found, PartsDifferError):  # which all ranks find together
        return found
    place = f"{during} after step {program.position.step}: " if during and during not in found.given else ""
    return type(found)(f"rank {world.rank}: {place}{found.given}", expected=found.expected, fix=found.fix)


def nonfinite_of_ranks(reached: int) -> NonFiniteError:
    """For several ranks: the place can be found by one process alone, which has the whole batch."""
    return NonFiniteError(
        f"by step {reached} the loss or a parameter became NaN or infinite",
        fix="go on with --set parallel=none, which names the step and the module",
    )
