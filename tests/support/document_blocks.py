"""The code blocks of a Markdown page, and how a test runs them.

All blocks of a page share a folder, in order. A block with a title is written as a file of that name; a `python` block
without a title runs as a script; of a `console` block, each line that starts with `$ ` runs in bash. Comments before a block
change this: `<!-- no-run: reason -->`, `<!-- exit: 1 -->` (of the last command), `<!-- more -->` (in `make test-all` alone; in
the first lines of a page, for the whole page) and `<!-- file: other.md -->` (the block needs the files of another page).

The lines behind a command are its output. They may be compared: `[...]` stands for any lines, and times, speeds, dates and paths
differ between runs.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes.forked_server import Server

ROOT = Path(__file__).parents[2]

FENCE = re.compile(r"^(?P<indent>\s*)(?P<fence>`{3,})(?P<language>\w*)(?P<rest>.*)$")
TITLE = re.compile(r'title="([^"]+)"')
COMMENT = re.compile(r"^\s*<!--\s*(?P<name>no-run|exit|more|file)(?::\s*(?P<value>.*?))?\s*-->\s*$")
SHELLS = ("bash", "sh", "shell", "pycon")
"""Languages that would be commands which no test runs."""

TIMEOUT_S = 300

SHIM = """\
#!{python}
import os, signal, socket, sys
if {script} and not sys.argv[1].endswith(".py"):  # -c, -m
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
sys.path.insert(0, {root!r})
from tests.support.processes.forked_server import Server
server = Server(requests=socket.socket(fileno={requests}))
process = server.start(*sys.argv[1:], script={script}, bound=True, stdin=0, stdout=1, stderr=2)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda number, frame: process.send_signal(number))
code = process.wait()
sys.exit(code if code >= 0 else 128 - code)
"""
"""A program that starts a fork of the process which has imported torch; the fork ends with the program."""


class BlockError(AssertionError):
    """A block that doesn't do what the page says, with its place and output."""


@dataclass(frozen=True)
class Block:
    """A code block.

    Attributes:
        line: of its fence in the page, from 1.
        title: name of the file that it is; empty for none.
        reason: why it isn't run; empty if it is.
        exit_code: expected of its last command.
        is_more: only `make test-all` runs it.
        file: page whose files the block needs; empty for none.
    """

    line: int
    language: str
    text: str
    title: str = ""
    reason: str = ""
    exit_code: int = 0
    is_more: bool = False
    file: str = ""

    @property
    def commands(self) -> list[str]:
        """The lines of a console after `$ `; a backslash at the end continues a command in the next line."""
        return [command for command, _ in self.outputs]

    @property
    def outputs(self) -> list[tuple[str, list[str]]]:
        """The commands with the lines of output that follow each."""
        found: list[tuple[str, list[str]]] = []
        continued = False
        for line in self.text.splitlines():
            if continued:
                found[-1] = (found[-1][0] + "\n" + line.removeprefix("> "), [])
            elif line.startswith("$ "):
                found.append((line[2:], []))
            else:
                if found:
                    found[-1][1].append(line)
                continue
            continued = line.endswith("\\")
        return found


def blocks(page: str) -> list[Block]:
    """Returns the code blocks of a page."""
    found: list[Block] = []
    lines = page.splitlines()
    whole_page = any((match := COMMENT.match(line)) and match["name"] == "more" for line in lines[:2])
    comments: dict[str, str] = {}
    number = 0
    while number < len(lines):
        if comment := COMMENT.match(lines[number]):
            comments[comment["name"]] = comment["value"] or ""
        elif fence := FENCE.match(lines[number]):
            start, number = number, number + 1
            while number < len(lines) and lines[number].strip() != fence["fence"]:
                number += 1
            title = TITLE.search(fence["rest"])
            found.append(
                Block(
                    line=start + 1,
                    language=fence["language"],
                    text=textwrap.dedent("\n".join(lines[start + 1 : number])) + "\n",
                    title=title[1] if title else "",
                    reason=comments.get("no-run", "") or ("no reason" if "no-run" in comments else ""),
                    exit_code=int(comments.get("exit", 0)),
                    is_more=whole_page or "more" in comments,
                    file=comments.get("file", ""),
                )
            )
            comments = {}
        elif lines[number].strip():
            comments = {}
        number += 1
    return found


def is_run(block: Block) -> bool:
    return not block.reason and (block.language in ("python", "console") or bool(block.title))


def write_programs(folder: Path, server: Server) -> None:
    """Writes `hotloop` and `python` into a folder for the PATH."""
    folder.mkdir()
    for name, script in (("hotloop", False), ("python", True)):
        if server.forks:
            text = SHIM.format(python=sys.executable, root=str(ROOT), requests=server.requests.fileno(), script=script)
        else:
            text = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {"" if script else "-m hotloop"} "$@"\n'
        program = folder / name
        program.write_text(text)
        program.chmod(0o755)


def run_page(
    page: str, folder: Path, server: Server, env: dict[str, str], *, more: bool, compares: bool = False
) -> int:
    """Runs the blocks of a page in a folder, and returns their number.

    Args:
        compares: whether the output of commands is compared with what the page shows.

    Raises:
        BlockError: a command ended with another exit code than the page states, or with another output.
    """
    programs = folder / ".programs"
    write_programs(programs, server)
    (folder / "examples").symlink_to(ROOT / "examples")
    env = {**env, "PATH": f"{programs}:{env['PATH']}", "XDG_CACHE_HOME": str(folder / ".cache")}
    chosen = [block for block in blocks(page) if is_run(block) and (more or not block.is_more)]
    for block in chosen:
        if block.file:
            for other in blocks((ROOT / block.file).read_text(encoding="utf-8")):
                if other.title:
                    _write_file(other, folder)
        if block.title:
            _write_file(block, folder)
            continue
        shown = dict(block.outputs) if compares else {}
        for command, code in _commands(block, folder):
            output = _run(command, code, block.line, folder, server, env)
            if shown.get(command) and (problem := difference(shown[command], output.splitlines())):
                raise BlockError(f"line {block.line}: {command}\n{problem}\nin this output:\n{output}")
    return len(chosen)


def _write_file(block: Block, folder: Path) -> None:
    path = folder / block.title
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text, encoding="utf-8")


ANY_LINES = "[...]"

_VARYING = re.compile(
    r"""[\d,.]+\ samples/s                             # speeds
    | \d[\d,.]*\ ?(?:ms|us|s|min|h)\b               # times
    | \d\d(?:\d\d)?-\d\d(?:-\d\d)?\ \d\d:\d\d\S*    # dates
    | (?<!\S)/\S+                                   # paths
    """,
    re.VERBOSE,
)
_SPEED = " times as fast"
"""What a line has that depends on the machine as a whole."""

_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
_TOLERANCE = 0.005
"""Relative difference of figures between processors."""


def difference(shown: list[str], found: list[str]) -> str:
    """Returns why an output isn't the one that a page shows; empty if it is."""
    shown, found = ([line for line in lines if _SPEED not in line] for lines in (shown, found))
    at, skips = 0, False
    for line in shown:
        if line.strip() == ANY_LINES:
            skips = True
            continue
        ahead = range(at, len(found)) if skips else range(at, min(at + 1, len(found)))
        place = next((number for number in ahead if _is_same(line, found[number])), None)
        if place is None:
            return f"no line {line!r}" + ("" if skips or at >= len(found) else f", but {found[at]!r}")
        at, skips = place + 1, False
    return "" if skips or at == len(found) else f"more than the page shows: {found[at]!r}"


def _is_same(shown: str, found: str) -> bool:
    one, other = (" ".join(_VARYING.sub("#", line).split()) for line in (shown, found))
    if _NUMBER.sub("0", one) != _NUMBER.sub("0", other):
        return False
    pairs = zip(_NUMBER.findall(one), _NUMBER.findall(other), strict=True)
    values = ([float(text.replace(",", "")) for text in pair] for pair in pairs)
    return all(abs(a - b) <= _TOLERANCE * max(abs(a), abs(b)) for a, b in values)


def _commands(block: Block, folder: Path) -> Iterator[tuple[str, int]]:
    """Yields the commands of a block with their expected exit codes."""
    commands = block.commands
    if block.language == "python":
        script = f"block_{block.line}.py"
        (folder / script).write_text(block.text, encoding="utf-8")
        commands = [f"python {script}"]
    for command in commands:
        yield command, block.exit_code if command is commands[-1] else 0


def _run(command: str, code: int, line: int, folder: Path, server: Server, env: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=TIMEOUT_S,
        pass_fds=[server.requests.fileno()] if server.forks else [],
    )
    if done.returncode != code:
        raise BlockError(f"line {line}: {command}\nended with {done.returncode}, not {code}:\n{done.stdout}")
    return done.stdout
