"""Spelling and style of the texts that users read: strings of the source, documents, docstrings and comments.

Spelling is checked by codespell. Style is a list of words and phrases that readers had to read twice, with plain words for each,
and limits on how a message begins and on the length of a sentence. Each rule is also shown to catch a planted sentence.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.user_texts import ROOT, Text, comments, docstrings, paragraphs, sentences, source_files, strings

MOST_WORDS = 40
"""Words of a sentence in a document or a message."""

BANNED = {
    r"mend(s|ed|ing)?": "fix, correct",
    r"in vain": "without benefit, without effect",
    r"left behind": "left out, not removed",
    r"(?<!number of )pass(es|ed|ing)? over(?! (the (data|tensors)|all parameters)\b)": "leaves out, skips",
    r"moods?": "noise, state",
    r"befall(s|en)?|befell": "happens to",
    r"(is|are) told (by|from|that)": "is found from, is compared with",
    r"told apart|tells? \w+ apart|tell apart": "is distinguished, is separated",
    r"nobody can tell|can't be told|couldn't be told": "is unknown, can't be decided",
    r"(hears?|heard|hearing) (of|from)": "receives, is informed of",
    r"looks? at": "reads, checks, computes with",
    r"a (first )?look\b": "a check, a first run",
    r"(lies|lie) (in|on|there|where|so)": "is stored, is",
    r"draw(s|n|ing)? (it|them|everything|others|more) in": "pull in, include",
    r"(no|the|found no|make|is) room (for|to|left)|room for (it|them|a|the|several|memory)": "memory, space",
    r"seats?": "place, slot",
    r"settl(e|es|ed|ing)": "decide, choose",
    r"as often as it likes": "any number of times",
    r"comes? to nothing|comes? out (another|otherwise|differently)": "differs",
    r"nobody here|nobody can": "name the part that can't",
    r"is none of\b": "is not part of",
    r"one to go on from|one of its own|something of its own": "name the thing",
    r"gave up on|given up after": "stopped",
    r"amiss|awry|askew": "wrong, missing",
    r"thrown away|throws away": "discarded, deleted",
    r"put together": "collated, joined, built",
    r"(what|who) (it|they) (says?|said|hears?)": "its message",
    r"comes? back to": "reaches, uses",
    r"goes? by in": "are spent on",
    r"to blame": "the cause",
    r"beside it\b|beside them\b": "at the same time, next to the",
    r"such as it is|as it happens": "leave it out",
    r"nowhere else|by and by|all the same\b": "plain words: only here, later, anyway",
    r"lets? go of": "releases",
    r"puts? out\b": "returns",
    r"the most winning|wins? (the )?most": "the largest gain",
    r"worth while|worthwhile": "pays",
}
"""Patterns of whole words, each with words to use instead."""

ALLOWED = {("src/hotloop/profiler/base/schedule.py", "settling"): "the name of a kind of step, stored in profiles"}
"""Places where a banned word stays: (start of the file's path, the word) -> reason."""

BEGINNINGS = re.compile(
    r"(It|That|What|One|This|These|Those)\b(?! (axis|axes|machine|machine's|file|run|plan|step|command|page|table))"
)
"""How no message begins: the reader doesn't know of what it speaks."""

LISTS = frozenset({"docs/reference/json.md"})
"""Pages that are made from docstrings which list values: their sentences may be long."""

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


def banned_words(texts: Iterable[Text]) -> Iterator[str]:
    any_banned = re.compile(rf"\b(?:{'|'.join(BANNED)})\b")
    for text in texts:
        for pattern, better in BANNED.items() if any_banned.search(text.text.lower()) else ():
            for found in re.finditer(rf"\b(?:{pattern})\b", text.text, re.IGNORECASE):
                if not any(text.file.startswith(file) and word == found[0].lower() for file, word in ALLOWED):
                    yield f"{text.place}: '{found[0]}' in '{_around(text.text, found)}'; write: {better}"


def unnamed_subjects(texts: Iterable[Text]) -> Iterator[str]:
    """Yields sentences that begin with a pronoun in place of their subject."""
    for text in texts:
        for sentence in sentences(text.text):
            if BEGINNINGS.match(sentence):
                yield f"{text.place}: '{sentence[:60]}' begins without a named subject"


def long_sentences(texts: Iterable[Text]) -> Iterator[str]:
    for text in texts:
        if not re.search(r"\b(the|a|of|is|are|to|and)\b", text.text) or re.fullmatch(r"[\w\s]+", text.text):
            continue  # a list of names
        if text.file in LISTS:
            continue
        for sentence in sentences(text.text):
            if (words := len(re.findall(r"[A-Za-z]{2,}", sentence))) > MOST_WORDS:
                yield f"{text.place}: a sentence of {words} words: '{sentence[:60]}...'; at most {MOST_WORDS}"


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


def _around(text: str, found: re.Match[str]) -> str:
    return " ".join(text[max(0, found.start() - 40) : found.end() + 40].split())


def test_no_message_docstring_or_comment_has_a_banned_word() -> None:
    assert_nothing(banned_words([*messages(), *source_texts()]))


def test_no_document_has_a_banned_word() -> None:
    assert_nothing(banned_words(document_texts()))


def test_messages_name_their_subjects() -> None:
    assert_nothing(unnamed_subjects(messages()))


def test_sentences_are_short() -> None:
    assert_nothing(long_sentences([*messages(), *document_texts()]))


def test_no_word_is_misspelled(tmp_path: Path) -> None:
    assert_nothing(misspelled([*messages(), *document_texts(), *source_texts()], tmp_path))


def _planted(text: str) -> list[Text]:
    return [Text("src/hotloop/planted.py", 1, "string", text)]


@pytest.mark.parametrize(
    "sentence", ["the run can't be mended", "auto passes over the plan", "a wait in vain", "There is no room for it."]
)
def test_a_planted_word_is_found(sentence: str) -> None:
    assert len(list(banned_words(_planted(sentence)))) >= 1


def test_a_part_of_a_word_is_no_banned_word() -> None:
    assert list(banned_words(_planted("recommended; the amendments; a bathroom form"))) == []


def test_a_planted_beginning_and_a_planted_length_are_found() -> None:
    assert len(list(unnamed_subjects(_planted("The step is eager. It can't be compiled.")))) == 1
    assert len(list(long_sentences(_planted("the word, " * (MOST_WORDS // 2 + 1))))) == 1
    assert list(long_sentences(_planted("the word, " * (MOST_WORDS // 2)))) == []


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
