"""Steps that two processes take: what the first process had is recorded, and the second process compares its own.

A run writes the sums of its losses after each span. A resumed run takes the same steps again, and so does a rehearsal. If
a sum differs by a bit, the resume isn't exact, whatever the reason: the Task has state that no checkpoint stores.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotloop.core.files.atomic_files import open_regular, read_regular, translate_write_errors
from hotloop.core.state import State, digest_of, tree_leaves
from hotloop.errors import RunError

FILE = "steps.jsonl"

_LEFT_OUT = "/attributes/callbacks/"
"""Values of callbacks: a rehearsal calls none."""


class StepRecord:
    """The file of one folder with a line for each recorded step.

    A line has `step`, `sums` (of the epoch so far, by name), and for some steps `state`: digests of the State by path.

    Args:
        folder: of a run, or of a rehearsal.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._file: io.FileIO | None = None

    def add(self, step: int, sums: Mapping[str, float], state: State | None = None) -> None:
        row: dict[str, Any] = {"step": step, "sums": dict(sums)}
        if state is not None:
            row["state"] = state_digests(state)
        with translate_write_errors(self._path):
            if self._file is None:
                self._file = io.FileIO(open_regular(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a")
            self._file.write((json.dumps(row) + "\n").encode())  # one write: a kill leaves whole lines

    def clear(self) -> None:
        """Removes all lines, such as those before a new checkpoint."""
        with translate_write_errors(self._path):
            if self._file is not None:
                self._file.truncate(0)
            elif self._path.is_file() and not self._path.is_symlink():
                self._path.unlink()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def expected_after(self, step: int) -> ExpectedSteps:
        """Returns the recorded steps after a checkpoint of `step`; damaged lines are left out."""
        rows: dict[int, dict[str, Any]] = {}
        try:
            text = (read_regular(self._path) or b"").decode(errors="replace")
        except RunError:
            text = ""
        for line in text.splitlines():
            try:
                row = json.loads(line)
                if int(row["step"]) > step and isinstance(row["sums"], dict):
                    rows[int(row["step"])] = row
            except (ValueError, TypeError, KeyError, RecursionError):
                continue
        return ExpectedSteps(step, rows)


class ExpectedSteps:
    """What an earlier process had after some steps.

    Attributes:
        equal: number of the last step whose record was equal, from the checkpoint's step on.
    """

    def __init__(self, start: int, rows: Mapping[int, dict[str, Any]]) -> None:
        self.start, self.equal, self._rows = start, start, dict(rows)

    @property
    def last(self) -> int:
        """The last recorded step; the checkpoint's without any."""
        return max(self._rows, default=self.start)

    def steps_left(self, step: int) -> int | None:
        """Returns the steps until the next recorded step; None after the last."""
        following = [one for one in self._rows if one > step]
        return min(following) - step if following else None

    def has_state(self, step: int) -> bool:
        return "state" in self._rows.get(step, {})

    def difference(self, step: int, sums: Mapping[str, float], state: State | None = None) -> str:
        """Returns what first differs from the record of a step; empty if nothing does, or without a record."""
        row = self._rows.get(step)
        if row is None:
            return ""
        between = f"at step {step}" if step == self.equal + 1 else f"between steps {self.equal + 1} and {step}"
        for name in {**row["sums"], **sums}:
            was, found = row["sums"].get(name), sums.get(name)
            if repr(was) != repr(found):
                return f"the sum of {name!r} {between} is {found!r}, and was {was!r}"
        if state is not None and "state" in row:
            now = state_digests(state)
            for path in {**row["state"], **now}:
                if path.startswith(_LEFT_OUT):
                    continue
                if row["state"].get(path) != now.get(path):
                    return f"{path.strip('/').replace('/', ' ', 1)} {between} differs"
        self.equal = step
        return ""


def state_digests(state: State) -> dict[str, str]:
    """Returns a digest of each value of a State by its path, without the position."""
    return {path: digest_of(value).hex()[:16] for path, value in tree_leaves(vars(state) | {"position": ()})}
