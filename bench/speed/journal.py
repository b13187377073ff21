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
        resume: keep what the file holds; else it has to be empty.
        fresh: forget what it holds.
        setup: what rows have to share to be compared, such as versions; None takes a file as it is.
        measured: the command and its circumstances, for a claim; rows that are added later may have others.

    Attributes:
        rows: those written before too.
        setup, measured: as the file has them.

    Raises:
        HotloopError: the file is no journal; it holds rows and may not; or they were measured with something else, which
            it names.
    """

    def __init__(
        self,
        path: Path,
        *,
        resume: bool,
        fresh: bool = False,
        setup: Mapping[str, Any] | None = None,
        measured: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        given = json.loads(json.dumps({"setup": setup, "measured": measured}))
        lines = path.read_bytes().splitlines(keepends=True) if not fresh and path.exists() else []
        whole = [line for line in lines if line.endswith(b"\n")]  # the last may have been half written
        before, *self.rows = _read(path, whole) or [None]
        if self.rows and not resume:
            raise HotloopError(
                f"{path} holds {len(self.rows)} measurements already",
                expected="a new file",
                fix="name another one with --journal, or forget them with --fresh",
            )
        if before is None or not resume:
            before = given
            path.write_text(json.dumps(given) + "\n", encoding="utf-8")
        else:
            _check(path, before.get("setup") or {}, given["setup"])
            os.truncate(path, sum(map(len, whole)))
        self.setup, self.measured = before.get("setup"), before.get("measured")

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


def _read(path: Path, lines: Sequence[bytes]) -> list[Any]:
    try:
        found = [json.loads(line) for line in lines]
    except ValueError:
        found = [None]
    if not all(isinstance(one, dict) for one in found):
        raise HotloopError(f"{path} isn't a journal", expected="a file that the bench wrote", fix="name another one")
    return found


def _check(path: Path, then: Mapping[str, Any], now: Mapping[str, Any] | None) -> None:
    """That rows of both may stand in one file; `now` is None where nothing is to be added."""
    other = [name for name in {**then, **now} if then.get(name) != now.get(name)] if now is not None else []
    if now is not None and other:
        raise HotloopError(
            f"{path} was measured with " + _named(then, other),
            expected=_named(now, other) + ", as now",
            fix="begin anew with --fresh, or name another file with --journal",
        )


def _named(setup: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(f"{name}={setup.get(name)}" for name in names)
