"""Spelling of the texts that users read, and subjects of messages: each rule is also shown to find a planted text."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.user_texts import ROOT, Text, comments, docstrings, paragraphs, sentences, source_files, strings

BEGINNINGS = re.compile(
    r"(It|That|What|One|This|These|Those)\b(?! (axis|axes|machine|machine's|file|run|plan|step|command|page|table))"
)
"""How no message begins: the reader doesn't know of what it speaks."""

IGNORED_SPELLINGS = ("nd", "ans", "ot", "fo", "te", "ue", "hist", "mis", "fpr", "bu", "sie")
"""Names of variables and of formats that codespell takes for misspelled words."""


def documents() -> Iterator[Path]:
    """Yields the documents in Markdown that users read."""
    pages = [
        ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "bench/README.md", "tests/README.md")
    ]
    pages += sorted((ROOT / "docs").rglob("*.md"))
    yield from (page for page in pages if page.exists())


@cache
def messages() -> tuple[Text, ...]:
    return tuple(text for path in source_files() for text in strings(path))


@cache
def document_texts() -> tuple[Text, ...]:
    return tuple(text for path in documents() for text in paragraphs(path))


@cache
def source_texts() -> tuple[Text, ...]:
    return tuple(text for path in source_files() for text in (*docstrings(path), *comments(path)))


def unnamed_subjects(texts: Iterable[Text]) -> Iterator[str]:
    """Yields sentences that begin with a pronoun in place of their subject."""
    for text in texts:
        for sentence in sentences(text.text):
            if BEGINNINGS.match(sentence):
                yield f"{text.place}: '{sentence[:60]}' begins without a named subject"


def misspelled(texts: Iterable[Text], folder: Path) -> list[str]:
    """Returns codespell's findings, with the places of the texts."""
    listed = list(texts)
    joined = folder / "texts.txt"
    joined.write_text("".join(" ".join(text.text.split()) + "\n" for text in listed))
    command = [sys.executable, "-m", "codespell_lib", "--ignore-words-list", ",".join(IGNORED_SPELLINGS), str(joined)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 65), done.stderr  # 65: words were found
    lines = (re.match(r".*:(\d+): (.*)", line) for line in done.stdout.splitlines())
    return [f"{listed[int(match[1]) - 1].place}: {match[2]}" for match in lines if match]


def assert_nothing(found: Iterable[str]) -> None:
    lines = list(found)
    assert not lines, "\n".join(lines)


def test_messages_name_their_subjects() -> None:
    assert_nothing(unnamed_subjects(messages()))


def test_no_word_is_misspelled(tmp_path: Path) -> None:
    assert_nothing(misspelled([*messages(), *document_texts(), *source_texts()], tmp_path))


def _planted(text: str) -> list[Text]:
    return [Text("src/hotloop/planted.py", 1, "string", text)]


def test_a_planted_beginning_is_found() -> None:
    assert len(list(unnamed_subjects(_planted("The step is eager. It can't be compiled.")))) == 1


def test_a_planted_misspelling_is_found_with_its_place(tmp_path: Path) -> None:
    texts = [Text("a.md", 3, "document", "A right sentence."), Text("a.md", 9, "document", "The the seperate file.")]
    assert misspelled(texts, tmp_path) == ["a.md:9: seperate ==> separate"]


def test_strings_and_paragraphs_are_found_with_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.user_texts.ROOT", tmp_path)
    source = tmp_path / "a.py"
    source.write_text(
        '"""A module."""\nimport re\nre.compile("two words")\n# a comment\nprint(f"one {1} two", "word")\n'
    )
    assert [(text.line, text.text) for text in strings(source)] == [(5, "one {} two")]
    assert [text.text for text in (*docstrings(source), *comments(source))] == ["A module.", "a comment"]
    page = tmp_path / "a.md"
    page.write_text("# Title\n\nFirst line\nsecond `x = 1` line.\n\n```python\nno text\n```\n- an item\n")
    assert [(text.line, text.text) for text in paragraphs(page)] == [
        (1, "Title"), (3, "First line second `code` line."), (9, "an item"),
    ]  # fmt: skip
