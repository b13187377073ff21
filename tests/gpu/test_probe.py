"""A real measurement of a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hotloop.core.hardware import benchmarks, probe
from hotloop.core.hardware.devices import device_names
from hotloop.core.hardware.probe import measure_hardware

pytestmark = pytest.mark.gpu


def test_the_gpu_is_measured_in_every_precision_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(probe, "speed_folder", lambda: tmp_path)
    assert "cuda:0" in device_names()
    allocated, random = torch.cuda.memory_allocated(0), torch.cuda.get_rng_state(0)
    found = measure_hardware("cuda:0")
    assert torch.cuda.memory_allocated(0) == allocated
    assert torch.equal(torch.cuda.get_rng_state(0), random)

    (gpu,) = found.devices
    assert found.notes == ()
    assert benchmarks.is_complete(gpu, gpu.speed)
    assert gpu.model == torch.cuda.get_device_name(0)
    assert gpu.memory_total and gpu.memory_free
    assert gpu.memory_free.value <= gpu.memory_total.value
    assert gpu.speed.memory_bandwidth and gpu.speed.host_to_device
    assert gpu.speed.host_to_device.value < gpu.speed.memory_bandwidth.value
    assert measure_hardware("cuda:0").devices[0].speed == gpu.speed


def test_fp32_is_measured_without_tf32(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if torch.cuda.get_device_capability(0) < (8, 0) or torch.version.hip:
        pytest.skip("tf32 is known to be there, and faster, from NVIDIA's compute capability 8.0 on")
    monkeypatch.setattr(probe, "speed_folder", lambda: tmp_path)
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    rates = measure_hardware("cuda:0").devices[0].speed.flop_per_s
    assert rates["fp32"].value < rates["tf32"].value < rates["bf16"].value
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"
