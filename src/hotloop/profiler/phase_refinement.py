"""Moves time of the loop's own phases to logging, by line samples."""

from __future__ import annotations

from collections.abc import Sequence

from hotloop.core.records.profile import LineTime
from hotloop.core.records.profile_terms import Phase

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
