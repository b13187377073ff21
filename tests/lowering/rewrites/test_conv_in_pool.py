"""`conv_in_pool`: that the step stays the same where it applies, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, max_pool2d

from hotloop.lowering.rewrites import conv_in_pool
from tests.support.programs import a_task
from tests.support.rewritten_steps import Step, Twice, assert_refused, assert_stays_the_same, convolving

pytestmark = pytest.mark.usefixtures("one_thread")


def frozen(which: str) -> nn.Conv2d:
    layer = nn.Conv2d(2, 3, 3, padding=1)
    getattr(layer, which).requires_grad_(False)
    return layer


POOLED: dict[str, tuple[list[nn.Module], dict[str, Any]]] = {
    "plain": ([nn.Conv2d(2, 3, 3, padding=1), nn.MaxPool2d(2)], {}),
    "a margin for the last window": ([nn.Conv2d(2, 3, 2), nn.MaxPool2d(2)], {"size": 9}),
    "strided": ([nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.MaxPool2d(2)], {}),
    "other strides": ([nn.Conv2d(1, 3, 3, stride=(2, 1), padding=1), nn.MaxPool2d((2, 4))], {"channels": 1}),
    "gaps between filters": ([nn.Conv2d(1, 3, 2, stride=3), nn.MaxPool2d(3)], {"channels": 1, "size": 10}),
    "dilated": ([nn.Conv2d(2, 3, (3, 2), dilation=(2, 3), padding=(2, 1)), nn.MaxPool2d((2, 1))], {}),
    "wide filters": ([nn.Conv2d(2, 3, (1, 5), padding=(0, 2)), nn.MaxPool2d((1, 2))], {}),
    "wide windows": ([nn.Conv2d(1, 3, 3, padding=1), nn.MaxPool2d((2, 4))], {"channels": 1}),
    "large windows": ([nn.Conv2d(1, 3, 3), nn.MaxPool2d(3)], {"channels": 1}),
    "wide images": ([nn.Conv2d(2, 3, (2, 3), padding=(0, 1)), nn.MaxPool2d(2)], {"size": (5, 12)}),
    "much padding": ([nn.Conv2d(2, 3, 3, padding=(3, 2)), nn.MaxPool2d(2)], {}),
    "no bias": ([nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.MaxPool2d(2)], {}),
    "a bias that stays": ([frozen("bias"), nn.MaxPool2d(2)], {}),
    "weights that stay": ([frozen("weight"), nn.MaxPool2d(2)], {}),
    "ReLU between": ([nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)], {}),
    "ReLU in place": ([nn.Conv2d(2, 3, 3, padding=1, bias=False), nn.ReLU(inplace=True), nn.MaxPool2d(2)], {}),
    "ReLU behind": ([nn.Conv2d(2, 3, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()], {}),
}


@pytest.mark.few("wide filters-fp64")
@pytest.mark.parametrize("double", [pytest.param(False, marks=pytest.mark.more), True], ids=["fp32", "fp64"])
@pytest.mark.parametrize("name", POOLED)
def test_convolutions_and_windows_of_all_shapes(name: str, double: bool) -> None:
    layers, images = POOLED[name]
    step = Step(convolving(*layers, **images), double)
    assert_stays_the_same(step, "conv_in_pool", {"conv_in_pool": 1}, 1e-12 if double else 1e-5)
    targets = [str(node.target) for node in step.captured.graph.graph.nodes]
    assert not any("convolution" in target or "max_pool" in target for target in targets)


class Seen(nn.Module):
    def __init__(self, *layers: nn.Module, at: int) -> None:
        super().__init__()
        self.layers, self.at = nn.ModuleList(layers), at

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.zeros(())
        for number, layer in enumerate(self.layers):
            x = layer(x)
            seen = x.mean() if number == self.at else seen
        return x.flatten(1) + seen


class Placed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        pooled, places = max_pool2d(x, 2, return_indices=True)
        return pooled + 0.01 * places


class OfLearned(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.shift, self.layers = nn.Parameter(torch.zeros(8)), nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + self.shift)  # type: ignore[no-any-return]


def three() -> tuple[nn.Module, nn.Module, nn.Module]:
    return nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)


@pytest.mark.few(
    "another ReLU", "images learn", "images learn, no ReLU", "groups", "transposed", "average", "no convolution"
)
@pytest.mark.parametrize(
    "layers",
    [
        [Seen(*three(), at=0)],
        [Seen(*three(), at=1)],
        [Seen(*three()[::2], at=0)],
        [*three()[:2], Placed()],
        [three()[0], Placed()],
        [three()[0], nn.Tanh(), nn.MaxPool2d(2)],
        [three()[0], nn.LeakyReLU(), nn.MaxPool2d(2)],
        [OfLearned(*three())],
        [OfLearned(*three()[::2])],
        [nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.ReLU(), nn.MaxPool2d(2)],
        [nn.ConvTranspose2d(2, 2, 3, padding=1), nn.MaxPool2d(2)],
        [three()[0], nn.MaxPool2d(3)],  # a remainder is left out
        [three()[0], nn.MaxPool2d(2, stride=1)],
        [three()[0], nn.MaxPool2d(2, padding=1)],
        [three()[0], nn.MaxPool2d(2, dilation=2)],
        [three()[0], nn.AvgPool2d(2)],
        [nn.Conv2d(2, 3, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)],  # 200 terms
        [nn.ReLU(), nn.MaxPool2d(2)],
    ],
    ids=[
        *("convolution seen before ReLU", "ReLU seen", "convolution seen", "places seen behind ReLU", "places seen"),
        *("tanh", "another ReLU", "images learn", "images learn, no ReLU", "groups", "transposed", "remainder"),
        *("overlap", "padded windows", "windows with gaps", "average", "many terms", "no convolution"),
    ],
)
def test_what_it_is_not_for_stays_as_it_is(layers: list[nn.Module]) -> None:
    assert_refused(Step(convolving(*layers)), "conv_in_pool")


def test_a_convolution_that_learns_nothing_is_left_alone() -> None:
    layers = three()
    layers[0].requires_grad_(False)
    assert_refused(Step(convolving(*layers)), "conv_in_pool")


@pytest.mark.more
@pytest.mark.parametrize(
    ("channels", "layers", "found"),
    [
        (1, [nn.Conv2d(1, 2, 7, padding=3), nn.MaxPool2d(2)], {"pool_as_max": 1}),  # 196 terms, 49 weights
        (1, [nn.Conv2d(1, 2, 5, padding=2), nn.MaxPool2d((2, 4))], {"pool_as_max": 1}),  # 200 terms
        (1, [nn.Conv2d(1, 2, 5, padding=2), nn.MaxPool2d(2)], {"pool_as_max": 1}),  # 100 terms
        (1, [nn.Conv2d(1, 2, 3, padding=1), nn.MaxPool2d((2, 4))], {"conv_in_pool": 1}),  # 72 terms
        (3, [nn.Conv2d(3, 2, 3, padding=1), nn.MaxPool2d(2)], {"pool_as_max": 1}),  # 108 terms
    ],
    ids=["large filters", "large windows", "medium filters", "few enough", "colours"],
)
def test_of_all_what_has_many_terms_or_channels_is_left_to_the_other_rewrites(
    channels: int, layers: list[nn.Module], found: dict[str, int]
) -> None:
    assert_stays_the_same(Step(convolving(*layers, channels=channels), double=True), "all", found)


@pytest.mark.more
def test_who_names_it_has_it_of_colours_too() -> None:
    step = Step(convolving(nn.Conv2d(3, 2, 3, padding=1), nn.MaxPool2d(2), channels=3), double=True)
    assert_stays_the_same(step, "conv_in_pool", {"conv_in_pool": 1})


@pytest.mark.more
def test_one_weight_on_the_same_data_twice_with_a_pooling_of_its_own_each_time() -> None:
    class Pooled(Twice):
        def forward(self, x: Tensor) -> Tensor:
            one, other, third = (conv2d(x, self.weight, **how) for how in self.hows)
            pooled = max_pool2d(one, 2), max_pool2d(other.relu(), (1, 2)).tanh(), third.sin()
            return torch.cat([each.flatten(1) for each in pooled], 1)

    hows = dict(padding=1), dict(padding=2, dilation=2), dict(padding=1)
    assert_stays_the_same(Step(convolving(Pooled(*hows)), double=True), "conv_in_pool", {"conv_in_pool": 2})
    step = Step(convolving(Pooled(*hows, channels=1), channels=1), double=True)
    assert_stays_the_same(step, "all", {"conv_in_pool": 2})


# ---------------------------------------------------------------- to the bit


def whole(shape: tuple[int, ...], seed: int) -> Tensor:
    """Numbers -1, 0 and 1, whose sums are exact."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


def exact(score: Callable[[Tensor], Tensor], relu: bool = False) -> Step:
    """A step of a loss `score(pooled)`, all of whose numbers are whole, with many equal ones in a window."""

    def model() -> nn.Module:
        convolution = nn.Conv2d(2, 3, 3, padding=1)
        with torch.no_grad():
            convolution.weight.copy_(whole((3, 2, 3, 3), 5))
            convolution.bias.copy_(torch.tensor([0.0, -1.0, -2.0]))
        return nn.Sequential(convolution, nn.ReLU() if relu else nn.Identity(), nn.MaxPool2d(2))

    data = whole((5, 2, 8, 8), 4), torch.zeros(5)
    stay = partial(torch.optim.SGD, lr=0.0)  # until the step that is looked at
    return Step(a_task(model=model, data=data, step=lambda model, batch: score(model(batch[0])), optimizer=stay))


WEIGHTS = whole((3, 4, 4), 6) * torch.arange(1, 17).view(4, 4)


@pytest.mark.few("True")
@pytest.mark.parametrize("relu", [False, True])
def test_the_first_of_equal_numbers_gets_the_gradient(relu: bool) -> None:
    step = exact(lambda pooled: (pooled * WEIGHTS).sum(), relu=relu)
    plain = step.after(step.captured)
    assert step.rewritten("conv_in_pool") == {"conv_in_pool": 1}
    assert all(map(torch.equal, step.after(step.captured), plain))


@pytest.mark.more
@pytest.mark.parametrize("relu", [False, True])
def test_the_last_of_equal_numbers_is_told_from_the_first(relu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the test above can fail."""

    def last(values: list[Tensor]) -> tuple[Tensor, Tensor]:
        best, place = honest(values[::-1])
        return best, len(values) - 1 - place

    honest = conv_in_pool.elementwise_maximum
    monkeypatch.setattr(conv_in_pool, "elementwise_maximum", last)
    step = exact(lambda pooled: (pooled * WEIGHTS).sum(), relu=relu)
    plain = step.after(step.captured)
    step.rewritten("conv_in_pool")
    after = step.after(step.captured)
    assert torch.equal(after[0], plain[0]) and not all(map(torch.equal, after, plain))


@pytest.mark.more
@pytest.mark.parametrize("relu", [False, True])
def test_what_is_no_number_in_an_image_is_none_in_the_same_windows(relu: bool) -> None:
    step = exact(lambda pooled: (pooled.isnan() * WEIGHTS).sum() + (pooled.nan_to_num() * WEIGHTS).sum(), relu)
    images = step.flat[-2]
    images[:, 0, 2, 3] = images[:, 1, 7, 0] = torch.nan
    plain = step.after(step.captured)[0]
    assert step.rewritten("conv_in_pool") == {"conv_in_pool": 1}
    assert torch.equal(step.after(step.captured)[0], plain) and plain.isfinite()
    assert 0 < max_pool2d(conv2d(images, whole((3, 2, 3, 3), 5), padding=1), 2).isnan().float().mean() < 0.5


# ---------------------------------------------------------------- compiled
