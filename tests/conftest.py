"""What tests of several folders share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

RunCli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_cli(tmp_path: Path) -> RunCli:
    """Runs `hotloop ARGS` as a real process, in a folder of its own, with its output captured as text.

    `run_cli("train", "task.py", cwd=..., timeout_s=...)`; arguments may be paths.
    """

    def run(
        *args: str | Path, cwd: Path = tmp_path, timeout_s: float = 300, **options: object
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hotloop", *map(str, args)]
        return subprocess.run(  # type: ignore[call-overload,no-any-return]
            command, cwd=cwd, timeout=timeout_s, capture_output=True, encoding="utf-8", check=False, **options
        )

    return run


@pytest.fixture(scope="session")
def fashion() -> Path:
    """The folder of the real Fashion-MNIST, four gzipped IDX files; skips where there is none."""
    from hotloop.data.builtin import FASHION_MNIST

    if not all((FASHION_MNIST.system / name).is_file() for name in FASHION_MNIST.sha256):
        pytest.skip(f"the real Fashion-MNIST isn't in {FASHION_MNIST.system} (Debian: {FASHION_MNIST.package})")
    return FASHION_MNIST.system


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device here")
