"""Lists the texts that a user reads, with their place. `python tests/support/user_texts.py` prints the strings of src.

A string of the code counts as such a text if it has at least two words; docstrings and comments are listed apart. An f-string is one
text, with `{}` for each value. Documents are split at paragraphs and items of lists, without code blocks and inline code.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_NO_PROSE = {"compile", "fullmatch", "search", "sub", "match", "exec", "eval", "findall", "split"}
"""Functions whose string is a pattern or code."""

_TWO_WORDS = re.compile(r"[A-Za-z]{2,}[,:;]? [(`'\"]?[A-Za-z{]")


@dataclass(frozen=True)
class Text:
    """A text with its file, relative to the repository, and line; `kind` is string, docstring, comment or document."""

    file: str
    line: int
    kind: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


def strings(path: Path) -> Iterator[Text]:
    """Yields the strings of a source file that have at least two words, without docstrings and patterns."""
    tree = ast.parse(path.read_text())
    left_out = {id(node) for node in _docstring_nodes(tree)} | {id(node) for node in _patterns(tree)}
    file = str(path.relative_to(ROOT))
    for node, line in _whole_strings(tree, left_out):
        text = _written(node)
        if _TWO_WORDS.search(text):
            yield Text(file, line, "string", text)


def docstrings(path: Path) -> Iterator[Text]:
    """Yields the docstrings of a source file, also those below constants and fields."""
    file = str(path.relative_to(ROOT))
    for node in _docstring_nodes(ast.parse(path.read_text())):
        yield Text(file, node.lineno, "docstring", str(node.value))


def comments(path: Path) -> Iterator[Text]:
    """Yields the comments of a source file; comments on consecutive lines are one text."""
    file = str(path.relative_to(ROOT))
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        words = token.string.lstrip("#! ")
        if words.startswith(("type:", "noqa", "fmt:")):
            continue
        if block and line == last + 1:
            block.append(words)
        else:
            if block:
                yield Text(file, first, "comment", " ".join(block))
            block, first = [words], line
        last = line
    if block:
        yield Text(file, first, "comment", " ".join(block))


def paragraphs(path: Path) -> Iterator[Text]:
    """Yields the paragraphs, headings, items and rows of a Markdown file, without code and addresses."""
    file = str(path.relative_to(ROOT))
    block: list[str] = []
    first, fence = 1, ""

    def ended() -> Iterator[Text]:
        if block:
            yield Text(file, first, "document", _without_markup(" ".join(block)))
            block.clear()

    for number, line in enumerate(path.read_text().splitlines(), 1):
        bare = line.strip()
        if fence:
            fence = "" if bare.startswith(fence) else fence
            continue
        if bare.startswith(("```", "~~~")):
            fence = bare[:3]
            yield from ended()
            continue
        if not bare or re.match(r"([-*+] |\d+\. |#|\||<!--|>)", bare):
            yield from ended()
        if not bare:
            continue
        if not block:
            first = number
        block.append(re.sub(r"^([-*+] |\d+\. |#+ |> ?)", "", bare))
    yield from ended()


def sentences(text: str) -> list[str]:
    """Splits a text at full stops, question marks, empty and indented lines, and columns."""
    return [
        part.strip()
        for part in re.split(r"(?<=[.!?])\s+(?=[A-Z`(\"'*]|hotloop)|\n\s*\n|\n {2,}|\n\s*(?=[-*] )|\|", text)
        if part.strip()
    ]


def _without_markup(text: str) -> str:
    text = re.sub(r"<!--.*?-->", "", text)
    text = re.sub(r"`[^`]*`", "`code`", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"https?://\S+", "", text)


def _docstring_nodes(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yields each string that is a statement of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def _patterns(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            owner = function.value if isinstance(function, ast.Attribute) else None
            if name in _NO_PROSE and (name in ("exec", "eval") or (isinstance(owner, ast.Name) and owner.id == "re")):
                for argument in node.args:
                    yield from (part for part in ast.walk(argument) if isinstance(part, ast.expr))


def _whole_strings(tree: ast.Module, left_out: set[int]) -> Iterator[tuple[ast.expr, int]]:
    """Yields string constants and f-strings; the pieces of an f-string are no strings of their own, those in its values are."""
    pieces: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            pieces.update(id(part) for part in node.values)
    for node in ast.walk(tree):
        if id(node) in left_out or id(node) in pieces:
            continue
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            yield node, node.lineno


def _written(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    assert isinstance(node, ast.Constant)
    return str(node.value)


def source_files() -> list[Path]:
    """Returns the Python files of the library."""
    return sorted((ROOT / "src").rglob("*.py"))


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["src"]
    for path in source_files():
        if str(path.relative_to(ROOT)).startswith(tuple(wanted)):
            for text in sorted(strings(path), key=lambda text: text.line):
                print(f"{text.place}: {text.text!r}")
