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


@cache
def left_out_of(path: Path) -> frozenset[str]:
    """The tests that `make test` leaves out as a whole."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    if "pytestmark = pytest.mark.more" in map(ast.unparse, tree.body):
        return frozenset(test.name for test in tests)
    return frozenset(test.name for test in tests if "pytest.mark.more" in map(ast.unparse, test.decorator_list))


def unguarded(rows: list[list[str]]) -> Iterator[str]:
    """Tests that the tables name as guards, and that `make test` leaves out."""
    for promise, *cells in rows:
        for cell in filter(None, cells):
            named = NAMED.fullmatch(cell)
            if named and named[2] in left_out_of(TESTS / named[1]):
                yield f"{promise}: {named[2]} is marked `more`"


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


def test_make_test_runs_the_guard_of_each_promise() -> None:
    assert list(unguarded(promises(README.read_text(encoding="utf-8")))) == []


def test_a_guard_that_is_left_out_is_caught() -> None:
    assert list(
        unguarded(
            [
                [
                    "faults are found",
                    "`parity/test_planted_faults.py::test_mutants_that_change_a_step_clearly_are_caught`",
                ]
            ]
        )
    )


def test_a_name_that_is_gone_is_caught() -> None:
    text = README.read_text(encoding="utf-8")
    _, test = next((name, test) for name, test in NAMED.findall(text) if test)
    assert list(missing(text.replace(f"::{test}`", "::test_gone`")))
    assert list(missing("`data/test_gone.py::test_an_epoch_has_every_sample_once`"))
