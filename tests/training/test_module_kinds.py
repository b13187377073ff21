"""All kinds of modules: each trains, its State goes through a file, and a stopped training goes on exactly."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import hotloop
from hotloop.core.state import differing_paths
from hotloop.errors import CheckpointError
from tests.support.programs import a_task, advance, assert_resumes, labelled, state_after
from tests.support.tasks.tokens_and_images import IMAGES, TOKENS, adam


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.letters = nn.Embedding(11, 8, padding_idx=0)
        self.cells = kind(8, 8, num_layers=2, dropout=0.3, bidirectional=True, batch_first=True)
        self.out = nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.cells(self.letters(tokens))[0].mean(1))


class Tied(nn.Module):
    """A language model in small: the last layer's matrix is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.letters.weight

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.out(self.layers(self.letters(tokens), mask=mask, is_causal=True))


def next_token(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, _ = batch
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class Waves(nn.Module):
    """Complex parameters between two Fourier transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.Parameter(torch.randn(3, 4, dtype=torch.complex64))
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(x) * self.gains.sum(0)
        return self.out(torch.fft.irfft(waves, n=6))


class Counted(nn.Module):
    """Keeps a running figure as extra state, and a buffer that its state_dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.seen = 0
        self.register_buffer("recent", torch.zeros(6), persistent=False)

    def get_extra_state(self) -> dict[str, Any]:
        return {"seen": self.seen, "square": torch.tensor(float(self.seen) ** 2)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert float(state["square"]) == state["seen"] ** 2
        self.seen = state["seen"]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
            self.recent.lerp_(x.mean(0), 0.5)
        return self.layer(x + self.recent) / (1 + self.seen)


class Odd(nn.Module):
    """Parameters of unusual shapes, formats and places."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"a/b": nn.Linear(6, 3), "c": nn.ModuleList([nn.Linear(3, 3)])})
        self.list = nn.ParameterList([nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(0, 4))])
        self.dict = nn.ParameterDict({"bias": nn.Parameter(torch.zeros(3, dtype=torch.float64))})
        self.coarse = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.fixed = nn.Parameter(torch.tensor([1, 2, 3]), requires_grad=False)
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("nothing", None)
        self.transposed = nn.Parameter(torch.randn(4, 3).t())

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers["c"][0](self.layers["a/b"](x)) * self.list[0] + self.dict["bias"] * self.coarse
        return x * self.flags + self.fixed + self.list[1].sum() + self.transposed.sum(1)


class Checkpointed(nn.Module):
    """Computes a part twice, to save memory; its dropout has to be the same both times."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU())
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(checkpoint(self.first, x, use_reentrant=False))


class Moody(nn.Module):
    """Draws from Python's and NumPy's generators in its forward pass, as some stochastic depth does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            strength = random.random() + np.random.rand() if self.training else 1.0
            x = x + strength * layer(x).tanh()
        return self.out(x)


class Graph(nn.Module):
    """Passes messages along edges; the batch is one dict."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.out = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        heard = torch.zeros_like(nodes).index_add(0, edges[1], self.message(nodes)[edges[0]])
        return self.out(nodes + heard)


class Experts(nn.Module):
    """Only one of the layers takes part in a step: the gradients of the others are None."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 3) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[int(x.sum() * 1000) % 3](x)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout2d(0.3),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.GroupNorm(2, 4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def lazy() -> nn.Module:
    return nn.Sequential(
        nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.LazyLinear(3)
    )


def parametrized() -> nn.Module:
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 8)),
        nn.ReLU(),
        parametrizations.spectral_norm(nn.Linear(8, 8)),
        parametrizations.orthogonal(nn.Linear(8, 8)),
        nn.Linear(8, 3),
    )


def graph_step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    nodes, labels = batch
    edges = torch.stack([torch.arange(len(nodes)), torch.arange(len(nodes)).roll(1)])
    return F.cross_entropy(model(nodes, edges), labels)


MODELS: dict[str, dict[str, Any]] = {
    "convolutional": dict(model=convolutional, data=IMAGES, average=0.9),
    "LSTM": dict(model=lambda: Recurrent(nn.LSTM), data=TOKENS),
    "GRU": dict(model=lambda: Recurrent(nn.GRU), data=TOKENS),
    "transformer, tied": dict(model=Tied, data=TOKENS, step=next_token, average=0.9, clip_norm=1.0),
    "lazy": dict(model=lazy, data=IMAGES, average=0.9),
    "lazy, with a step": dict(
        model=lazy, data=IMAGES, step=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
    ),
    "lazy instance": dict(model=lazy(), data=IMAGES),
    "instance": dict(model=convolutional(), data=IMAGES),
    "complex": dict(model=Waves, clip_norm=1.0, average=0.9),
    "extra state": dict(model=Counted),
    "odd": dict(model=Odd, average=0.9),
    "parametrized": dict(model=parametrized),
    "computed twice": dict(model=Checkpointed),
    "draws elsewhere": dict(model=Moody),
    "graph": dict(model=Graph, step=graph_step),
    "experts": dict(model=Experts, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)),
    "double precision": dict(
        model=lambda: nn.Linear(6, 3, dtype=torch.float64), data=(labelled()[0].double(), labelled()[1])
    ),
    "half": dict(model=lambda: nn.Linear(6, 3).bfloat16(), data=(labelled()[0].bfloat16(), labelled()[1])),
    "sparse": dict(
        model=lambda: nn.EmbeddingBag(11, 3, sparse=True),
        data=TOKENS,
        optimizer=lambda parameters: torch.optim.SparseAdam(list(parameters)),
    ),
    "sparse and dense": dict(
        model=lambda: nn.Sequential(nn.EmbeddingBag(11, 4, sparse=True), nn.Linear(4, 3)),
        data=TOKENS,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ),
    "channels last": dict(model=lambda: convolutional().to(memory_format=torch.channels_last), data=IMAGES),
    "class weights": dict(model=lambda: nn.Linear(6, 3), loss=nn.CrossEntropyLoss(torch.tensor([1.0, 2, 3]))),
}


@pytest.mark.parametrize("name", MODELS)
def test_each_kind_of_module_trains_and_resumes_exactly(name: str) -> None:
    task = a_task(**{"optimizer": adam} | MODELS[name])
    assert_resumes(task, stop=3, steps=9)


def test_a_state_holds_all_that_its_module_holds() -> None:
    state = state_after(a_task(model=Counted), 3)
    assert state.extra[""]["seen"] == 15
    assert state.buffers["recent"].abs().sum() > 0
    other = state_after(a_task(model=Counted), 2)
    changed = {path.split("/")[1] for path in differing_paths(state, other)}
    assert {"parameters", "buffers", "extra", "position"} <= changed


def test_extra_state_is_not_shared_with_the_state_it_came_from() -> None:
    class Growing(nn.Linear):
        log: dict[str, int]

        def get_extra_state(self) -> dict[str, int]:
            return self.log

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.log = state

        def forward(self, x: Tensor) -> Tensor:
            self.log[str(len(self.log))] = len(x)
            return super().forward(x)

    def growing() -> nn.Module:
        model = Growing(6, 3)
        model.log = {}
        return model

    task = a_task(model=growing)
    state = state_after(task, 2)
    before = dict(state.extra[""])
    program = hotloop.lower(task)
    program.restore(state)
    advance(program, 3)
    assert state.extra[""] == before and len(program.state().extra[""]) == len(before) + 3


def test_tied_weights_are_one_parameter() -> None:
    program = hotloop.lower(a_task(model=Tied, data=TOKENS, step=next_token, average=0.9))
    advance(program, 3)
    state = program.state()
    assert "out.weight" not in state.parameters and "out.weight" not in state.average
    assert program.model.out.weight is program.model.letters.weight
    with program.inference() as model:
        assert model.out.weight is model.letters.weight
        assert model.letters.weight.equal(state.average["letters.weight"])
    assert model.letters.weight.equal(state.parameters["letters.weight"])


def test_lazy_modules_start_from_the_seed_whatever_the_data() -> None:
    class Images(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 24

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return IMAGES[0][index] + 0 * torch.rand(()), IMAGES[1][index]

    first, second = (state_after(a_task(model=lazy, data=data), 0) for data in (IMAGES, Images()))
    assert differing_paths(first, second) == []
    assert differing_paths(first, state_after(a_task(model=lazy, data=IMAGES, seed=1), 0)) != []


def test_looking_at_a_model_before_training_changes_nothing() -> None:
    """Neither the check of its output nor the building of lazy layers counts as a step."""
    state = state_after(a_task(model=lazy, data=IMAGES), 0)
    assert state.buffers["1.running_mean"].equal(torch.zeros(4))
    assert state.buffers["1.num_batches_tracked"] == 0


@pytest.mark.parametrize(
    "other", [lambda: nn.Linear(6, 3, bias=False), lambda: nn.Sequential(nn.Linear(6, 3)), lambda: nn.Linear(6, 4)]
)
def test_a_state_of_another_model_is_refused(other: Callable[[], nn.Module]) -> None:
    with pytest.raises(CheckpointError, match="of another model"):
        hotloop.lower(a_task(model=other)).restore(state_after(a_task(), 2))
