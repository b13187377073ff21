"""Writes docs/reference/command-line.md from the help of each command.

python -m docs.generators.command_line
"""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from hotloop.cli import COMMANDS, build

PAGE = Path(__file__).parents[1] / "reference" / "command-line.md"

BEGIN = """\
# The command line

`python -m docs.generators.command_line` writes this page from `hotloop COMMAND --help`.

Text for people goes to stderr. With `--json` a command prints one JSON document on stdout ([its fields](json.md)).

| exit code | meaning |
| --- | --- |
| 0 | finished, or stopped by `--stop-after` |
| 1 | an error that you can fix, in one line |
| 2 | a wrong call, in one line |
| 129, 130, 143 | stopped by SIGHUP, Ctrl-C, SIGTERM; training saved its State |
"""


def help_of(*command: str) -> str:
    """Returns the help of a command, 80 columns wide."""
    done = CliRunner().invoke(build(), [*command, "--help"], prog_name="hotloop", env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    return "\n".join(line.rstrip() for line in done.output.strip().splitlines())


def page() -> str:
    """Returns the page as Markdown."""
    parts = [f"## hotloop {name}\n\n```text\n{help_of(name)}\n```\n" for name in COMMANDS]
    return "\n".join([BEGIN, *parts])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
