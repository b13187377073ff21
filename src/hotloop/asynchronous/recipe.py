"""How a process that shares a training comes to the Task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cloudpickle

from hotloop.arithmetic import Switches
from hotloop.errors import TaskError, blame
from hotloop.records import SourceRecord
from hotloop.switches import read
from hotloop.task import Task, overridden
from hotloop.taskfile import load_from_run


@dataclass(frozen=True)
class Recipe:
    """What crosses over to another process of this machine.

    Attributes:
        source, record: the copy of the Task's source in a run's folder, and what to load of it; or
        pickled: a Task made in Python, functions and classes of `__main__` and of notebooks by value.
        overrides: fields of the Task set by the command.
        switches: torch's, of the format in which products are computed, as the process has them that makes the recipe.
    """

    source: Path | None = None
    record: SourceRecord | None = None
    pickled: bytes = b""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    switches: Switches = field(default_factory=read)

    @classmethod
    def of(cls, task: Task, source: Path, record: SourceRecord | None, overrides: Mapping[str, Any]) -> Recipe:
        """That of a run's Task.

        Raises:
            TaskError: it was made in Python, of parts that can't be sent.
        """
        if record is not None:
            return cls(source.resolve(), record, overrides=dict(overrides))
        try:
            return cls(pickled=cloudpickle.dumps(replace(task, callbacks=())))
        except Exception as error:
            raise TaskError(
                f"the Task can't be sent to other processes: {blame(error)}",
                expected="functions, data sets and arrays that can be pickled",
                fix="put the Task into a file, and run: hotloop train file.py",
            ) from error

    def task(self) -> Task:
        """The Task, in the process that it was sent to."""
        if self.record is None or self.source is None:
            loaded: Task = cloudpickle.loads(self.pickled)
            return loaded
        return overridden(load_from_run(self.source, self.record), self.overrides)
