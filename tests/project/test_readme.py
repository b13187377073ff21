"""tests/README.md names the test that guards each promise of the documents: each named test exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[1]
README = TESTS / "README.md"

NAMED = re.compile(r"`([\w/]+\.py)(?:::(\w+))?`")
"""A file of tests, and a test in it."""

COLUMNS = 3
"""Of a table of promises: the promise, its test, the test with the planted fault."""


@cache
def defined_in(path: Path) -> frozenset[str]:
    """The tests that a file defines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def missing(text: str) -> Iterator[str]:
    """Tests and files that the text names, and that aren't there."""
    for name, test in NAMED.findall(text):
        path = TESTS / name
        if test and not path.is_file():
            yield f"{name} doesn't exist"
        elif test and test not in defined_in(path):
            yield f"{name} has no {test}"


def promises(text: str) -> list[list[str]]:
    """The cells of each line of the tables of promises."""
    part = text.partition("## Promises")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines() if line.startswith("|")]
    return [row for row in rows if row[0] != "promise" and not row[0].startswith("---")]


def test_each_named_test_exists() -> None:
    assert list(missing(README.read_text(encoding="utf-8"))) == []


def test_each_promise_has_a_test() -> None:
    rows = promises(README.read_text(encoding="utf-8"))
    assert len(rows) > 50
    assert [row for row in rows if len(row) != COLUMNS or not NAMED.fullmatch(row[1])] == []


def test_a_name_that_is_gone_is_caught() -> None:
    text = README.read_text(encoding="utf-8")
    _, test = next((name, test) for name, test in NAMED.findall(text) if test)
    assert list(missing(text.replace(f"::{test}`", "::test_gone`")))
    assert list(missing("`data/test_gone.py::test_an_epoch_has_every_sample_once`"))
