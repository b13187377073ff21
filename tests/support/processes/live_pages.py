"""`hotloop watch` and `hotloop train --watch` as real processes, and what their pages answer."""

from __future__ import annotations

import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

ADDRESS = re.compile(r"http://\S+/\?token=\S+")

DEADLINE_S = 120.0


@dataclass
class Served:
    """A page by its address."""

    address: str

    @property
    def port(self) -> int:
        return int(self.address.split(":")[2].split("/")[0])

    @property
    def token(self) -> str:
        return self.address.split("token=")[1]

    def get(self, path: str, *, host: str | None = None, token: str | None = None) -> tuple[int, str]:
        """Returns status and text; `path` has no token."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        mark = "&" if "?" in path else "?"
        given = quote(self.token if token is None else token)
        connection.request("GET", f"{path}{mark}token={given}", headers={"Host": host or f"127.0.0.1:{self.port}"})
        answer = connection.getresponse()
        found = answer.status, answer.read().decode()
        connection.close()
        return found

    def runs(self) -> list[dict[str, Any]]:
        """Returns the runs of the first event."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", f"/events?token={quote(self.token)}")
        answer = connection.getresponse()
        while not (line := answer.readline()).startswith(b"data: "):
            assert line, "the stream ended"
        answer.close()
        connection.close()
        return json.loads(line[6:])["runs"]

    def is_there(self) -> bool:
        try:
            return self.get("/")[0] == 200
        except OSError:
            return False


@dataclass
class Watch(Served):
    """A running `hotloop watch`."""

    process: subprocess.Popen[str]

    def end(self, number: int) -> tuple[int, str]:
        """Sends a signal; returns the exit code and what was printed since the address."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        said = self.process.communicate(timeout=DEADLINE_S)[1]
        return self.process.returncode, said


@contextmanager
def watching(folder: Path, *arguments: str | Path, idle: str = "60s") -> Iterator[Watch]:
    """Starts `hotloop watch ARGUMENTS` in a folder, and ends it with the context."""
    command = [sys.executable, "-m", "hotloop", "watch", *map(str, arguments)]
    environment = {**os.environ, "HOTLOOP_WATCH_IDLE": idle}
    process = subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = ADDRESS.search(line)
        assert found is not None, line + process.stderr.read()
        yield Watch(found[0], process)
    finally:
        process.kill()
        process.communicate()


def address_in(file: Path) -> str:
    """Returns the address that a training printed into a file, once it is there."""
    until(lambda: ADDRESS.search(file.read_text()), f"no address in {file}")
    found = ADDRESS.search(file.read_text())
    assert found is not None
    return found[0]


def until(condition: Callable[[], Any], problem: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, problem
        time.sleep(0.1)
