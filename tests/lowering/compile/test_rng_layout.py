"""A compiled step draws the numbers of the eager one, wherever a compiler lays what they are drawn for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import hotloop
from hotloop.lowering.compile import inductor_patches
from hotloop.lowering.compile.inductor_patches import fix_graph_for_inductor
from hotloop.lowering.transforms.layout import LogicalOrderDraws
from hotloop.plan import Plan
from tests.support.programs import seeing


def last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last)


SQUARE, IMAGES = torch.rand(5, 5), last(torch.rand(2, 3, 4, 4))
EVEN = last(torch.rand(4, 4, 4, 4))
CASES: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
    "into a transposed": (lambda p: torch.empty(5, 5).T.bernoulli_(p), (SQUARE,)),
    "into images": (lambda x, p: torch.empty_like(x).bernoulli_(p), (IMAGES, torch.rand(2, 3, 4, 4))),
    "into images, alike": (lambda x, p: torch.empty_like(x).bernoulli_(p), (IMAGES, IMAGES)),
    "by channels": (lambda x, p: torch.empty_like(x).bernoulli_(p), (EVEN, torch.rand(4, 1, 1))),
    "by one chance": (lambda x, p: torch.empty_like(x).bernoulli_(p), (IMAGES, torch.tensor(0.3))),
    "by a number": (lambda x: torch.empty_like(x).bernoulli_(0.3), (IMAGES,)),
    "from chances": (torch.bernoulli, (IMAGES,)),
    "mean and deviation": (lambda a: torch.normal(a.T, a.T), (SQUARE,)),
    "mean": (lambda a: torch.normal(a, 1.0), (IMAGES,)),
    "deviation": (lambda a: torch.normal(0.0, a), (IMAGES,)),
    "broadcast": (torch.normal, (EVEN, torch.rand(4, 1, 1))),
    "whole numbers": (lambda a: torch.randint_like(a.T, 9), (SQUARE,)),
}


def drawn(case: str) -> tuple[Tensor, Tensor]:
    """By the mended graph, and eagerly."""
    function, given = CASES[case]
    graph = make_fx(function, tracing_mode="fake")(*given)
    fix_graph_for_inductor(graph)
    torch.manual_seed(0)
    found = graph(*given)
    torch.manual_seed(0)
    return found, function(*given)


@pytest.mark.parametrize("case", CASES)
def test_a_mended_graph_draws_the_same(case: str) -> None:
    found, expected = drawn(case)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("case", ["into a transposed", "by channels"])
def test_chances_that_stay_as_they_are_are_seen(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    turned = inductor_patches._permute_operand

    def careless(graph: Any, node: Any, value: Tensor, order: list[int]) -> Any:
        return turned(graph, node, value, order) if "empty" in node.name or node.name.startswith("t") else node

    monkeypatch.setattr(inductor_patches, "_permute_operand", careless)
    found, expected = drawn(case)
    assert not torch.equal(found, expected)


LAID: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout of ATen": lambda x: torch.dropout(x, 0.3, True),
    "alpha dropout": lambda x: nn.AlphaDropout(0.3)(x),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "like, by name": lambda x: torch.rand_like(input=x),
    "whole numbers": lambda x: torch.randint_like(x, 9),
    "chances": lambda x: torch.bernoulli(x),
    "into": lambda x: torch.empty_like(x).bernoulli_(x),
    "into, a number": lambda x: x.clone().exponential_(),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=1),
    "poisson": lambda x: torch.poisson(x),
    "sampled": lambda x: torch.distributions.Normal(x, 1.0).rsample(),
    "gamma": lambda x: torch.distributions.Gamma(x + 0.1, 1.0).rsample(),
}


IN_ORDER = {"rrelu", "chances", "gumbel", "poisson", "sampled", "gamma"}
"""Which torch draws so by itself."""


@pytest.mark.parametrize("case", LAID)
def test_images_with_channels_last_draw_what_they_draw_in_order(case: str) -> None:
    images = torch.rand(2, 3, 4, 5)
    torch.manual_seed(0)
    expected = LAID[case](images)
    torch.manual_seed(0)
    with LogicalOrderDraws():
        found = LAID[case](last(images))
    torch.testing.assert_close(found, expected)
    torch.manual_seed(0)
    otherwise = LAID[case](last(images))
    assert torch.allclose(otherwise, expected) == (case in IN_ORDER)


class Noisy(nn.Module):
    """What convolutions give, which a compiler lays with channels last, with noise of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(1, 6, 3), nn.Conv2d(6, 6, 3), nn.Conv2d(6, 6, 3), nn.Conv2d(6, 4, 3)])

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth = self.convs
        x = first(x)
        x = second(x + 0.3 * torch.randn_like(x))
        x = third(x * torch.rand_like(x))
        x = fourth(x + 0.1 * torch.poisson(x.detach().abs()))
        return x.mean((2, 3))  # type: ignore[no-any-return]


def weights(plan: Plan) -> Tensor:
    program = hotloop.lower(seeing(Noisy), plan)
    program.advance(3)
    found = [value.detach().clone().flatten() for value in program.state().parameters.values()]
    program.close()
    return torch.cat(found)


@contextmanager
def as_it_likes() -> Iterator[None]:
    """In place of `keep_rng_layout`."""
    yield


@pytest.mark.more
@pytest.mark.slow
@pytest.mark.usefixtures("nothing_compiled", "one_thread")
@pytest.mark.parametrize("mends", [True, pytest.param(False, marks=pytest.mark.more)])
def test_noise_on_what_convolutions_give_is_that_of_the_eager_step(
    mends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not mends:
        monkeypatch.setattr(inductor_patches, "keep_rng_layout", as_it_likes)
    found, expected = weights(Plan(compile="package")), weights(Plan())
    assert (float((found - expected).abs().max()) < 1e-4) == mends
