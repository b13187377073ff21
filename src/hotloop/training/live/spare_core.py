"""A core for the child in a training that uses all cores: while the child runs, steps use one thread fewer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hotloop.plan import Plan
from hotloop.tuning.live.window_race import WindowRace

BUSY_CORES = 0.5
"""Idle cores below which a child would take its time from the training's threads."""


def with_fewer_threads(plan: Plan) -> Plan | None:
    """Returns a plan for the CPU with one thread fewer; None with one thread, or where the user has set their number.

    The number of threads changes the order of sums alone, so the plan needs no proof.
    """
    threads = torch.get_num_threads() - 1
    return plan.with_axes(threads=threads) if plan.device == "cpu" and plan.threads is None and threads else None


@dataclass(frozen=True)
class SpareCore:
    """A plan, and the same plan with one thread fewer.

    Attributes:
        plan, beside: while no child runs, and while one does.
        loss: share of the speed that `beside` loses; at least 0.
    """

    plan: Plan
    beside: Plan
    loss: float

    @classmethod
    def from_race(cls, race: WindowRace) -> SpareCore:
        return cls(race.plan, race.rival, max(0.0, 1 - race.step_s(race.plan) / race.step_s(race.rival)))
