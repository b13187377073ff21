"""Running out of memory is told with what held it and what would fit. The allocations that fail are real."""

from __future__ import annotations

import functools
import resource
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.data import DataLoader, TensorDataset

import hotloop
from hotloop.errors import HotloopError, MemoryExhausted, TaskError, call_user_code, is_out_of_memory
from hotloop.lowering.failures import out_of_memory as memory
from tests.support.programs import a_task, labelled, trained

NOWHERE = 1 << 52  # bytes: more than any address space holds, so that it fails at once
MIB = 1 << 20
EACH = 1 << 18  # bytes of one wide tensor, for a sample


class InTraining(nn.Module):
    """Adds something to its input where gradients are on: not while the Task is being checked, nor in evaluation."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.function(x) if torch.is_grad_enabled() else x


def layers(function: Callable[[Tensor], Any]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(6, 8), InTraining(function), nn.Linear(8, 3))


def exhausted(path: Path, plan: str = "baseline", **fields: Any) -> str:
    with pytest.raises(MemoryExhausted) as caught:
        trained(a_task(**fields), path / "run", plan=plan)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def wide(x: Tensor, times: int = 5) -> Tensor:
    """Keeps `times` tensors of `EACH` bytes for each sample until the backward pass."""
    hidden = x[:, :1].repeat(1, EACH // 4)
    for _ in range(times):
        hidden = hidden.tanh()
    return hidden[:, :8]


def test_the_advice_is_a_batch_that_fits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    room = 32 * MIB
    monkeypatch.setattr(memory, "free_memory_bytes", lambda device: room)
    many = layers(lambda x: wide(x) + torch.empty(NOWHERE if len(x) > 50 else 1, dtype=torch.uint8)[0])
    fields: dict[str, Any] = dict(model=many, data=labelled(samples=128), optimizer=Adam)
    message = exhausted(tmp_path, batch_size=64, **fields)
    assert message.startswith("step 1 (epoch 1, batch 1) ran out of memory when it asked for 4.0 PiB; ")
    for part in (
        "parameters 332 bytes",
        "gradients 332 bytes",
        "optimizer state",
        "data 4.0 KiB",
        "the batch of 64 about",
    ):
        assert part in message
    assert "; 32.0 MiB are free without the batch" in message
    advice = int(message.rpartition("batch_size=")[2].partition(")")[0])
    program = hotloop.lower(a_task(batch_size=advice, **fields))
    assert memory._measure_need(program, advice) < room < memory._measure_need(program, 3 * advice)


def test_a_limit_of_the_process_counts_as_well() -> None:
    free = memory.free_memory_bytes(torch.device("cpu"))
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 256 * MIB, hard))
    try:
        assert memory.free_memory_bytes(torch.device("cpu")) <= 256 * MIB < free
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def test_what_small_batches_need_grows_with_them() -> None:
    program = hotloop.lower(a_task(model=layers(wide), batch_size=8, optimizer=Adam))
    needs = memory._measure_needs(program, 8)
    assert sorted(needs) == [1, 2, 4]
    for samples, need in needs.items():
        assert 5 * EACH * samples <= need <= 9 * EACH * samples  # what is kept, and a few on the way


def test_no_batch_is_measured_that_could_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system may grant more than it has, so that what a larger batch would need must be there."""
    program = hotloop.lower(a_task(model=layers(wide), batch_size=8))
    monkeypatch.setattr(memory, "free_memory_bytes", lambda device: 9 * EACH)
    assert sorted(memory._measure_needs(program, 8)) == [1]


def test_not_even_one_sample(tmp_path: Path) -> None:
    message = exhausted(tmp_path, model=layers(lambda x: torch.empty(NOWHERE, dtype=torch.uint8)[0]))
    assert "when it asked for 4.0 PiB" in message
    assert "not even the smallest batch fits" in message
    assert "are free" in message


def test_the_average_and_a_map_style_data_set(tmp_path: Path) -> None:
    class Samples:
        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> Any:
            x, y = labelled()
            return x[index], y[index]

    too_many = layers(lambda x: torch.empty(NOWHERE if len(x) > 4 else 1, dtype=torch.uint8)[0])
    message = exhausted(tmp_path, model=too_many, data=Samples(), average=0.9, batch_size=8)
    assert "average 332 bytes" in message
    assert " data " not in message
    assert "batch_size=4)" in message


def test_a_loader_of_ones_own_has_the_batch_size(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(*labelled()), batch_size=12)
    too_many = layers(lambda x: torch.empty(NOWHERE if len(x) > 4 else 1, dtype=torch.uint8)[0])
    assert "batch_size=6 in your DataLoader" in exhausted(tmp_path, model=too_many, data=loader, batch_size=None)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: torch.empty(NOWHERE, dtype=torch.uint8),
        lambda: np.empty(NOWHERE, dtype=np.uint8),
        lambda: bytearray(1 << 60),
    ],
)
def test_every_allocator_is_understood(ask: Callable[[], Any], tmp_path: Path) -> None:
    assert "ran out of memory" in exhausted(tmp_path, model=layers(lambda x: len(ask())))


def test_torchs_own_error_and_the_words_of_other_devices() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has ..."))
    for text in (
        "CUDA error: out of memory",
        "MPS backend out of memory (MPS allocated: 17.00 GB, other allocations: 1.00 GB, max allowed: 18.13 GB)",
        "XPU out of memory. Tried to allocate 6.00 GiB",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes.",
        "std::bad_alloc",
    ):
        assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied (5x6 and 7x3)"))
    assert not is_out_of_memory(KeyError("out of memory"))
    assert not is_out_of_memory(TaskError("the model raised RuntimeError: out of memory"))


def test_sizes_as_one_reads_them() -> None:
    read = [memory.format_binary_bytes(number) for number in (0, 1023, 1024, 1536 * MIB, 1 << 60)]
    assert read == ["0 bytes", "1023 bytes", "1.0 KiB", "1.5 GiB", "1.0 EiB"]
    for text, asked in (
        ("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.15 GiB", "20.0 GiB"),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1048576 bytes. Error code 12", "1.0 MiB"),
        ("Unable to allocate 8.00 PiB for an array with shape (1125899906842624,)", "8.0 PiB"),
    ):
        assert memory._requested_bytes(text) == f" when it asked for {asked}"
    assert memory._requested_bytes("std::bad_alloc") == ""


def test_evaluation_has_no_training_step_to_measure(tmp_path: Path) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            torch.empty(NOWHERE, dtype=torch.uint8)
        return nn.functional.cross_entropy(output, target)

    message = exhausted(tmp_path, loss=loss, validation=0.25)
    assert message.startswith("validation after step 4 ran out of memory when it asked for 4.0 PiB")
    assert "smaller batch_size" in message


@pytest.mark.parametrize("plan", ["baseline", "auto"])
def test_a_model_that_is_too_large_to_be_made(plan: str, tmp_path: Path) -> None:
    message = exhausted(tmp_path, plan, model=functools.partial(nn.Linear, 6, 1 << 50))
    assert message.startswith("making model and data ready on cpu ran out of memory")


def test_memory_of_the_failed_step_is_given_up(tmp_path: Path) -> None:
    """A notebook keeps the error; it must not keep the activations too."""
    held: list[weakref.ref[Tensor]] = []

    def hold(x: Tensor) -> Tensor:
        activation = torch.ones(MIB) * x.sum()
        held.append(weakref.ref(activation))
        return activation.sum() + torch.empty(NOWHERE, dtype=torch.uint8)[0]

    with pytest.raises(MemoryExhausted) as caught:
        trained(a_task(model=layers(hold)), tmp_path / "run")
    assert caught.value.__cause__ is not None
    assert held and all(reference() is None for reference in held)


def test_calling_leaves_a_lack_of_memory_alone() -> None:
    with pytest.raises(RuntimeError) as caught:
        call_user_code("prepare", lambda: torch.empty(NOWHERE, dtype=torch.uint8))
    assert not isinstance(caught.value, HotloopError)
