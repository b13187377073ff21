"""Plans of a GPU train as the CPU's baseline, on the CUDA device of tests: see tests/support/fake_cuda.py."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support.processes.fake_cuda_steps import FAULTS, TASKS

HALF = ("precision=bf16", "precision=fp16")

REFUSED = {
    "cnn, accumulation=3": "BatchNorm2d",
    "lstm, layout=channels_last": "4 or 5 dimensions",
    "gpt, layout=channels_last": "4 or 5 dimensions",
    "another gru, optimizer=fused": "RMSprop has no such implementation",
    "another bag, optimizer=fused": "RMSprop has no such implementation",
    "data_with_a_generator_of_its_own, residency=device": "draws from the random generator",
    "data_with_names, residency=device": "is a str",
    "a_step_that_changes_its_batch, residency=device": "draws from the random generator",
    "gan, optimizer=fused": "has no such implementation",
    "gan, precision=bf16": "expected dtype float for `end`",  # its own step mixes the number formats, as on a GPU
    "lookahead, optimizer=fused": "has no such implementation",
    "schedule_free, optimizer=fused": "has no such implementation",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    command = [sys.executable, "-m", "tests.support.processes.fake_cuda_steps", str(tmp_path_factory.mktemp("cuda"))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", TASKS)
def test_plans_of_a_gpu_train_as_the_baseline(name: str, found: dict[str, dict[str, Any]]) -> None:
    for axis in TASKS[name][1]:
        result = found["plans"][f"{name}, {axis}"]
        if refusal := REFUSED.get(f"{name}, {axis}"):
            assert refusal in result
        elif axis in HALF and name != "padded_with_a_weight":  # an embedding alone, which autocast leaves in fp32
            assert 1e-6 < result < 0.05, axis
        else:
            assert result < 1e-6, axis


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_each_axis_is_found(name: str, found: dict[str, dict[str, Any]]) -> None:
    result = found["faults"][name]
    if name == "autocast":
        assert result == 0, "without autocast on the GPU, the steps are those of fp32"
    elif name == "layout":
        assert "'Tensor' object has no attribute 'held'" in result
    else:
        assert "found two devices, cuda:0 and cpu" in result
