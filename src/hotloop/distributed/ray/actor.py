"""Who keeps the process of a rank on a machine of Ray's cluster; imports no torch, since each rank has one."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_POLL_S = 0.1
_TAIL_BYTES = 1 << 14
_PR_SET_PDEATHSIG = 1
# Found here, since a fork of a process with threads had better not look for it.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


class RankStatus(NamedTuple):
    """What a look at a rank has found.

    Attributes:
        out, err: what it has written since the last look, if it is one that speaks.
        exitcode: None while it lives; that of a signal is negative.
        error: the error that it noted, as torch's agent has it; empty without one.
        said: the last that it wrote, if it is none that speaks, and has ended.
    """

    out: bytes = b""
    err: bytes = b""
    exitcode: int | None = None
    pid: int = 0
    error: bytes = b""
    said: bytes = b""


class RankActor:
    """An actor of Ray's that starts a rank as a process, passes signals on to it, and tells how it ends.

    The rank is a process of its own, so that it hears signals, and is killed, as any other.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hotloop-")
        self._process: subprocess.Popen[bytes] | None = None

    def devices(self) -> str:
        """The GPUs that Ray has set aside, as CUDA_VISIBLE_DEVICES names them."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def start(self, arguments: Sequence[str], folder: str, environment: Mapping[str, str | None], speaks: bool) -> str:
        """Starts Python with these arguments.

        Args:
            environment: on top of Ray's own; None takes away.
            speaks: whether what it writes is passed on.

        Returns:
            What keeps it from starting; empty if nothing does.
        """
        merged = {**os.environ, **environment, "TORCHELASTIC_ERROR_FILE": str(self._file("error"))}
        self._speaks = speaks
        try:
            with self._file("out").open("wb") as out, self._file("err").open("wb") as err:
                self._process = subprocess.Popen(
                    [sys.executable, *arguments],
                    cwd=folder,
                    env={name: value for name, value in merged.items() if value is not None},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    start_new_session=True,
                    preexec_fn=_reset_signals,
                )
        except OSError as error:
            return str(error)
        self._read = [self._file(name).open("rb") for name in ("out", "err")]
        return ""

    def poll(self) -> RankStatus:
        """Waits a moment for its end."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_POLL_S)
        code = self._process.poll()
        said = self._file("err").read_bytes()[-_TAIL_BYTES:] if code and not self._speaks else b""
        noted = self._file("error")
        error = noted.read_bytes() if code and noted.is_file() else b""
        out, err = (file.read() if self._speaks else b"" for file in self._read)
        return RankStatus(out, err, code, self._process.pid, error, said)

    def send_signal(self, number: int) -> None:
        """A signal."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def close(self) -> None:
        """Ends it if it still lives."""
        self.send_signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        self._folder.cleanup()

    def _file(self, name: str) -> Path:
        return Path(self._folder.name) / name


def _reset_signals() -> None:
    """Ray's workers block Ctrl-C; and nobody but its keeper would ever end a rank, so it saves when that is gone."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
