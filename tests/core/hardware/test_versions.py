"""What a remembered result depends on: the machine as far as this process may use it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hotloop.core.hardware import machine
from hotloop.core.hardware.machine import machine_name


@pytest.mark.parametrize(
    "other", [{"allowed_cores": 99}, {"quota_cores": 0.5}, {"kernels": "DEFAULT"}, {"model": "another"}]
)
def test_another_share_of_a_machine_is_another_machine(other: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before, processor = machine_name(), machine.read_processor()
    monkeypatch.setattr(machine, "read_processor", lambda: replace(processor, **other))
    assert machine_name() != before
