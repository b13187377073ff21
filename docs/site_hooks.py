"""Adds files of the repository outside docs/ to the site, such as records of claims, and adapts the links to these files."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]

ADDED = (
    "claims/**/*.md",
    "claims/**/*.json",
    "claims/**/*.toml",
    "examples/*.py",
    "bench/README.md",
    "tests/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "LICENSE",
)
"""Files outside docs/ that pages may link to, as globs."""

LINK = re.compile(r"(?P<start>\]\()(?P<path>[^)#\s:]+)(?P<rest>(#[^)\s]*)?\))")
"""A Markdown link to a file, without a scheme."""


def on_files(files: Any, config: Any) -> Any:
    """Adds the files of ADDED under their paths in the repository."""
    for pattern in ADDED:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file():
                files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Points links, which are relative to the file in the repository, to the pages of the site."""
    folder = Path(page.file.abs_src_path).parent
    uris = {Path(file.abs_src_path): file.src_uri for file in files if file.abs_src_path}

    def adapt(link: re.Match[str]) -> str:
        target = (folder / link["path"]).resolve()
        uri = uris.get(target) or uris.get(target / "README.md")
        if uri is None:
            return link[0]
        return link["start"] + posixpath.relpath(uri, posixpath.dirname(page.file.src_uri)) + link["rest"]

    return LINK.sub(adapt, markdown)
