"""A Ray actor that runs a rank's process; imports no torch, since each rank imports its own."""

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
# Loaded before the fork: a fork of a process with threads must not load libraries.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


class RankStatus(NamedTuple):
    """The state of a rank at one poll.

    Attributes:
        out, err: output since the last poll, of a rank that `speaks`.
        exitcode: None while the rank runs; negative after a signal.
        error: recorded error in the format of torch's agent; empty without an error.
        said: the last bytes on stderr of an ended rank that doesn't `speak`.
    """

    out: bytes = b""
    err: bytes = b""
    exitcode: int | None = None
    pid: int = 0
    error: bytes = b""
    said: bytes = b""


class RankActor:
    """A Ray actor that starts a rank as a separate process, so that the rank receives signals; reports its end."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="hotloop-")
        self._process: subprocess.Popen[bytes] | None = None

    def devices(self) -> str:
        """Returns the GPUs that Ray has assigned, as in CUDA_VISIBLE_DEVICES."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def start(self, arguments: Sequence[str], folder: str, environment: Mapping[str, str | None], speaks: bool) -> str:
        """Starts Python with these arguments.

        Args:
            environment: changes to Ray's environment; None removes a variable.
            speaks: whether the output is passed on.

        Returns:
            The reason why the process doesn't start; empty if the process starts.
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
        """Waits 0.1 s for the end."""
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
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def close(self) -> None:
        self.send_signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        self._folder.cleanup()

    def _file(self, name: str) -> Path:
        return Path(self._folder.name) / name


def _reset_signals() -> None:
    """Unblocks Ctrl-C, which Ray's workers block; SIGTERM makes the rank save when its actor ends."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
