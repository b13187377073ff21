"""docs/reference/findings.md lists each finding of a profile by words of its message."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "findings.md"
DETECTORS = ROOT / "src" / "hotloop" / "profiler" / "detectors"
REPORTS = tuple(ROOT / "src" / "hotloop" / place for place in ("profiler/profile.py", "report/profile.py"))


def names_of(page: str) -> list[str]:
    """Returns the first cells of the tables' rows that are code."""
    return re.findall(r"^\| `([^|]+)` \|", page, re.MULTILINE)


def text_of(node: ast.AST) -> str:
    """Returns all literal text of an expression; figures become a space."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return " "
    return "\n".join(map(text_of, ast.iter_child_nodes(node)))


def causes_of(source: str) -> Iterator[str]:
    """Yields the literal text of each `cause=` in a source, and of each table of texts."""
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.keyword)
            and node.arg == "cause"
            and any(map(str.isalpha, text := text_of(node.value).strip()))
        ):
            yield text
        elif isinstance(node, ast.Dict):
            for pair in node.values:
                if isinstance(pair, ast.Tuple) and (text := text_of(pair.elts[0]).strip()):
                    yield text


def unlisted(page: str, sources: list[str]) -> list[str]:
    names = names_of(page)
    return [cause for source in sources for cause in causes_of(source) if not any(name in cause for name in names)]


def unknown(page: str, sources: list[str]) -> list[str]:
    messages = "\n".join(text_of(ast.parse(source)) for source in [*sources, *(path.read_text() for path in REPORTS)])
    return [name for name in names_of(page) if name not in messages]


def sources() -> list[str]:
    return [path.read_text() for path in sorted(DETECTORS.glob("*.py"))]


def test_the_page_lists_each_finding() -> None:
    assert unlisted(PAGE.read_text(), sources()) == []


def test_each_name_on_the_page_is_of_a_finding() -> None:
    assert unknown(PAGE.read_text(), sources()) == []


def test_a_finding_that_is_missing_is_named() -> None:
    page = PAGE.read_text().replace("| `too small a batch` |", "| `a small batch` |")
    assert unlisted(page, sources()) == ["too small a batch:   samples in a step"]
    assert unknown(page.replace("| `idle cores` |", "| `cores without work` |"), sources()) == [
        "a small batch",
        "cores without work",
    ]
