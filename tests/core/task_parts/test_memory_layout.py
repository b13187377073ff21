"""Buffers and parameters without plain memory: trained, saved, loaded and exported, or refused before the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotloop
from hotloop.core.state import differing_paths
from hotloop.core.task_parts.models import has_overlap, share_memory
from hotloop.errors import PlanError, TaskError
from tests.support.processes.resumed_training import last_checkpoint
from tests.support.tasks.owned_generators import X, Y, after, lowered, task_of


class Scaled(nn.Module):
    """A linear layer of inputs that `scale` makes of the module's tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.set_up()

    def set_up(self) -> None:
        raise NotImplementedError

    def scale(self) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scale())


def scaled(set_up: Callable[[Any], None], scale: Callable[[Any], Tensor]) -> Callable[[], nn.Module]:
    return type("Net", (Scaled,), {"set_up": set_up, "scale": scale})


def _counts(module: Any) -> Tensor:
    if module.training:
        module.all.add_(0.1)
    return module.part


TRAINED: dict[str, Callable[[], nn.Module]] = {
    "expanded": scaled(lambda m: m.register_buffer("b", torch.ones(1, 4).expand(3, 4)), lambda m: m.b[0]),
    "expanded within": scaled(lambda m: m.register_buffer("b", torch.rand(4, 1).expand(4, 3)), lambda m: m.b[:, 0]),
    "expanded number": scaled(lambda m: m.register_buffer("b", torch.tensor(2.0).expand(4)), lambda m: m.b),
    "windows": scaled(lambda m: m.register_buffer("b", torch.arange(6.0).unfold(0, 4, 1)), lambda m: m.b[1]),
    "transposed": scaled(lambda m: m.register_buffer("b", torch.rand(4, 3).t()), lambda m: m.b[0]),
    "conjugate": scaled(
        lambda m: m.register_buffer("b", torch.ones(4, dtype=torch.complex64).conj()), lambda m: m.b.real
    ),
    "negated": scaled(
        lambda m: m.register_buffer("b", torch.ones(4, dtype=torch.complex64).conj().imag), lambda m: m.b + 1
    ),
    "empty": scaled(lambda m: m.register_buffer("b", torch.ones(0, 4)), lambda m: m.b.sum() + 1),
    "frozen": scaled(
        lambda m: m.register_parameter("b", nn.Parameter(torch.ones(1).expand(4), requires_grad=False)), lambda m: m.b
    ),
    "a view of another buffer": scaled(
        lambda m: (m.register_buffer("all", torch.ones(8)), m.register_buffer("part", m.all[:4]))[0], _counts
    ),
    "tied in part": scaled(
        lambda m: (setattr(m, "a", nn.Parameter(torch.ones(8))), setattr(m, "b", nn.Parameter(m.a.data[2:6])))[0],
        lambda m: m.b + m.a[4:],
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_it_trains_as_a_plain_loop_does(name: str) -> None:
    task = task_of(model=TRAINED[name], shuffle=False)
    model = task.build_model()
    optimizer = torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=0.05)
    for step in range(3):
        rows = slice(7 * step, 7 * step + 7)
        optimizer.zero_grad()
        nn.MSELoss()(model(X[rows]), Y[rows]).backward()
        optimizer.step()
    found = after(task, 3)
    assert all(torch.equal(value, found.parameters[key]) for key, value in model.named_parameters())
    assert all(torch.equal(value, found.buffers[key]) for key, value in model.named_buffers())


@pytest.mark.few("windows", "tied in part")
@pytest.mark.parametrize("name", TRAINED)
def test_it_resumes_and_predicts(tmp_path: Path, name: str) -> None:
    def fitted(epochs: int, run: str, **options: Any) -> hotloop.Run:
        task = task_of(model=TRAINED[name], validation=(X, Y), epochs=epochs)
        return hotloop.fit(task, run=tmp_path / run, progress=False, **options)

    whole = fitted(4, "whole", plan="baseline")
    fitted(2, "parts", plan="baseline")
    parts = fitted(4, "parts", resume=True)
    assert differing_paths(last_checkpoint(whole).state, last_checkpoint(parts).state) == []
    task = task_of(model=TRAINED[name])
    output = hotloop.load_model(whole, task=task)(X).detach().numpy()
    assert (hotloop.predict(parts, X.numpy(), task=task) == output).all()


@pytest.mark.few("windows", "tied in part")
@pytest.mark.parametrize("name", ["expanded", "windows", "a view of another buffer", "tied in part"])
def test_it_is_exported(tmp_path: Path, name: str) -> None:
    task = task_of(model=TRAINED[name], epochs=1)
    run = hotloop.fit(task, run=tmp_path / "run", plan="baseline", progress=False)
    path = tmp_path / "model.pt2"
    hotloop.export(run, path, task=task)
    exported = torch.export.load(path).module()
    assert torch.allclose(exported(X[:1]), torch.as_tensor(hotloop.predict(run, X[:1].numpy(), task=task)))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "sparse": (
        scaled(lambda m: m.register_buffer("b", torch.eye(4).to_sparse()), lambda m: m.b.to_dense()[0]),
        r"the buffer 'b' of the model is sparse \(torch.sparse_coo\)",
    ),
    "sparse rows": (
        scaled(lambda m: m.register_buffer("b", torch.eye(4).to_sparse_csr()), lambda m: m.b.to_dense()[0]),
        r"the buffer 'b' of the model is sparse \(torch.sparse_csr\)",
    ),
    "sparse parameter": (
        scaled(
            lambda m: m.register_parameter("b", nn.Parameter(torch.eye(4).to_sparse())), lambda m: m.b.to_dense()[0]
        ),
        "the parameter 'b' of the model is sparse",
    ),
    "quantized": (
        scaled(
            lambda m: m.register_buffer("b", torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)),
            lambda m: m.b.dequantize(),
        ),
        "the buffer 'b' of the model is quantized",
    ),
    "expanded parameter": (
        scaled(lambda m: m.register_parameter("b", nn.Parameter(torch.ones(1).expand(4))), lambda m: m.b),
        r"elements of the parameter 'b' of the model share memory: its shape is \(4,\)",
    ),
    "overlapping parameter": (
        scaled(lambda m: m.register_parameter("b", nn.Parameter(torch.ones(6).unfold(0, 4, 1))), lambda m: m.b[0]),
        "elements of the parameter 'b' of the model share memory",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_before_the_first_step(name: str) -> None:
    model, says = REFUSED[name]
    with pytest.raises(TaskError, match=says) as caught:
        lowered(task_of(model=model))
    assert "\n" not in str(caught.value)


def test_a_loss_is_looked_at_too() -> None:
    class Loss(nn.MSELoss):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weights", torch.eye(2).to_sparse())

    with pytest.raises(TaskError, match="the buffer 'weights' of the loss is sparse"):
        lowered(task_of(loss=Loss()))


@pytest.mark.parametrize("name", ["a view of another buffer", "tied in part"])
def test_a_compiled_step_refuses_to_write_to_memory_of_two_names(name: str) -> None:
    with pytest.raises(PlanError, match=r"of the model, which shares memory with '.*'"):
        lowered(task_of(model=TRAINED[name]), compile="step")


def test_sparse_gradients_with_their_optimizer() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.layer = nn.Embedding(20, 4, sparse=True), nn.Linear(4, 1)
            self.layer.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.words(x).mean(1))

    indices = torch.randint(0, 20, (24, 3), generator=torch.Generator().manual_seed(0))

    def task() -> hotloop.Task:
        return task_of(
            model=Words, data=(indices, Y), optimizer=lambda p: torch.optim.SparseAdam(p, lr=0.1), shuffle=False
        )

    model = task().build_model()
    optimizer = torch.optim.SparseAdam(list(model.words.parameters()), lr=0.1)  # type: ignore[union-attr, operator]
    for step in range(3):
        rows = slice(7 * step, 7 * step + 7)
        optimizer.zero_grad()
        nn.MSELoss()(model(indices[rows]), Y[rows]).backward()
        optimizer.step()
    found = after(task(), 3)
    assert torch.equal(model.words.weight, found.parameters["words.weight"])  # type: ignore[union-attr, arg-type]
    assert differing_paths(after(task(), 6), after(task(), 3, found)) == []


def test_which_memory_is_shared() -> None:
    base = torch.arange(12.0)
    grid = base.view(3, 4)
    assert not any(map(has_overlap, (base, grid, grid.t(), grid[:, :2], base[::2], torch.ones(()), torch.ones(0, 3))))
    assert all(map(has_overlap, (torch.ones(1).expand(2), base.unfold(0, 3, 1), grid[:1].expand(2, 4))))
    assert not share_memory(grid[:, :2], grid[:, 2:]) and not share_memory(base[:4], base[4:])
    assert share_memory(grid[:, :2], grid[:, 1:]) and share_memory(base[:5], base[4:])
    assert not share_memory(base, base.clone())
