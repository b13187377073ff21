"""The order of packages is a contract of import-linter in pyproject.toml; quick commands import no torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TORCH_FREE = (
    "hotloop",
    "hotloop.errors",
    "hotloop.plan",
    "hotloop.core.plan_request",
    "hotloop.core.feasibility",
    "hotloop.arrays",
    "hotloop.tuning.rules",
    "hotloop.scripts.script_process",
    "hotloop.profiler.operator_cost",
    "hotloop.advisor.estimate",
    "hotloop.report.run_report",
    "hotloop.hyperparameters.study",  # its processes import torch at the same time
    "hotloop.cli",
)
"""Modules that import no torch at once, so that a command answers before torch would be imported."""


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Checks the contracts for the package below `folder/src`."""
    program = "import sys; from importlinter.cli import lint_imports_command; sys.exit(lint_imports_command())"
    environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
    command = [sys.executable, "-c", program, "--config", str(folder / "pyproject.toml"), "--no-cache"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_packages_import_what_stands_below_them_and_nothing_in_a_circle() -> None:
    found = lint(ROOT)
    assert found.returncode == 0, found.stdout


BREACHES = {
    "a higher package": ("errors.py", "import hotloop.plan"),
    "in a function": ("errors.py", "def late():\n    import hotloop.cli"),
    "a circle": ("data/order.py", "import hotloop.data.feeds.feed"),
    "a new package": ("stray/__init__.py", ""),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_planted_breach_is_found(breach: str, tmp_path: Path) -> None:
    file, code = BREACHES[breach]
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / "src" / "hotloop" / file
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as stream:
        stream.write(f"\n{code}\n")
    assert lint(tmp_path).returncode == 1


@pytest.mark.parametrize("module", TORCH_FREE)
def test_quick_modules_import_no_torch(module: str) -> None:
    program = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
