"""Runs an unmodified script with exchanges in a process of its own."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotloop.core.files.user_folders import cache_folder
from hotloop.scripts.script_process import run_script

if TYPE_CHECKING:
    from hotloop.core.records.race import ScriptRun


def run_with_exchanges(
    path: Path | str,
    arguments: Sequence[str] = (),
    *,
    exact: bool = False,
    dry_run: bool = False,
    accept: str | None = None,
    stdout: int | None = None,
) -> ScriptRun:
    """Runs a script to its end, as `python path arguments` would, and exchanges parts; see `run_script`.

    Args:
        exact: allow only bitwise exchanges.
        dry_run: prove and race the exchanges, then use none.
        accept: `reduced-precision` allows TF32 or bf16 products; None for fp32 alone.
        stdout: file descriptor of the script's output; None for this process's output.

    Raises:
        TaskError: the file doesn't exist.
    """
    end = run_script(
        path,
        arguments,
        inside="hotloop.exchanges.run_child:wait_for_torch",
        settings={
            "exact": exact,
            "dry_run": dry_run,
            "accept": accept,
            "script": _digest(path),
            "arguments": hashlib.sha256(json.dumps([accept, *arguments]).encode()).hexdigest(),
            "cache": str(cache_folder()),
        },
        stdout=stdout,
        interpreter_options=subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
    )
    from hotloop.core.records.race import ScriptRun  # slow to import, so after the script's start

    facts: dict[str, Any] = {"notes": ["the script ended before it imported torch"]}
    if end.result is not None:
        facts = end.result
    run = dict(source=str(path), exit_code=end.exit_code, seconds=end.seconds, exact=exact, dry_run=dry_run)
    return ScriptRun.model_validate(run | facts)


def _digest(path: Path | str) -> str:
    """Returns what identifies the script for later runs; a missing file is reported by `run_script`."""
    if isinstance(path, str) or not path.is_file():
        return str(path)
    return hashlib.sha256(path.read_bytes()).hexdigest()
