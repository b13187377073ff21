"""Others' scripts are stopped by one rule, and judged by what they do alone."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import pytest

from bench import others


def test_a_script_that_goes_on_after_ctrl_c_is_ended(monkeypatch) -> None:
    monkeypatch.setattr(others, "GRACE_S", 0.2)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # which the script inherits
    try:
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert others._said(process, 0.2) == ("", None)
    assert process.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    ("codes", "interrupted", "faults"),
    [
        ([0, 0, 0], False, 0),
        ([130, 130, 130], True, 0),
        ([1, 1, 1], True, 0),
        ([130, 1, 1], True, 0),
        ([130, 1, 130], True, 1),
        ([0, 1, 0], False, 1),
        ([1, 1, 1], False, 1),
    ],
)
def test_exit_codes_are_judged_where_a_script_alone_has_one(codes: list[int], interrupted: bool, faults: int) -> None:
    one: dict[str, Any] = {"same": {"output": True}, "attributed": 1.0, "exit_code": codes, "interrupted": interrupted}
    assert len(others.wrong(one)) == faults
