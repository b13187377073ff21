"""The step of a Task measured on this machine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from hotloop import Task
from hotloop.advisor.this_machine import cpu_rates_here, measure_step
from hotloop.core.records.step_costs import CpuRates
from hotloop.plan import Plan
from hotloop.profiler.step_costs import cpu_probe

PAUSE_MS = 40.0


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


class UnevenModel(nn.Module):
    """A layer that pauses in each third step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.steps = nn.Linear(4, 2), 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        if self.steps % 3 == 0:
            time.sleep(PAUSE_MS / 1e3)
        return self.layer(rows)


def test_the_interval_of_a_measured_step_has_the_slow_steps() -> None:
    data = torch.randn(96, 4), torch.randint(0, 2, (96,))
    task = Task(model=UnevenModel, optimizer=sgd, data=data, loss=nn.CrossEntropyLoss(), batch_size=8, epochs=2)
    step, _, _ = measure_step(task, Plan())
    assert step.low_ms < step.step_ms < step.high_ms
    assert step.high_ms >= PAUSE_MS


RATES = CpuRates(
    {"aten.mm/forward": (((1.0, 8.0, 8.0, 8.0), 1e9),)}, {"aten.mul": (((1e3,), 1e-6),)}, {"view": 1e-6}, 0, 0, 1
)


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the number of threads of each measurement."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found: list[int] = []

    def measure(tick: object) -> CpuRates:
        found.append(torch.get_num_threads())
        return RATES

    monkeypatch.setattr(cpu_probe, "measure_cpu_rates", measure)
    return found


def test_rates_are_measured_once_for_each_number_of_threads(measured: list[int]) -> None:
    before = torch.get_num_threads()
    assert cpu_rates_here() == cpu_rates_here() == (RATES, [], "")
    assert measured == [before]
    try:
        torch.set_num_threads(before + 1)
        cpu_rates_here()
    finally:
        torch.set_num_threads(before)
    assert measured == [before, before + 1]


def test_another_method_measures_anew(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_rates_here()
    monkeypatch.setattr(cpu_probe, "METHOD", cpu_probe.METHOD + 1)
    cpu_rates_here()
    assert len(measured) == 2


@pytest.mark.parametrize("content", ["{", "[]", '{"key": {}}'])
def test_a_damaged_file_is_measured_anew_with_a_note(measured: list[int], tmp_path: Path, content: str) -> None:
    cpu_rates_here()
    (file,) = (tmp_path / "hotloop" / "cpu-rates").iterdir()
    file.write_text(content)
    rates, (note,), _ = cpu_rates_here()
    assert rates == RATES and "can't be used" in note and "measured anew" in note
    assert cpu_rates_here() == (RATES, [], "") and len(measured) == 2
