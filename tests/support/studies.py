"""What two studies that must be equal store, and workers that stand in for trial processes."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hotloop.core.records.study import StudyRecord, TrialProgress
from hotloop.hyperparameters.study_folder import StudyFolder

_ROWS = """
select 'trial', number, state, '', '' from trials
union all select 'value', number, objective, value, value_type from trial_values join trials using (trial_id)
union all select 'param', number, param_name, param_value, distribution_json from trial_params join trials using (trial_id)
union all select 'epoch', number, step, intermediate_value, intermediate_value_type
    from trial_intermediate_values join trials using (trial_id)
union all select 'user', number, key, value_json, '' from trial_user_attributes join trials using (trial_id)
union all select 'system', number, key, value_json, '' from trial_system_attributes join trials using (trial_id)
union all select 'study', 0, key, value_json, '' from study_user_attributes
"""


def stored_rows(folder: Path) -> list[tuple[Any, ...]]:
    """Returns all rows of Optuna's storage but the times, sorted."""
    connection = sqlite3.connect(folder / "study.db")
    try:
        return sorted(connection.execute(_ROWS), key=repr)
    finally:
        connection.close()


class SimulatedTrial:
    """A trial that has ended: its curve follows from its parameters; each eighth trial fails in its last epoch."""

    def __init__(self, study: StudyRecord, number: int, repeat: int, params: dict[str, Any], pause: int | None) -> None:
        self.number = number
        fails = number % 8 == 1
        epochs = study.epochs - 1 if fails else study.epochs
        base = 0.05 if fails else params["lr"] * params["width"] + 0.01 * number + 0.001 * repeat
        values = [base + 1 / epoch for epoch in range(1, epochs + 1)][:pause]
        is_over = pause is None or pause > epochs
        error = "loss is nan" if fails and is_over else ""
        self._progress = TrialProgress(
            number=number, repeat=repeat, epochs=len(values), values=values, is_finished=is_over, error=error
        )

    def result(self) -> TrialProgress:
        return self._progress


class SimulatedWorkers:
    """Ends trials at once, in the order that a generator of random numbers gives."""

    def __init__(self, order: int) -> None:
        self._draws = random.Random(order)
        self.trained: list[int] = []

    def start(self, work: str, log: str, **job: Any) -> SimulatedTrial:
        self.trained.append(job["number"])
        return SimulatedTrial(job["study"], job["number"], job["repeat"], job["params"], job["pause_after"])

    def next_finished(self, jobs: Iterable[SimulatedTrial]) -> list[SimulatedTrial]:
        waiting = list(jobs)
        return self._draws.sample(waiting, self._draws.randint(1, len(waiting)))

    def stop(self, jobs: Iterable[SimulatedTrial]) -> None:
        pass


def new_folder(path: Path, record: StudyRecord) -> StudyFolder:
    return StudyFolder.create(path, record, {})
