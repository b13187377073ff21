"""What is written out in many operations is told from what torch does in one, by what really runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotloop.core.records.profile import Remedy
from hotloop.profiler.detectors import diagnose
from hotloop.profiler.session import make_observers
from tests.support.profiler.profiled_steps import watched

CLASSES = 3000
LABELS = torch.randint(CLASSES, (256,))
Loss = Callable[[Tensor], Tensor]


def by_hand(scores: Tensor) -> Tensor:
    likely = torch.exp(scores) / torch.exp(scores).sum(1, keepdim=True)
    return -(F.one_hot(LABELS, CLASSES) * torch.log(likely + 1e-9)).sum(1).mean()


def at_once(scores: Tensor) -> Tensor:
    return F.cross_entropy(scores, LABELS)


class Layers(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            *[layer for _ in range(3) for layer in (nn.Tanh(), nn.Dropout(0.1), nn.Sigmoid(), nn.Softplus())]
        )


class Convolution(nn.Module):
    """A 3x3 one, as a product with shifted copies of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Parameter(torch.randn(10, 90) * 0.1)

    def forward(self, rows: Tensor) -> Tensor:
        image = F.pad(rows.view(-1, 10, 15, 20), (1, 1, 1, 1))
        shifted = [image[:, :, i : i + 15, j : j + 20] for i in range(3) for j in range(3)]
        return (self.filters @ torch.stack(shifted, 2).flatten(1, 2).flatten(2)).flatten(1)


def named(layers: nn.Module, loss: Loss) -> list[Remedy]:
    model = nn.Sequential(nn.Linear(32, CLASSES), layers)
    optimizer, inputs = torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(len(LABELS), 32)

    def loop() -> None:
        for _ in range(40):
            optimizer.zero_grad()
            loss(model(inputs)).backward()
            optimizer.step()

    profile = diagnose(watched(loop, observers=lambda watch: make_observers(watch, None)))
    return [one for one in profile.remedies if "follow one another" in one.cause]


def test_a_loss_that_is_written_out_is_named_where_it_is() -> None:
    (found,) = named(nn.Identity(), by_hand)
    code = by_hand.__code__
    assert found.where.rpartition("/")[2].startswith("test_measured_chains.py:") and found.gain > 0.1
    assert int(found.where.rpartition(":")[2]) in range(code.co_firstlineno + 1, code.co_firstlineno + 3)


@pytest.mark.more
def test_so_is_a_convolution_by_shifted_copies() -> None:
    (found,) = named(Convolution(), at_once)
    assert "test_measured_chains.py:" in found.where and found.gain > 0.1


@pytest.mark.more
@pytest.mark.parametrize("layers", [nn.Identity, Layers])
def test_layers_and_losses_of_torchs_own_are_not(layers: type[nn.Module]) -> None:
    assert named(layers(), at_once) == []
