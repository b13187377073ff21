"""bench/README.md lists each command and each shared file of bench."""

from __future__ import annotations

import re
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"


def missing(text: str) -> list[str]:
    """Returns commands and shared files of bench that a text doesn't name."""
    names = [path.stem for path in sorted(BENCH.glob("*.py"))]
    return [name for name in names if f"`{name}.py`" not in text and f"`bench.{name}" not in text]


def test_the_readme_lists_each_command_and_each_shared_file() -> None:
    assert missing((BENCH / "README.md").read_text(encoding="utf-8")) == []


def test_the_readme_lists_commands_that_exist() -> None:
    names = re.findall(r"`bench\.(\w+)", (BENCH / "README.md").read_text(encoding="utf-8"))
    absent = [name for name in names if not (BENCH / f"{name}.py").is_file() and not (BENCH / name).is_dir()]
    assert names and absent == []


def test_a_command_that_is_not_listed_is_found() -> None:
    assert "planted" in missing("")
