"""What was measured so far, a line of JSON for each session: a bench that was stopped goes on from there."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hotloop.errors import HotloopError

Row = dict[str, Any]


class Journal:
    """Rows in a file, each written at once and flushed; before them what they were measured with.

    Args:
        resume: keep what the file holds; else it begins anew.
        setup: what rows have to share to be compared, such as versions; None takes a file as it is.

    Attributes:
        rows: those written before too.

    Raises:
        HotloopError: the file's rows were measured with something else; it names what.
    """

    def __init__(self, path: Path, *, resume: bool, setup: Mapping[str, Any] | None = None) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_bytes().splitlines(keepends=True) if resume and path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]  # the last may have been half written
        before, *self.rows = [json.loads(line) for line in whole] or [None]
        given = {"setup": None if setup is None else dict(setup)}
        if before is None:
            path.write_text(json.dumps(given) + "\n", encoding="utf-8")
            return
        if setup is not None and before != json.loads(json.dumps(given)):
            then = before.get("setup") or {}
            other = [name for name in {**then, **setup} if then.get(name) != setup.get(name)]
            raise HotloopError(
                f"{path} was measured with " + _named(then, other),
                expected=_named(setup, other) + ", as now",
                fix="begin anew with --fresh, or name another file with --journal",
            )
        os.truncate(path, sum(map(len, whole)))

    def add(self, key: Mapping[str, Any], **what: Any) -> None:
        row = {**key, **what}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.rows.append(row)

    def has(self, key: Mapping[str, Any]) -> bool:
        """Whether there is a row of that key."""
        return bool(self.of(**key))

    def of(self, **key: Any) -> list[Row]:
        return [row for row in self.rows if all(row.get(name) == value for name, value in key.items())]


def _named(setup: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name}={setup.get(name)}" for name in names)
