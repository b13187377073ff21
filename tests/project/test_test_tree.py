"""Rules for the folders and files of tests: they mirror the packages of the source, and their names say what is tested.

Each rule is also shown to catch its own breach, planted in a copy of the two trees' names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pytest

from tests.project.test_source_tree import NO_NOUNS, NOUNS, PACKAGES, PLUGINS, SRC, SUFFIXES

TESTS = Path(__file__).parents[1]

OTHER_FOLDERS = {
    "bench": "tests of bench/",
    "gpu": "tests that need a CUDA device",
    "multi": "tests that start several processes which train together; its folders are packages, too",
    "planted": "scripts with a planted bottleneck, which bench/planted.py profiles and records of claims/ name",
    "project": "rules for the source, the tests, the documents and the examples",
    "support": "what tests share: Tasks, stand-ins, processes, scripts, files of earlier versions",
    "web": "tests that need a browser",
}
"""Folders at the top that are no package of the source, each with the reason."""

MOST_FILES = 20
"""Files of a folder; the files of PLUGINS have tests in any number."""


@dataclass(frozen=True)
class Names:
    """The files of tests and the folders of the source, by their paths."""

    tests: frozenset[PurePosixPath]
    packages: frozenset[PurePosixPath]

    @classmethod
    def read(cls) -> Names:
        tests = (path.relative_to(TESTS) for path in TESTS.rglob("*.py"))
        folders = (path.parent.relative_to(SRC) for path in SRC.rglob("*.py"))
        return cls(frozenset(map(PurePosixPath, tests)), frozenset(map(PurePosixPath, folders)))

    def mirrored(self) -> Iterator[tuple[PurePosixPath, PurePosixPath]]:
        """Each folder that has to be one of the source's, and the one that it would be."""
        for folder in sorted({path.parent for path in self.tests}):
            if folder.parts and folder.parts[0] == "multi":
                yield folder, folder.relative_to("multi")
            elif folder.parts and folder.parts[0] not in OTHER_FOLDERS:
                yield folder, folder


def no_package(names: Names) -> Iterator[str]:
    """Folders that are neither a folder of the source nor in OTHER_FOLDERS."""
    for folder, package in names.mirrored():
        if package not in names.packages:
            yield f"{folder}/ is no folder of src/hotloop, and not in OTHER_FOLDERS"


def helpers_beside_tests(names: Names) -> Iterator[str]:
    """Files among the tests that aren't tests: they belong to support/."""
    for path in sorted(names.tests):
        test = path.name == "conftest.py" or path.name.startswith("test_")
        if not test and path.parts[0] not in ("support", "planted"):
            yield f"{path} is no test: what tests share is in support/"
        if test and path.parts[0] in ("support", "planted"):
            yield f"{path} is a test: it belongs to the folder of what it tests"


def full_folders(names: Names) -> Iterator[str]:
    """Folders of more files than a reader takes in at once."""
    count: dict[PurePosixPath, int] = defaultdict(int)
    for path in names.tests:
        count[path.parent] += path.name.startswith("test_")
    for folder, files in sorted(count.items()):
        if files > MOST_FILES and str(folder) not in PLUGINS:
            yield f"{folder}/ has {files} files of tests, more than {MOST_FILES}"


def no_nouns(names: Names) -> Iterator[str]:
    """Files that are named after a lone participle, gerund, preposition or adverb."""
    for path in sorted(names.tests):
        name = path.stem.removeprefix("test_")
        if path.parts[0] == "planted" or name in NOUNS or "__" in name:
            continue
        if name in NO_NOUNS or (name.endswith(SUFFIXES) and "_" not in name):
            yield f"{path}: {name} is no noun: a file of tests is named after what it tests"


RULES = (no_package, helpers_beside_tests, full_folders, no_nouns)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tests_keep_the_rule(rule) -> None:
    names = Names.read()
    assert PurePosixPath("test_plan.py") in names.tests, f"nothing to check in {TESTS}"
    assert list(rule(names)) == []


def test_every_exception_is_needed() -> None:
    assert [folder for folder in OTHER_FOLDERS if folder in PACKAGES or not (TESTS / folder).is_dir()] == []


BREACHES = {
    "folder": (no_package, "cpu/test_order.py"),
    "folder of a package": (no_package, "data/stray/test_order.py"),
    "package of several processes": (no_package, "multi/stray/test_order.py"),
    "helper": (helpers_beside_tests, "data/small_images.py"),
    "helper at the top": (helpers_beside_tests, "small_images.py"),
    "test among helpers": (helpers_beside_tests, "support/test_order.py"),
    "gerund": (no_nouns, "data/test_telling.py"),
    "participle": (no_nouns, "tuning/search/test_held.py"),
    "preposition": (no_nouns, "profiler/test_beside.py"),
    "helper, gerund": (no_nouns, "support/watching.py"),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_planted_breach_is_caught(breach: str) -> None:
    rule, path = BREACHES[breach]
    names = Names.read()
    before = set(rule(names))
    assert set(rule(Names(names.tests | {PurePosixPath(path)}, names.packages))) - before


def test_a_full_folder_is_caught() -> None:
    names = Names.read()
    more = {PurePosixPath(f"parity/test_stray_{number}.py") for number in range(MOST_FILES)}
    assert any("parity/" in line for line in full_folders(Names(names.tests | more, names.packages)))
