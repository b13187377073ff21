"""Starts the live page of a training as a child process."""

from __future__ import annotations

import os
import subprocess
import sys
import webbrowser
from collections.abc import Callable

from hotloop.core.callback import View
from hotloop.errors import HotloopError
from hotloop.report.live_server import listen, new_token, page_address

_COMMAND = [sys.executable, "-P", "-m", "hotloop", "watch"]
"""-P: files of the present folder, such as a `token.py`, replace no module."""

_INTERRUPTED = 130
"""Exit code after Ctrl-C, which ends training and page."""


class LivePage:
    """A callback that starts `hotloop watch` for the run when training starts, and reports the address.

    The page's process only reads the run's folder, and goes on after the training's end; see `IDLE_S`. A page that can't
    be served never ends the training.
    """

    def __init__(self, say: Callable[[str], None], *, host: str, opens: bool) -> None:
        self._say, self._host, self._opens = say, host, opens
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self, view: View) -> None:
        if view.event == "start":
            self._start(view)
        elif self._process is not None and (code := self._process.poll()) is not None:
            self._process = None
            if code not in (0, _INTERRUPTED):
                self._say(f"the live page ended with exit code {code}; training goes on, and `hotloop watch` shows it")

    def _start(self, view: View) -> None:
        try:
            with listen(self._host) as listener:
                token = new_token()
                address = page_address(listener, token)
                os.set_inheritable(listener.fileno(), True)
                self._process = subprocess.Popen(
                    [*_COMMAND, str(view.run), "--listener", str(listener.fileno())],
                    pass_fds=[listener.fileno()],
                    env={**os.environ, "HOTLOOP_WATCH_TOKEN": token},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
        except (HotloopError, OSError) as error:
            self._say(f"the live page can't be served: {error}")
            return
        self._say(f"live page: {address}")
        if self._opens:
            webbrowser.open(address)
