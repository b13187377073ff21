"""What tests of several folders share."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support.processes.forked_server import Server

# torch's compiler imports setuptools, which refuses to be imported after the standard library's distutils.
with suppress(ImportError):
    import setuptools  # noqa: F401

# The runs of tests are trusted for as long as the tests last; a test's own environment may say otherwise.
_DATA = tempfile.TemporaryDirectory(prefix="hotloop-tests-")
os.environ["XDG_DATA_HOME"] = _DATA.name

# What tests measure counts beside other programs too; the tests of the load itself set the variable to 0.
os.environ["HOTLOOP_ACCEPT_LOAD"] = "1"

# How long an example takes depends on what else the machine does.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

RunCli = Callable[..., subprocess.CompletedProcess[str]]

REAL_MACHINE = ("cli", "gpu", "multi", "web")
"""Folders whose tests run on the machine as it is."""


@pytest.fixture(autouse=True)
def any_machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search tries, and finds to rewrite, the same plans with any processor and any C library."""
    if request.path.relative_to(Path(__file__).parent).parts[0] in REAL_MACHINE:
        return
    from hotloop.core.hardware import limits
    from hotloop.lowering.rewrites import mm_by_onednn
    from hotloop.tuning import candidates

    monkeypatch.setattr(mm_by_onednn, "is_mkl_slow_here", lambda: False)
    monkeypatch.setattr(candidates, "is_mkl_slow", lambda processor: False)
    monkeypatch.setattr(limits, "_is_glibc_malloc", lambda: False)


@pytest.fixture(autouse=True)
def threads_take_turns_as_before() -> Iterator[None]:
    """What looks at a script's lines shortens Python's switch interval; none may stay so."""
    before = sys.getswitchinterval()
    yield
    after = sys.getswitchinterval()
    sys.setswitchinterval(before)
    assert after == before


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """Starts `hotloop ARGS` as a real process that needs no import of torch."""
    server = Server()
    yield server
    server.close()


@pytest.fixture
def run_cli(server: Server, tmp_path: Path) -> RunCli:
    """Runs `hotloop ARGS` as a real process, in a folder of its own, with its output captured as text.

    `run_cli("train", "task.py", cwd=..., fresh=True)`; arguments may be paths.
    """

    def run(*args: str | Path, cwd: Path = tmp_path, **options: Any) -> subprocess.CompletedProcess[str]:
        process = server.start(*args, cwd=cwd, **options)
        try:
            out, err = process.communicate(timeout=300)
        finally:
            process.kill()
        return subprocess.CompletedProcess(args, process.wait(), out, err)

    return run


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """On a busy machine two threads are many times slower than one."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def fashion() -> Path:
    """The folder of the real Fashion-MNIST, four gzipped IDX files; skips where there is none."""
    from hotloop.data.builtin import FASHION_MNIST

    if not all((FASHION_MNIST.system / name).is_file() for name in FASHION_MNIST.sha256):
        pytest.skip(f"the real Fashion-MNIST isn't in {FASHION_MNIST.system} (Debian: {FASHION_MNIST.package})")
    return FASHION_MNIST.system


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "few(*ids): the cells of a matrix that aren't `more`, by their ids; * is a wildcard"
    )


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as `more` the cells that the marker `few` of their test doesn't name, unless only such cells are collected."""
    rest: dict[str, list[pytest.Item]] = {}
    matched: set[str] = set()
    for item in items:
        if mark := item.get_closest_marker("few"):
            test, _, cell = item.nodeid.partition("[")
            if any(fnmatchcase(cell.removesuffix("]"), name) for name in mark.args):
                matched.add(test)
            else:
                rest.setdefault(test, []).append(item)
    for test in matched:
        for item in rest.get(test, []):
            item.add_marker("more")


def pytest_collection_finish() -> None:
    set_apart()


@pytest.hookimpl(trylast=True)  # when what the test was given is gone
def pytest_runtest_teardown() -> None:
    set_apart()


def set_apart() -> None:
    """What was imported stays; each collection of garbage would look through all of it again."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device here")
