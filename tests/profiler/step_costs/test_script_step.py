"""The step of a script costs what the same step of a Task costs."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from hotloop import Task
from hotloop.advisor.chips import find_chip
from hotloop.advisor.estimate import estimate
from hotloop.core.records.step_costs import StepCosts
from hotloop.plan import Plan
from hotloop.profiler.step_costs.script_step import ScriptStep, loop_lengths
from hotloop.profiler.step_costs.trace import trace_step


class Last(nn.Module):
    """A recurrent layer, and a linear one on its last output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(x)[0][:, -1])


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.body(x))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.qkv, self.out = (
            nn.Embedding(50, 16),
            nn.LayerNorm(16),
            nn.Linear(16, 48),
            nn.Linear(16, 50),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norm(hidden)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(hidden + mixed.transpose(1, 2).flatten(-2))[:, -1]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(144, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 5))


def cnn() -> nn.Module:
    first = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2)]
    return nn.Sequential(
        *first, nn.Conv2d(8, 16, 3), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)
    )


def depthwise() -> nn.Module:
    layers = [nn.Conv2d(1, 8, 1), nn.Conv2d(8, 8, 3, groups=8, stride=2), nn.GroupNorm(2, 8), nn.SiLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(200, 5))


def transposed() -> nn.Module:
    layers = [nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ConvTranspose2d(4, 2, 4, stride=2, padding=1), nn.Tanh()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(288, 5))


def sequence_convolution() -> nn.Module:
    layers = [nn.Flatten(1, 2), nn.Conv1d(12, 8, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(48, 5))


def residual() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 8, 3), *(Residual(8) for _ in range(3)), nn.Flatten(), nn.Linear(800, 5))


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(12, 2, 24, batch_first=True)
    return nn.Sequential(nn.Flatten(1, 2), nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(144, 5))


def lstm() -> nn.Module:
    return nn.Sequential(nn.Flatten(1, 2), Last(nn.LSTM(12, 16, batch_first=True)))


def gru() -> nn.Module:
    return nn.Sequential(nn.Flatten(1, 2), Last(nn.GRU(12, 16, num_layers=2, batch_first=True)))


IMAGES, TOKENS, Y = torch.randn(32, 1, 12, 12), torch.randint(0, 50, (32, 12)), torch.randint(0, 5, (32,))
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "depthwise": depthwise,
    "transposed": transposed,
    "sequence convolution": sequence_convolution,
    "residual": residual,
    "transformer": transformer,
    "lstm": lstm,
    "gru": gru,
    "language": Language,
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


@pytest.fixture
def recorded() -> Iterator[Callable[[Callable[[], None]], dict[str, Any]]]:
    """Runs a loop as a script does, and returns what was published last."""
    published: list[dict[str, Any]] = []
    step = ScriptStep(10**9, published.append)

    def run(loop: Callable[[], None]) -> dict[str, Any]:
        step.install()
        loop()
        step.close()
        return published[-1]

    yield run
    step.remove()


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_costs_the_same_as_script_and_as_task(name: str, recorded: Any) -> None:
    x, make = TOKENS if name == "language" else IMAGES, NETWORKS[name]
    optimizer = sgd if name in ("gru", "residual") else torch.optim.Adam
    test = DataLoader(TensorDataset(x, Y), batch_size=32)

    def script() -> None:
        net = make()
        own, loader = optimizer(net.parameters()), DataLoader(TensorDataset(x, Y), batch_size=8, shuffle=True)
        for _ in range(3):
            for inputs, target in loader:
                own.zero_grad()
                F.cross_entropy(net.train()(inputs), target).backward()
                own.step()
            with torch.no_grad():
                for inputs, _target in test:
                    net.eval()(inputs)

    found = recorded(script)
    costs = StepCosts.from_dict(found["costs"])
    task = Task(model=make, loss=nn.CrossEntropyLoss(), optimizer=optimizer, data=(x, Y), batch_size=8)
    expected = trace_step(task, device="cuda")
    assert (costs.batch_size, costs.parameters, costs.flops) == (8, expected.parameters, expected.flops)
    for chip in ("RTX 4090", "H100"):
        one, other = (estimate(each, find_chip(chip), "fp32", Plan()) for each in (costs, expected))
        assert one.step_ms == pytest.approx(other.step_ms, rel=0.02)
        assert one.memory_bytes == pytest.approx(other.memory_bytes, rel=0.02)
    assert found["loops"][-2:] == [3, 4] and found["steps_of_epoch"] == 4


def test_an_evaluation_in_the_recorded_step_is_no_part_of_it(recorded: Any) -> None:
    """Each second step has an evaluation with other batches before it."""

    def script() -> None:
        net = mlp()
        own, test = sgd(net.parameters()), DataLoader(TensorDataset(IMAGES, Y), batch_size=32)
        loader = DataLoader(TensorDataset(IMAGES[:16], Y[:16]), batch_size=8)
        for _ in range(4):
            for number, (inputs, target) in enumerate(loader):
                if number:
                    with torch.no_grad():
                        for other, _target in test:
                            net(other)
                own.zero_grad()
                F.cross_entropy(net(inputs), target).backward()
                own.step()

    found = recorded(script)
    costs = StepCosts.from_dict(found["costs"])
    task = Task(model=mlp, loss=nn.CrossEntropyLoss(), optimizer=sgd, data=(IMAGES, Y), batch_size=8)
    assert costs.batch_size == 8 and found["batches"] == 2
    assert costs.flops == trace_step(task, device="cuda").flops


def test_an_accumulated_step_has_the_rows_of_all_its_batches(recorded: Any) -> None:
    def script() -> None:
        net = mlp()
        own, loader = sgd(net.parameters()), DataLoader(TensorDataset(IMAGES, Y), batch_size=4)
        for _ in range(2):
            for number, (inputs, target) in enumerate(loader):
                F.cross_entropy(net(inputs), target).backward()
                if number % 4 == 3:
                    own.step()
                    own.zero_grad()

    found = recorded(script)
    assert StepCosts.from_dict(found["costs"]).batch_size == 16 and found["steps_of_epoch"] == 2


def test_two_optimizers_make_one_step(recorded: Any) -> None:
    def script() -> None:
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        one, other = sgd(first.parameters()), torch.optim.Adam(second.parameters())
        for _ in range(4):
            first(torch.randn(8, 4)).sum().backward()
            one.step()
            second(torch.randn(8, 4)).sum().backward()
            other.step()

    costs = StepCosts.from_dict(recorded(script)["costs"])
    assert costs.parameters == 40 and costs.module_calls == 2


def test_the_script_s_own_settings_are_as_before(recorded: Any) -> None:
    net = nn.Linear(4, 4)
    own = torch.optim.Adam(net.parameters())

    def script() -> None:
        for _ in range(4):
            net(torch.randn(8, 4)).sum().backward()
            own.step()

    recorded(script)
    assert own.param_groups[0]["foreach"] is None
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_a_compiled_network_costs_what_its_operators_do_and_warns_of_nothing(
    recorded: Any, recwarn: pytest.WarningsRecorder
) -> None:
    net = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 5))
    compiled, own = torch.compile(net, backend="eager"), sgd(net.parameters())

    def script() -> None:
        for _ in range(4):
            own.zero_grad()
            F.cross_entropy(compiled(torch.randn(8, 16)), Y[:8]).backward()
            own.step()

    costs = StepCosts.from_dict(recorded(script)["costs"])
    assert costs.flops > 2 * 8 * (16 * 8 + 8 * 5) * 2 and costs.batch_size == 8
    assert not [one for one in recwarn if "torch.compile" in str(one.message)]


def lengths(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, **names: Any) -> list[int | None]:
    """Runs a script that calls `here()` once in its loops."""
    path = tmp_path / "script.py"
    path.write_text(text)
    found: list[list[int | None]] = []

    class Stop(Exception):
        pass

    def here() -> None:
        frame: FrameType | None = sys._getframe(1)
        found.append(loop_lengths(frame, lambda file: file != str(path)))
        raise Stop

    with pytest.raises(Stop):
        exec(compile(text, str(path), "exec"), {"here": here, **names})
    return found[0]


EPOCHS = Namespace(epochs=5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("for epoch in range(5):\n for batch in loader:\n  here()", [5, 3]),
        ("for epoch in range(1, args.epochs + 1):\n for n, batch in enumerate(loader):\n  here()", [5, 3]),
        ("def train(data):\n for b in tqdm(data):\n  here()\nfor e in range(args.epochs):\n train(loader)", [5, 3]),
        ("for e in range(2):\n for i in range(0, len(loader) * 4, 2):\n  if i:\n   here()", [2, 6]),
        ("while True:\n for b in loader:\n  here()", [None, 3]),
        ("for e in epochs_of(args):\n for b in loader:\n  here()", [None, 3]),
        ("for e in range(3):\n pass\nfor a, b in zip(loader, range(2)):\n here()", [2]),
        ("for e in range(3):\n def f():\n  here()\n f()", [3]),
        ("for e in range(3):\n pass\nelse:\n here()", []),
        ("for e in [1, 2]:\n here()", [2]),
    ],
)
def test_loops_around_a_line(text: str, expected: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    names = {"loader": [7, 8, 9], "args": EPOCHS, "tqdm": iter, "epochs_of": lambda args: [1]}
    assert lengths(text, monkeypatch, tmp_path, **names) == expected
