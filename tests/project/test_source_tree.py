"""Rules for the names and folders of the source tree, so that a stranger opens the right file at the first guess.

The order of packages is in `test_import_order.py`. Each rule is also shown to catch its own breach, planted in a copy.
"""

from __future__ import annotations

import ast
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "hotloop"

PACKAGES = (
    "core",
    "arrays",
    "data",
    "distributed",
    "lowering",
    "parity",
    "explainer",
    "tuning",
    "scripts",
    "profiler",
    "exchanges",
    "advisor",
    "training",
    "inference",
    "hyperparameters",
    "hardware_advice",
    "report",
    "cli",
)
"""All packages at the top of the tree."""

MOST_FILES = 16
"""Files of a folder, `__init__.py` included."""

PLUGINS = ("cli", "arrays", "explainer/layers", "lowering/rewrites", "profiler/detectors", "report")
"""Folders of files that are alike, one for each command, layer, rewrite, detector or page: they may have any number of files."""

PUBLIC_FUNCTIONS = frozenset(
    (
        "advise",
        "check",
        "devices",
        "evaluate",
        "explain",
        "export",
        "plan",
        "predict",
        "profile",
        "race",
        "run",
        "study",
        "summary",
        "train",
        "tune",
    )
)
"""Nouns of commands: the command, the entry of its package, its record and its page share a noun."""

SHARED_STEMS = {
    "advice": "a record and its page",
    "activations": "a family of layers in arrays and in explainer",
    "losses": "a family of layers in arrays and in explainer",
    "recurrent": "a family of layers in arrays and in explainer",
    "explanation": "a record and its page",
    "cpu_rates": "a record and the times that follow from the rates",
    "hardware": "a record and its page",
    "model_summary": "a record, its page and its computation",
}
"""File names that several folders have, each with the reason."""

SUFFIXES = ("ing", "ed", "ened", "wn", "ought")
"""Ends of participles and gerunds."""

_NO_NOUNS = """
about above after again ahead alone among apart around aside at before behind below beneath beside between beyond by during
early for from held hidden in inside into kept known late left made of off on onto out outside over seen seldom sent shown
since spent spread taken then thrown till told tiny to toward under unread unseen until up upon wanted with within without
written
"""
NO_NOUNS = frozenset(_NO_NOUNS.split())
"""Prepositions, adverbs and irregular participles."""

NOUNS = {
    "feed": "no participle",
    "pooling": "the name of a family of layers",
}
"""Nouns that end as participles do, each with the reason."""


def files_of(root: Path) -> list[str]:
    """The files below a folder without `.py`, such as `data/order`."""
    return sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.py"))


def other_packages(root: Path) -> Iterator[str]:
    """Packages that aren't listed, and listed packages that aren't there."""
    found = {path.parent.name for path in root.glob("*/__init__.py")}
    for package in sorted(found ^ set(PACKAGES)):
        yield f"{package}/ is {'not in PACKAGES' if package in found else 'in PACKAGES, and not in the tree'}"


def folders_without_purpose(root: Path) -> Iterator[str]:
    """Packages whose `__init__.py` doesn't start with their purpose in one line."""
    for folder in sorted({path.parent for path in root.rglob("*.py")} - {root / "scripts/inject"}):
        init = folder / "__init__.py"
        purpose = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) if init.is_file() else None
        if not purpose or not purpose.splitlines()[0].rstrip().endswith("."):
            yield f"{folder.relative_to(root)}/__init__.py doesn't start with the package's purpose in one line"


def full_folders(root: Path) -> Iterator[str]:
    """Folders with more files than a reader takes in at once."""
    count: dict[str, int] = defaultdict(int)
    for key in files_of(root):
        count[key.rpartition("/")[0]] += 1
    for folder, files in sorted(count.items()):
        if files > MOST_FILES and folder not in PLUGINS:
            yield f"{folder or 'hotloop'}/ has {files} files, more than {MOST_FILES}"


def shared_stems(root: Path) -> Iterator[str]:
    """File names that several folders have."""
    places: dict[str, list[str]] = defaultdict(list)
    for key in files_of(root):
        places[key.rpartition("/")[2]].append(key)
    for stem, keys in sorted(places.items()):
        if len(keys) > 1 and stem not in {"__init__", *SHARED_STEMS, *PUBLIC_FUNCTIONS}:
            yield f"{stem}.py is there {len(keys)} times: {', '.join(keys)}"


def shared_classes(root: Path) -> Iterator[str]:
    """Public classes of one name in several files."""
    places: dict[str, list[str]] = defaultdict(list)
    for key in files_of(root):
        for node in ast.parse((root / f"{key}.py").read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(key)
    for name, keys in sorted(places.items()):
        if len(keys) > 1:
            yield f"class {name} is in {', '.join(keys)}"


def no_nouns(root: Path) -> Iterator[str]:
    """File and folder names that are a lone participle, gerund, preposition or adverb."""
    names = {part for key in files_of(root) for part in key.split("/")} - {"__init__", "__main__", *PACKAGES}
    for name in sorted(names - NOUNS.keys()):
        if name in NO_NOUNS or (name.endswith(SUFFIXES) and "_" not in name):
            yield f"{name} is no noun: a file is named after what it holds"


RULES = (other_packages, folders_without_purpose, full_folders, shared_stems, shared_classes, no_nouns)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rule(rule) -> None:
    assert "errors" in files_of(SRC), f"nothing to check in {SRC}"
    assert list(rule(SRC)) == []


def test_every_exception_is_needed() -> None:
    keys = files_of(SRC)
    stems = [key.rpartition("/")[2] for key in keys]
    assert [stem for stem in SHARED_STEMS if stems.count(stem) < 2] == []
    assert [name for name in NOUNS if name not in stems] == []
    assert [folder for folder in PLUGINS if not (SRC / folder).is_dir()] == []


BREACHES = {
    "package": (other_packages, "stray/__init__.py", '"""Stray."""'),
    "purpose": (folders_without_purpose, "data/stray/__init__.py", ""),
    "purpose, no file": (folders_without_purpose, "data/stray/inner.py", ""),
    "stem": (shared_stems, "data/loop.py", ""),
    "class": (shared_classes, "data/order.py", "class Plan: ..."),
    "gerund": (no_nouns, "data/watching.py", ""),
    "participle": (no_nouns, "data/hooked.py", ""),
    "irregular participle": (no_nouns, "data/held.py", ""),
    "preposition": (no_nouns, "data/beside.py", ""),
    "folder": (no_nouns, "data/beside/order.py", ""),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_planted_breach_is_caught(breach: str, tmp_path: Path) -> None:
    rule, file, code = BREACHES[breach]
    root = _copy(tmp_path)
    before = set(rule(root))
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as stream:
        stream.write(f"\n{code}\n")
    assert set(rule(root)) - before


def test_a_full_folder_is_caught(tmp_path: Path) -> None:
    root = _copy(tmp_path)
    for number in range(MOST_FILES):
        (root / f"parity/stray_{number}.py").touch()
    assert any("parity/" in line for line in full_folders(root))


def _copy(tmp_path: Path) -> Path:
    root = tmp_path / "hotloop"
    shutil.copytree(SRC, root, ignore=shutil.ignore_patterns("__pycache__"))
    return root
