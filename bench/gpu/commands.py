"""The `hotloop` command, as a process of its own or within this one."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

from bench.gpu.setting import ROOT, environment


class CommandFailed(Exception):
    """A command ended with another exit code than it should have."""


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document on its stdout.

        Raises:
            CommandFailed: the document is an error.
        """
        found = dict(json.loads(self.out))
        if "error" in found:
            raise CommandFailed(found["error"]["message"])
        return found


def started(*arguments: str, cache: Path, more: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """`hotloop ARGUMENTS` as a process, with its caches in a folder of the caller's."""
    return subprocess.Popen(
        [sys.executable, "-m", "hotloop", *arguments],
        cwd=ROOT,
        env={**environment(cache), **(more or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(process: subprocess.Popen[str], codes: tuple[int, ...] = (0,)) -> Done:
    """Waits for the end of a process; what it printed is printed here, too.

    Raises:
        CommandFailed: its exit code isn't one of `codes`.
    """
    out, err = process.communicate()
    print(err, file=sys.stderr, flush=True)
    return checked(Done(process.returncode, out, err), codes)


def within(*arguments: str, codes: tuple[int, ...] = (0,)) -> Done:
    """`hotloop ARGUMENTS` in this process, where torch is imported already.

    Raises:
        CommandFailed: its exit code isn't one of `codes`.
    """
    from hotloop.cli import main

    out, err, code = io.StringIO(), Both(sys.stderr), 0
    with mock.patch.object(sys, "argv", ["hotloop", *arguments]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return checked(Done(code, out.getvalue(), err.getvalue()), codes)


class Both(io.StringIO):
    """Stores what is written, and hands it on, so that output before a crash isn't lost."""

    def __init__(self, other: TextIO) -> None:
        super().__init__()
        self._other = other

    def write(self, text: str) -> int:
        self._other.write(text)
        self._other.flush()
        return super().write(text)

    def fileno(self) -> int:
        return self._other.fileno()


def checked(done: Done, codes: tuple[int, ...]) -> Done:
    if done.code not in codes:
        print(done.out, flush=True)
        lines = [line for line in (done.err or done.out).splitlines() if line.strip()]
        raise CommandFailed(f"hotloop ended with {done.code}: {lines[-1] if lines else 'no message'}")
    return done
