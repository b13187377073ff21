"""Text of the user's can't command the terminal."""

from __future__ import annotations

import io

import pytest
from rich.table import Table
from rich.text import Text

from hotloop.core.terminal import Terminal
from hotloop.errors import RunError, escape_control_characters, shorten

EVIL = "a\x1b]0;title\x07\x1b[2Jb\x9bc\rd\x00\u202ee\x7f"


def printed(value: object, **options: bool) -> str:
    file = io.StringIO()
    Terminal(file=file, width=200, **options).print(value, markup=False, highlight=False, soft_wrap=True)
    return file.getvalue()


@pytest.mark.parametrize("force", [False, True])
def test_control_characters_are_shown_as_escapes(force: bool) -> None:
    table = Table("name")
    table.add_row(Text(EVIL))
    for value in (EVIL, Text(EVIL), table):
        out = printed(value, force_terminal=force, no_color=not force)
        for letter in "\x07\x9b\r\x00\u202e\x7f":
            assert letter not in out
        assert "\x1b]" not in out
        assert "\x1b[2J" not in out
        assert "a\\x1b]0;title" in out


def test_what_is_plain_stays_as_it_is() -> None:
    text = "class 'Übung'\t→ 3 × 4 − 1\nnext line 漢字 🙂"
    assert escape_control_characters(text) == text
    assert printed(text).split() == text.split()
    assert "\x1b[1m" in printed(Text("bold", "bold"), force_terminal=True)  # the console's own commands pass


def test_an_error_is_clean_where_python_prints_it() -> None:
    error = RunError(EVIL, expected=EVIL, fix=EVIL)
    assert "\x1b" not in str(error) + error.given + error.expected + error.fix
    assert escape_control_characters("\udcff") == "\\udcff"


def test_a_long_value_is_cut() -> None:
    assert len(shorten("x" * 10_000)) < 200
