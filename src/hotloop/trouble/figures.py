"""A figure of an epoch that is not a number though training went well."""

from __future__ import annotations

import math
from typing import Any

from hotloop.data.source import Source
from hotloop.errors import NonFiniteError
from hotloop.evaluation import evaluate
from hotloop.lowering import Program
from hotloop.task import Computed
from hotloop.trouble.empty_means import INSTEAD, empty_mean
from hotloop.trouble.place import saved
from hotloop.trouble.samples import bad_rows, parts_of
from hotloop.trouble.watch import Event, Watch

_LOOK = "look for statistics kept for evaluation mode, and for a log, sqrt or division by 0"


def nonfinite_figure(
    program: Program, source: Source | None, figure: str, value: float, saved_step: int | None
) -> NonFiniteError:
    """The error for a monitored figure that is NaN or infinite, while training loss and parameters are finite.

    Args:
        source: the validation data, which one process evaluates once more to find the place; a rank has only its share.
        figure: its name, such as `validation_loss`.
    """
    state = "NaN" if math.isnan(value) else "infinite"
    after = f"after epoch {program.position.epoch + 1} the {figure.replace('_', ' ')} is {state}"
    if figure != "validation_loss" or source is None:
        return NonFiniteError(
            f"{after}, so that epochs can't be compared by it",
            fix=f"correct it in the Task, or monitor another figure; {saved(saved_step)}",
        )
    if not program.parts.world.alone:
        return NonFiniteError(
            after,
            fix="go on with --set parallel=none --set ranks=none, which names the module or the sample;"
            f" {saved(saved_step)}",
        )
    finder = _Finder(program)
    with finder.watch.listening():
        evaluate(program, source, finder)
    sums = program.read_sums()
    advice = INSTEAD if finder.empty else _LOOK
    return NonFiniteError(
        f"{after} though the training loss is {sums['loss'] / (sums['weight'] or 1):.4g}: {finder.found}",
        fix=f"{advice}; {saved(saved_step)}",
    )


class _Finder:
    """Sees each batch of an evaluation, and notes the first whose loss is not finite."""

    def __init__(self, program: Program) -> None:
        self.watch, self._program = Watch(program.model), program
        self.empty = ""
        self.found = "evaluating once more gave finite losses"
        self._done = False
        self._samples = 0

    def __call__(self, batch: Any, samples: int, computed: Computed | None) -> None:
        finite = computed is None or math.isfinite(float(computed.loss))
        if not finite and not self._done:
            self._done = True
            self.watch.note_batch(batch)
            event = self.watch.first(loss_finite=False)
            undefined = computed is not None and math.isnan(float(computed.loss))
            self.empty = empty_mean(self._program, batch) if undefined and not event else ""
            where = f"it has {self.empty}, in a batch" if self.empty else "the loss itself, from finite outputs"
            self.found = self._told(event, batch) if event else where
        elif finite:
            self.watch.settle()
        self.watch.begin()
        self._samples += samples

    def _told(self, event: Event, batch: Any) -> str:
        if event.kind == "output":
            return f"{event.name} became {event.state}"
        rows = bad_rows(dict(parts_of(batch))[event.name])
        return f"sample {self._samples + int(rows[0])} of the validation data has {event.state} in its {event.name}"
