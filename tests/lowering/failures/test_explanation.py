"""What goes wrong in a step or an evaluation is told in one line: what, where, and what to do."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from hotloop.core.callback import View
from hotloop.errors import DataError, DeviceError, DiskError, HotloopError, TaskError, TrainingError
from hotloop.lowering.failures import explanation
from hotloop.plan import Plan
from hotloop.training.run import Run
from tests.support.programs import a_task, labelled, trained


class InTraining(nn.Module):
    """A function as a module, applied where gradients are on: not while the Task is checked, nor in evaluation."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x) if torch.is_grad_enabled() else x


def layers(*modules: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(6, 8), *modules, nn.Linear(8, 3))


class Loaded:
    """A map-style data set, which nothing checks before it is loaded."""

    def __init__(self, change: Callable[[int, Tensor, Tensor], Any] = lambda index, x, y: (x, y)) -> None:
        self.x, self.y = labelled()
        self.change = change

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.change(index, self.x[index], self.y[index])


def failing(path: Path, kind: type[HotloopError], every: str = "2", **fields: Any) -> str:
    with pytest.raises(kind) as caught:
        trained(a_task(**fields), path / "run", checkpoint_every=every)
    assert type(caught.value) is kind
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.fix
    return message


def newest_step(path: Path) -> int:
    found = Run.open(path / "run").checkpoints.newest()
    return found[0].state.position.step if found else 0


# Devices


class Scaled(nn.Module):
    """Keeps a tensor as a plain attribute, on a device that no move of the module changes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(8, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale if torch.is_grad_enabled() else x


class Listed(nn.Module):
    """Keeps a module in a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [nn.LayerNorm(8, device="meta")]

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden[0](x) if torch.is_grad_enabled() else x


def test_a_tensor_that_stayed_on_another_device(tmp_path: Path) -> None:
    message = failing(tmp_path, DeviceError, model=layers(Scaled()))
    assert message.startswith(
        "step 1 (epoch 1, batch 1): one operation has tensors on meta and cpu in '1' (Scaled) (test_explanation.py:"
    )
    assert "expected all on cpu" in message
    assert "register_buffer" in message


def test_a_new_tensor_on_another_device(tmp_path: Path) -> None:
    def concatenated(x: Tensor) -> Tensor:
        return torch.cat([x, torch.ones(1, 8, device="meta")])[: len(x)]

    message = failing(tmp_path, DeviceError, model=layers(nn.ReLU(inplace=True), InTraining(concatenated)))
    assert "one operation has tensors on meta and cpu in '2' (InTraining) (test_explanation.py:" in message
    assert "device=x.device" in message


def test_a_module_that_was_not_registered(tmp_path: Path) -> None:
    message = failing(tmp_path, DeviceError, model=layers(Listed()))
    assert "in '1' (Listed) (test_explanation.py:" in message
    assert "which runs a LayerNorm that is no registered part of it" in message
    assert "nn.ModuleList" in message


def test_a_step_of_ones_own_is_named_by_its_line(tmp_path: Path) -> None:
    def step(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[0]), torch.ones(5, 3, device="meta"))

    message = failing(tmp_path, DeviceError, step=step)
    assert "one operation has tensors on meta and cpu (test_explanation.py:" in message


@pytest.mark.skipif(torch.cuda.is_available(), reason="names a device that this machine lacks")
def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    message = failing(tmp_path, DeviceError, model=layers(InTraining(lambda x: x.cuda())))
    assert "names a device that this machine lacks in '1' (InTraining) (test_explanation.py:" in message


SAID = {
    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!": ["cuda:0", "cpu"],
    "Expected all tensors to be on the same device, but found at least two devices, cuda:1 and cuda:0! (when checking "
    "argument for argument mat1 in method wrapper_CUDA_addmm)": ["cuda:1", "cuda:0"],
    "Expected all tensors to be on the same device, but got mat2 is on cpu, different from other tensors on cuda:0 "
    "(when checking argument in method wrapper_CUDA_mm)": ["cpu", "cuda:0"],
    "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same": ["cuda", "cpu"],
    "Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same or input should be a "
    "MKLDNN tensor and weight is a dense tensor": ["cpu", "cuda"],
    "Input and hidden tensors are not at the same device, found input tensor at cuda:0 and hidden tensor at cpu": [
        "cuda:0",
        "cpu",
    ],
    "indices should be either on cpu or on the same device as the indexed tensor (cpu)": ["cpu", "cuda:0"],
    "expected self and mask to be on the same device, but got mask on cpu and self on cuda:0": ["cpu", "cuda:0"],
    "Tensor for argument #2 'mat1' is on CPU, but expected it to be on GPU (while checking arguments for addmm)": [
        "cpu",
        "gpu",
    ],
    "Tensor for argument weight is on cpu but expected on mps": ["cpu", "mps"],
    "Placeholder storage has not been allocated on MPS device!": ["cpu", "mps"],
    "Expected a 'cuda' device type for generator but found 'cpu'": ["cuda", "cpu"],
}


@pytest.mark.parametrize("text", SAID)
def test_what_torch_says_of_devices(text: str) -> None:
    assert explanation.mismatched_devices(text, "cuda:0") == SAID[text]


@pytest.mark.parametrize(
    "text",
    [
        "mat1 and mat2 shapes cannot be multiplied (5x6 and 7x3)",
        "Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the same",
        "Input type (double) and bias type (float) should be the same",
        "the sensor on device cpu failed",
        "could not read cpu and gpu temperatures",
    ],
)
def test_other_words_are_not_about_devices(text: str) -> None:
    assert explanation.mismatched_devices(text, "cuda:0") is None


# Labels, indices and dtypes


def test_a_label_out_of_range_is_named_with_its_sample(tmp_path: Path) -> None:
    data = Loaded(lambda index, x, y: (x, y if index != 13 else torch.tensor(10)))
    message = failing(tmp_path, DataError, data=data, validation=0.25)
    assert "the data has label 10 in sample 13, but the model has 3 outputs; expected labels from 0 to 2" in message


def test_a_label_out_of_range_in_validation(tmp_path: Path) -> None:
    data = Loaded(lambda index, x, y: (x, y if index != 13 else torch.tensor(-7)))
    message = failing(tmp_path, DataError, validation=data)
    assert message.startswith("validation after step 5: the validation data has label -7, but the model has 3 outputs")


def test_an_index_beyond_an_embedding(tmp_path: Path) -> None:
    model = lambda: nn.Sequential(nn.Embedding(20, 2), nn.Flatten(), nn.Linear(12, 3))  # noqa: E731
    message = failing(tmp_path, DataError, model=model, data=Loaded(lambda index, x, y: (x.long() * 0 + index, y)))
    assert "in '0' (Embedding), which has 20 rows; expected indices from 0 to 19" in message


@pytest.mark.parametrize(
    ("change", "holds", "remedy"),
    [
        (lambda index, x, y: (x.double(), y), "float64 and int64", "x.float()"),
        (lambda index, x, y: (x.long(), y), "int64", "x.float()"),
        (lambda index, x, y: (x.byte(), y), "uint8 and int64", "x.float()"),
        (lambda index, x, y: (x, y.int()), "float32 and int32", "y.long()"),
    ],
)
def test_dtypes_of_the_data(change: Any, holds: str, remedy: str, tmp_path: Path) -> None:
    message = failing(tmp_path, DataError, data=Loaded(change))
    assert f"the batch holds {holds}." in message
    assert remedy in message


def test_a_dtype_that_the_model_makes(tmp_path: Path) -> None:
    message = failing(tmp_path, TaskError, model=layers(InTraining(lambda x: x.double())))
    assert "dtypes that don't go together in '2' (Linear)" in message
    assert "dtype=x.dtype" in message


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("expected scalar type Long but found Int", {torch.int64, torch.int32}),
        ("expected m1 and m2 to have the same dtype, but got: double != float", {torch.float64, torch.float32}),
        ("Found dtype Double but expected Float", {torch.float64, torch.float32}),
        ("Input type (unsigned char) and bias type (float) should be the same", {torch.uint8, torch.float32}),
        ("\"nll_loss_forward_reduce_cuda_kernel_2d_index\" not implemented for 'Float'", {torch.float32}),
        (
            "Input type (torch.cuda.HalfTensor) and weight type (torch.cuda.FloatTensor) should be the same",
            {torch.float16, torch.float32},
        ),
    ],
)
def test_what_torch_says_of_dtypes(text: str, named: set[torch.dtype]) -> None:
    assert explanation.is_mismatch(text)
    assert explanation.dtypes_in(text) == named


# Any other error of the user's code


def test_an_error_of_the_first_step_is_the_tasks(tmp_path: Path) -> None:
    message = failing(tmp_path, TaskError, model=lambda: nn.Linear(7, 3), data=Loaded())
    assert message.startswith(
        "step 1 (epoch 1, batch 1) raised RuntimeError: mat1 and mat2 shapes cannot be multiplied"
    )
    assert "in the model (Linear)" in message
    assert "nothing was trained yet" in message


def raise_at(index: int) -> Callable[[Tensor], Tensor]:
    """Raises when the marked sample comes."""

    def checked(x: Tensor) -> Tensor:
        if bool((x.detach() > 1e4).any()):
            raise ValueError(f"too large\nreally, {index}")
        return x

    return checked


def test_an_error_of_a_later_step_says_what_is_saved(tmp_path: Path) -> None:
    x, y = labelled()
    x[17] = 1e6
    data = (x, y)
    message = failing(
        tmp_path, TrainingError, data=data, shuffle=False, epochs=3, model=layers(InTraining(raise_at(17)))
    )
    assert message.startswith("step 4 (epoch 1, batch 4) raised ValueError: too large (test_explanation.py:")
    assert message.endswith("in '1' (InTraining). Correct that line; the last good checkpoint is of step 2")
    assert newest_step(tmp_path) == 2


def test_an_error_in_evaluation_says_so(tmp_path: Path) -> None:
    def failing_loss(output: Tensor, target: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            raise KeyError("no such class")
        return nn.functional.cross_entropy(output, target)

    message = failing(tmp_path / "1", TrainingError, loss=failing_loss, validation=0.2)
    assert message.startswith("validation after step 4 raised KeyError: 'no such class' (test_explanation.py:")
    message = failing(tmp_path / "2", TrainingError, loss=failing_loss, test=labelled())
    assert message.startswith("test after step 5 raised KeyError")


def test_ctrl_c_stays_what_it_is(tmp_path: Path) -> None:
    def interrupted(x: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(a_task(model=layers(InTraining(interrupted))), tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        trained(a_task(callbacks=[interrupted]), tmp_path / "other")


# Callbacks


def failing_at(event: str, error: Exception) -> Callable[[View], None]:
    def watch(view: View) -> None:
        if view.event == event:
            raise error

    return watch


@pytest.mark.parametrize(("event", "step"), [("epoch", 5), ("checkpoint", 10), ("stop", 10), ("final", 10)])
def test_a_callback_that_raises_ends_training_with_everything_saved(event: str, step: int, tmp_path: Path) -> None:
    message = failing(
        tmp_path, TaskError, every="10h", epochs=2, callbacks=[failing_at(event, ZeroDivisionError("by\nme"))]
    )
    assert message.startswith("the callback watch raised ZeroDivisionError: by (test_explanation.py:")
    assert f"at the event '{event}' after step {step}" in message
    assert newest_step(tmp_path) == step
    run = trained(a_task(epochs=2), tmp_path / "run", resume=True)
    assert [epoch["epoch"] for epoch in run.epochs] == [1, 2]


def test_a_callback_that_raises_at_the_start(tmp_path: Path) -> None:
    message = failing(tmp_path, TaskError, callbacks=[failing_at("start", ValueError("no"))])
    assert "nothing was trained yet" in message
    assert not (tmp_path / "run").exists()


def test_the_checkpoint_of_a_failing_callback_is_told_to_no_callback(tmp_path: Path) -> None:
    seen: list[str] = []

    def always(view: View) -> None:
        seen.append(view.event)
        if view.event in ("epoch", "checkpoint"):
            raise ValueError("no")

    failing(tmp_path, TaskError, every="10h", callbacks=[always])
    assert "epoch" in seen and "checkpoint" not in seen


def test_hotloops_own_errors_pass_through_callbacks(tmp_path: Path) -> None:
    error = DiskError("the disk is full", fix="make room")
    with pytest.raises(DiskError) as caught:
        trained(a_task(callbacks=[failing_at("epoch", error)]), tmp_path / "run")
    assert caught.value.given == error.given and caught.value.fix.startswith(error.fix)


def test_a_callback_can_not_save_spoilt_weights(tmp_path: Path) -> None:
    """The loss of the one step is finite; what the optimizer makes of the weights is not."""
    x, y = labelled()
    task = a_task(
        data=(x * 100, y),
        batch_size=24,
        optimizer=lambda p: torch.optim.SGD(p, lr=1e38),
        callbacks=[failing_at("epoch", ValueError("no"))],
    )
    with pytest.raises(TrainingError, match="the update by SGD"):
        trained(task, tmp_path / "run", checkpoint_every="10h")
    assert newest_step(tmp_path) == 0
    assert math.isfinite(Run.open(tmp_path / "run").epochs[0]["train_loss"])


def test_a_worker_that_dies_is_told_wherever_the_program_happens_to_be(tmp_path: Path) -> None:
    """Torch raises it from a signal's handler: here while a callback runs, which did nothing wrong."""
    before = {worker.pid for worker in psutil.Process().children(recursive=True)}

    def watch(view: View) -> None:
        if view.event == "epoch":
            for worker in psutil.Process().children(recursive=True):
                if worker.pid not in before:
                    worker.kill()
            time.sleep(60)

    task = a_task(data=Loaded(), epochs=3, callbacks=[watch])
    with pytest.raises(
        DataError, match=r"^a worker process that loads the data died; expected .* workers=0 in the plan"
    ):
        trained(task, tmp_path / "run", plan=Plan(workers=1), checkpoint_every="10h")
    assert newest_step(tmp_path) == 5
