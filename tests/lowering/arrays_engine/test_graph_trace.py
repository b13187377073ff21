"""Models with a forward of their own under `engine=arrays`: exact in float64 against autograd, or refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotloop
from hotloop.arrays.graph import Graph
from hotloop.errors import PlanError, TaskError
from hotloop.lowering.arrays_engine import arrays_step
from hotloop.lowering.arrays_engine.graph_trace import trace_layers
from hotloop.plan import BASELINE, Plan
from tests.support.array_layer_checks import TOLERANCE
from tests.support.programs import a_task, advance

ARRAYS = Plan(engine="arrays")
CLASSES, BATCH = 3, 5


class Block(nn.Module):
    """As in He et al. 2016, with one ReLU for both places."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        short = [nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)]
        self.shortcut = nn.Sequential(*short) if stride != 1 or before != after else None

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.shortcut is not None:
            identity = self.shortcut(x)
        out += identity
        return self.relu(out)  # type: ignore[no-any-return]


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.blocks = nn.Sequential(Block(4, 4, 1), Block(4, 6, 2))
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(F.silu(self.stem(x))).mean((-2, -1)))  # type: ignore[no-any-return]


class Tutorial(nn.Module):
    """One pool for both places, functions in between, and the size of the batch written out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 5, 2)
        self.pool = nn.MaxPool2d(2, 1)
        self.fc1, self.fc2 = nn.Linear(5 * 3 * 3, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = F.max_pool2d(self.pool(torch.relu(self.conv2(x))), kernel_size=1)
        x = x.view(x.size(0), -1)
        return self.fc2(F.dropout(self.fc1(x).tanh(), 0.3, training=self.training))  # type: ignore[no-any-return]


class Functions(nn.Module):
    """One of each function and method that there is a layer for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 1, 3, padding=1)
        self.fc, self.one = nn.Linear(6, CLASSES), nn.Linear(1, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.sigmoid(F.leaky_relu(x, 0.2)) + F.elu(x, alpha=0.5)
        x = F.gelu(x).add(F.softplus(torch.tanh(x))) + F.softmax(x, dim=-1)
        x = x.softmax(dim=2) + torch.softmax(x, 3).contiguous().sigmoid()
        n, c, h, w = x.shape
        wide = F.avg_pool2d(x, 3, padding=1, stride=1).reshape(n, c * h * w)
        whole = F.adaptive_avg_pool2d(x, (1, 1)).flatten(1).view(-1, 1)
        x = wide.view(-1, 36).reshape(x.shape[0], 6, 6) + x.mean(dim=1)
        x = F.relu(x[:, -1] + x[:, 2, :]) + torch.mean(x, 1)
        return self.fc(x) + self.one(whole)  # type: ignore[no-any-return]


class Rows(nn.Module):
    """The rows of an image as a sequence."""

    def __init__(self, kind: type[nn.RNNBase], how: str) -> None:
        super().__init__()
        self.recurrent, self.how = kind(6, 5, batch_first=True), how
        self.fc = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(x.shape[0], 6, 6)
        if self.how == "mean":
            return self.fc(self.recurrent(x)[0].mean(1))  # type: ignore[no-any-return]
        if self.how == "output":
            out, _ = self.recurrent(x)
            return self.fc(out[:, -1, :])  # type: ignore[no-any-return]
        _, state = self.recurrent(x)
        last = (state[0] if isinstance(self.recurrent, nn.LSTM) else state)[-1]
        return self.fc(last)  # type: ignore[no-any-return]


class Words(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.words, self.lstm = nn.Embedding(9, 4), nn.LSTM(4, 4, batch_first=True)
        self.fc = nn.Linear(12 if how == "flatten" else 4, CLASSES)
        if how != "lstm":
            del self.lstm

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        if self.how == "lstm":
            return self.fc(self.lstm(x)[0][:, -1])  # type: ignore[no-any-return]
        return self.fc(x.flatten(1) if self.how == "flatten" else x.mean(dim=1))  # type: ignore[no-any-return]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.again = nn.Embedding(9, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x).mean(1)
        return self.head(torch.tanh(self.again(torch.tanh(self.again(x)))))  # type: ignore[no-any-return]


class Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = nn.Linear(36, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.out = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.one(torch.flatten(x, start_dim=1)))
        y = torch.add(self.two(x), self.norm(x)) + x
        return self.out(y) + self.out(x)  # type: ignore[no-any-return]


def images() -> tuple[Tensor, Tensor]:
    x = torch.randn(24, 1, 6, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x, torch.arange(24) % CLASSES


def word_data() -> tuple[Tensor, Tensor]:
    x = torch.randint(0, 9, (24, 3), generator=torch.Generator().manual_seed(1))
    return x, x[:, 0] % CLASSES


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "residual, normalised": (Residual, images),
    "a tutorial's": (Tutorial, images),
    "functions": (Functions, images),
    "forked": (Forked, images),
    "rows, LSTM": (lambda: Rows(nn.LSTM, "output"), images),
    "rows, LSTM's state": (lambda: Rows(nn.LSTM, "state"), images),
    "rows, RNN": (lambda: Rows(nn.RNN, "mean"), images),
    "rows, RNN's state": (lambda: Rows(nn.RNN, "state"), images),
    "words, mean": (lambda: Words("mean"), word_data),
    "words, flattened": (lambda: Words("flatten"), word_data),
    "words, LSTM": (lambda: Words("lstm"), word_data),
    "tied": (Tied, word_data),
}


def task_of(name: str) -> hotloop.Task:
    model, data = MODELS[name]
    return a_task(model=lambda: model().double(), data=data(), optimizer=lambda p: torch.optim.SGD(p, 0.1, 0.9))


def gradients_and_weights(name: str, plan: Plan) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients of the first step; parameters and buffers after three epochs, each with an incomplete batch."""
    program = hotloop.lower(task_of(name), plan)
    advance(program, 1)
    gradients = {key: value.grad.clone() for key, value in program.model.named_parameters() if value.grad is not None}
    advance(program, 14)
    return gradients, {key: value.clone() for key, value in program.model.state_dict().items()}


def disagreements(name: str) -> list[str]:
    found, expected = (gradients_and_weights(name, plan) for plan in (ARRAYS, BASELINE))
    return [
        f"{what} of {key}"
        for what, ours, theirs in zip(("gradient", "value"), found, expected, strict=True)
        for key in sorted(ours.keys() | theirs.keys())
        if key not in ours or not torch.allclose(ours[key], theirs[key], rtol=TOLERANCE, atol=TOLERANCE)
    ]


@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_training_are_those_of_autograd(name: str) -> None:
    assert disagreements(name) == []


@pytest.mark.parametrize("name", ["rows, LSTM", "rows, RNN"])
def test_the_gradient_of_both_biases_of_a_recurrent_layer_is_clipped_once_for_each(name: str) -> None:
    task = replace(task_of(name), clip_norm=0.01)
    programs = [hotloop.lower(task, plan) for plan in (ARRAYS, BASELINE)]
    for program in programs:
        advance(program, 15)
    found, expected = (program.state().parameters for program in programs)
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def overwriting(self: Graph, dy: Any) -> Any:
    """Backward without the sum over those that got a value."""
    coming = {next(reversed(self.nodes)): dy}
    for name, (layer, given) in reversed(self.nodes.items()):
        dx = layer.backward(coming.pop(name))
        coming.update(dict.fromkeys(given, dx))
    return coming["x"]


def test_gradients_that_are_not_added_up_at_a_fork_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Graph, "backward", overwriting)
    for name in ("residual, normalised", "forked"):
        assert disagreements(name) != []
    assert disagreements("a tutorial's") == []  # where nothing forks


def test_gradients_that_are_not_added_up_over_uses_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays_step, "reduce", lambda add, values: values[-1])
    assert {"gradient of words.weight", "gradient of again.weight"} <= set(disagreements("tied"))
    assert "gradient of out.bias" in disagreements("forked")


# --- what can't be written out


def forward(function: Callable[[Any, Tensor], Any], **modules: nn.Module) -> Callable[[], nn.Module]:
    """A model of some modules whose forward is this."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(36, CLASSES)
            for name, module in modules.items():
                setattr(self, name, module)

        def forward(self, x: Tensor) -> Any:
            return self.fc(function(self, x.flatten(1)))

    return Own


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(36))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def branching(self: Any, x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def in_place(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    return F.relu(y, inplace=True) + y


def in_place_through_a_view(self: Any, x: Tensor) -> Tensor:
    y = self.linear(x)
    return self.relu(y.view(y.size(0), -1)) + y


def a_linear(**more: nn.Module) -> dict[str, nn.Module]:
    return {"linear": nn.Linear(36, 36), **more}


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "an unknown function": (
        forward(lambda self, x: torch.cumsum(x, 1)), ("the function cumsum in the model, an Own at ", "test_graph_trace.py:"),
    ),
    "an unknown method": (forward(lambda self, x: x.clamp(0)), ("the method clamp in the model, an Own at ",)),
    "within a module": (
        lambda: nn.Sequential(nn.Flatten(), nn.Sequential(Scaled()), nn.Linear(36, CLASSES)),
        ("'1.0.scale', which '1.0' (Scaled) uses",),
    ),
    "an unknown module": (forward(lambda self, x: self.odd(x), odd=nn.PReLU()), ("'odd' (PReLU)", "known: ", "Linear")),
    "a setting of a function": (forward(lambda self, x: F.gelu(x, approximate="tanh")), ("gelu", "approximate='tanh'")),
    "an argument of a function": (forward(lambda self, x: F.relu(x, 3, 4)), ("relu",)),
    "a number in a sum": (forward(lambda self, x: x + 1), ("the function add in", "anything but two tensors")),
    "a scaled sum": (forward(lambda self, x: torch.add(x, x, alpha=2)), ("the function add in",)),
    "a product": (forward(lambda self, x: x * x), ("the function mul in",)),
    "a branch": (forward(branching), ("whose forward can't be traced at ", "test_graph_trace.py:", "control flow")),
    "its own chances": (
        forward(lambda self, x: x.tanh() if random.random() < 0.5 else x), ("the model, an Own", "draws random numbers"),
    ),
    "torch's chances": (forward(lambda self, x: x + x if torch.rand(1) < 2 else x), ("draws random numbers",)),
    "in place": (forward(in_place, **a_linear()), ("relu at ", "in place what is used elsewhere too", "inplace=False")),
    "in place, a view": (
        forward(in_place_through_a_view, **a_linear(relu=nn.ReLU(inplace=True))), ("'relu'", "in place"),
    ),
    "samples mixed": (forward(lambda self, x: x.view(36, -1)), ("the method view in", "may mix the samples")),
    "samples not kept": (forward(lambda self, x: x.reshape(-1, x.size(0))), ("reshape in", "may mix")),
    "another index": (forward(lambda self, x: x[:, 1:]), ("getitem in", "isn't [:, a number]")),
    "a mean over all": (forward(lambda self, x: x.mean()), ("mean in", "dim=None")),
    "a mean over the samples": (forward(lambda self, x: x.mean((0, 1))), ("mean in", "dim=(0, 1)")),
    "a layer for nothing": (forward(lambda self, x: [self.linear(x), x][1], **a_linear()), ("'linear', whose result nothing",)),
    "two layers of an LSTM": (lambda: Stacked(num_layers=2), ("'lstm' (LSTM) with num_layers=2",)),
    "both directions": (lambda: Stacked(bidirectional=True), ("'lstm' (LSTM) with bidirectional=True",)),
    "samples second": (lambda: Stacked(batch_first=False), ("'lstm' (LSTM) with batch_first=False",)),
    "the memory of an LSTM": (lambda: Stacked("memory"), ("getitem in", "of what a recurrent module gives")),
    "all of an LSTM": (lambda: Stacked("all"), ("what 'fc' (Linear) gets, which is no tensor by itself",)),
    "a state for an LSTM": (lambda: Stacked("begun"), ("'lstm' (LSTM)",)),
    "another cell": (lambda: Stacked(kind=nn.GRU), ("'lstm' (GRU)", "LSTM")),
    "two results": (lambda: Several(), ("the model's result, which is no tensor",)),
    "always evaluating": (lambda: Still(), ("'norm' (BatchNorm1d) with training=False",)),
}  # fmt: skip


class Stacked(nn.Module):
    def __init__(self, how: str = "last", kind: Any = nn.LSTM, **settings: Any) -> None:
        super().__init__()
        self.lstm = kind(6, 4, **({"batch_first": True} | settings))
        self.how, self.fc = how, nn.Linear(8 if settings.get("bidirectional") else 4, CLASSES)

    def forward(self, x: Tensor) -> Any:
        x = x.reshape(-1, 6, 6)
        if self.how == "begun":
            return self.fc(self.lstm(x, None)[0][:, -1])
        given = self.lstm(x)
        if self.how == "all":
            return self.fc(given)
        return self.fc(given[1][1][-1] if self.how == "memory" else given[0][:, -1])


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.fc(x), x


class Still(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(36, CLASSES), nn.BatchNorm1d(CLASSES)

    def train(self, mode: bool = True) -> Still:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x.flatten(1)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_out_is_named(name: str) -> None:
    model, says = REFUSED[name]
    with pytest.raises(PlanError) as error:
        trace_layers(model())
    line = str(error.value)
    assert "\n" not in line and "engine=eager" in line
    assert [words for words in says if words not in line] == [], line


def test_a_model_keeps_the_modes_of_its_modules() -> None:
    model = Tutorial()
    model.fc1.eval()
    trace_layers(model)
    assert model.training and not model.fc1.training


def test_a_shape_that_does_not_fit_names_the_module() -> None:
    x, y = images()
    task = a_task(model=lambda: Wrong().double(), data=Unseen(x, y))
    with pytest.raises(TaskError, match=r"layer add, Identity, gets samples of shape \(1, 6, 6\).*to add up"):
        advance(hotloop.lower(task, ARRAYS), 1)


class Unseen(torch.utils.data.TensorDataset):
    """Samples that nobody has looked at before they come."""


class Wrong(nn.Module):
    """torch would stretch what is added."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 2, 3, padding=1), nn.Linear(72, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc((x + self.conv(x)).flatten(1))  # type: ignore[no-any-return]
