"""Batch sizes are tried in processes of their own, to the end of the data or of the memory."""

from __future__ import annotations

import pytest

from hotloop.core.records.study import BatchSizeTrial
from hotloop.hyperparameters import finders
from hotloop.hyperparameters.finders import measure_batch_sizes, predict_memory
from hotloop.hyperparameters.trial_processes import TaskSource


def measured(sizes: dict[int, int]) -> list[BatchSizeTrial]:
    return [BatchSizeTrial(batch_size=size, samples_per_s=1.0, memory_bytes=memory) for size, memory in sizes.items()]


def test_memory_is_predicted_on_a_line() -> None:
    assert predict_memory(measured({8: 100}), 16) is None
    assert predict_memory(measured({8: 180, 16: 260}), 32) == 420
    assert predict_memory(measured({8: 200, 16: 190}), 32) == 190


class Processes:
    """Stands in for trial processes: a machine of 1000 bytes, where a sample takes 10 and more speed from size 32 on."""

    def __init__(self, killed_at: int = 10**9, samples: int = 10**9) -> None:
        self.killed_at, self.samples, self.tried = killed_at, samples, []

    def run(self, work: str, log: str, **job) -> dict | None:
        module, _, name = work.partition(":")
        assert module == finders.__name__ and hasattr(finders, name)
        self.tried.append(size := job["batch_size"])
        if size >= self.killed_at:
            return None
        speed = 100.0 - abs(size - 32)
        return {"samples_per_s": speed, "memory_bytes": 100 + 10 * size, "free_bytes": 1000, "samples": self.samples}


@pytest.mark.parametrize(
    ("machine", "largest", "tried", "limit"),
    [
        (Processes(), 64, [8, 16, 32, 64], "a batch of 128 would need"),
        (Processes(killed_at=32), 16, [8, 16, 32], "the system killed the process"),
        (Processes(samples=20), 16, [8, 16], "the data has 20 samples"),
    ],
)
def test_the_search_ends_at_a_limit(machine: Processes, largest: int, tried: list[int], limit: str) -> None:
    lines: list[str] = []
    found = measure_batch_sizes(machine, TaskSource("task.py"), {}, {}, "task", lines.append)
    assert (found.largest, machine.tried) == (largest, tried)
    assert found.limit.startswith(limit)
    assert found.fastest == min(largest, 32)
    assert len(lines) == len(tried)
