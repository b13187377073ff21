"""Random numbers that belong to the samples, and the augmentations made of them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cache

import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.nn.functional import pad

from hotloop.core.random.rng import seed_for
from hotloop.data.augment import Draws, compose, random_crop, random_erase, random_flip
from hotloop.errors import DataError

# All draws follow from fixed seeds, so a p-value is the same in every run. A sound generator gets below this
# once in a thousand tests, a flawed one far below in most.
LEAST_P = 1e-3

METHODS: dict[str, Callable[[Draws], Tensor]] = {
    "uniform": lambda draws: draws.uniform(3),
    "normal": lambda draws: draws.normal(2, 2),
    "integers": lambda draws: draws.integers(-5, 6, 3),
    "bernoulli": lambda draws: draws.bernoulli(0.3, 3),
    "second call": lambda draws: (draws.uniform(), draws.normal(5))[1],
}


@cache
def numbers(along: str, count: int) -> Tensor:
    """`count` uniform numbers that differ in one thing alone."""
    if along == "sample":
        return Draws(3, 1, torch.arange(count)).uniform()
    if along == "element":
        return Draws(3, 1, torch.tensor([17])).uniform(count)[0]
    if along == "call":
        draws = Draws(3, 1, torch.tensor([17]))
        return torch.cat([draws.uniform() for _ in range(count)])
    if along == "epoch":
        return torch.cat([Draws(3, epoch, torch.tensor([17])).uniform() for epoch in range(count)])
    return torch.cat([Draws(seed, 1, torch.tensor([17])).uniform() for seed in range(count)])


AXES = ("sample", "element", "call", "epoch", "seed")


@pytest.mark.few("epoch")
@pytest.mark.parametrize("along", AXES)
def test_uniform_numbers_are_uniform_along_each_axis(along: str) -> None:
    u = numbers(along, 4096)
    assert u.dtype == torch.float32 and u.min() >= 0 and u.max() < 1
    assert stats.kstest(u.double().numpy(), "uniform").pvalue > LEAST_P
    assert stats.chisquare(torch.bincount((u * 64).long(), minlength=64).numpy()).pvalue > LEAST_P


@pytest.mark.parametrize("lag", [1, 2, 7])
@pytest.mark.parametrize("along", AXES)
def test_neighbours_along_each_axis_are_independent(along: str, lag: int) -> None:
    cell = (numbers(along, 4096) * 8).long()
    pairs = torch.bincount(cell[:-lag] * 8 + cell[lag:], minlength=64).view(8, 8)
    assert stats.chi2_contingency(pairs.numpy()).pvalue > LEAST_P


@pytest.mark.parametrize("other", ["seed", "epoch", "call"])
def test_the_same_samples_get_independent_numbers_elsewhere(other: str) -> None:
    samples = torch.arange(20_000)
    draws = Draws(3, 1, samples)
    first = draws.uniform()
    second = {
        "seed": lambda: Draws(4, 1, samples).uniform(),
        "epoch": lambda: Draws(3, 2, samples).uniform(),
        "call": draws.uniform,
    }[other]()
    pairs = torch.bincount((first * 16).long() * 16 + (second * 16).long(), minlength=256).view(16, 16)
    assert stats.chi2_contingency(pairs.numpy()).pvalue > LEAST_P


def test_seed_and_epoch_are_not_interchangeable() -> None:
    samples = torch.arange(100)
    assert not torch.equal(Draws(1, 2, samples).uniform(), Draws(2, 1, samples).uniform())


@pytest.mark.parametrize("bit", range(24))
def test_each_bit_of_uniform_is_a_fair_coin(bit: int) -> None:
    words = (Draws(0, 0, torch.arange(20_000)).uniform().double() * 2**24).long()
    assert stats.binomtest(int((words >> bit & 1).sum()), 20_000).pvalue > LEAST_P


def test_normal_numbers_are_normal() -> None:
    z = Draws(1, 0, torch.arange(10_000)).normal(4)
    assert z.dtype == torch.float32 and torch.isfinite(z).all()
    assert stats.kstest(z.flatten().double().numpy(), "norm").pvalue > LEAST_P
    # Columns come from one word each; Box and Muller's cosine and radius must not tie them to each other.
    assert all(stats.pearsonr(z[:, 0], z[:, k]).pvalue > LEAST_P for k in (1, 2, 3))
    assert z.abs().max() > stats.norm.isf(1e-4)


@pytest.mark.parametrize(("low", "high"), [(0, 2), (-3, 4), (5, 6), (0, 100)])
def test_integers_are_uniform_and_within_bounds(low: int, high: int) -> None:
    n = Draws(2, 0, torch.arange(20_000)).integers(low, high)
    assert n.dtype == torch.int64 and n.min() == low and n.max() == high - 1
    if high - low > 1:
        assert stats.chisquare(torch.bincount(n - low, minlength=high - low).numpy()).pvalue > LEAST_P


def test_integers_of_a_wide_range_use_all_of_it() -> None:
    n = Draws(2, 0, torch.arange(20_000)).integers(-(1 << 60), 1 << 60)
    assert stats.kstest((n.double() / 2**61 + 0.5).numpy(), "uniform").pvalue > LEAST_P
    assert stats.binomtest(int((n & 1).sum()), 20_000).pvalue > LEAST_P


@pytest.mark.parametrize("p", [0.01, 0.3, 0.5, 0.99])
def test_bernoulli_has_its_probability(p: float) -> None:
    hits = Draws(2, 0, torch.arange(20_000)).bernoulli(p)
    assert hits.dtype == torch.bool
    assert stats.binomtest(int(hits.sum()), 20_000, p).pvalue > LEAST_P


def test_bernoulli_at_its_ends_is_certain() -> None:
    draws = Draws(2, 0, torch.arange(20_000))
    assert not draws.bernoulli(0).any() and draws.bernoulli(1).all()


@pytest.mark.parametrize("shape", [(), (1,), (4,), (2, 3), (0,)])
def test_shapes(shape: tuple[int, ...]) -> None:
    draws = Draws(0, 0, torch.arange(5))
    for values in (
        draws.uniform(*shape),
        draws.normal(*shape),
        draws.integers(0, 9, *shape),
        draws.bernoulli(0.5, *shape),
    ):
        assert values.shape == (5, *shape)


def test_an_empty_batch_gets_no_numbers() -> None:
    assert Draws(0, 0, torch.arange(0)).normal(3).shape == (0, 3)


MASK = (1 << 64) - 1


def splitmix(word: int) -> int:
    """SplitMix64's finaliser in Python's unbounded integers."""
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & MASK
    return word ^ word >> 31


@pytest.mark.parametrize("sample", [0, 1, 59_999, -1, 2**63 - 1, -(2**63)])
def test_the_tensor_arithmetic_is_that_of_64_bit_words(sample: int) -> None:
    draws = Draws(7, 3, torch.tensor([sample]))
    stream = splitmix((sample * 0xD1342543DE82EF95 + seed_for(7, "augment", 3)) & MASK)
    for call in (1, 2, 3):
        words = [splitmix((stream + call * 0xDA942042E4DD58B5 + j * 0x9E3779B97F4A7C15) & MASK) for j in range(3)]
        assert draws.uniform(3).tolist() == [[(word >> 40) / 2**24 for word in words]]


@pytest.mark.few("normal", "second call")
@pytest.mark.parametrize("method", METHODS)
def test_numbers_depend_on_the_sample_alone_and_not_on_its_batch(method: str) -> None:
    draw = METHODS[method]
    samples = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    whole = draw(Draws(5, 2, samples))
    # Sizes on both sides of what a vector register holds: vectors and their tails may take different code.
    for size in (1, 2, 3, 7, 8, 9, 17, 64, 333):
        parts = [draw(Draws(5, 2, part)) for part in samples.split(size)]
        assert torch.equal(torch.cat(parts), whole)
    order = samples.argsort()
    assert torch.equal(draw(Draws(5, 2, samples[order])), whole[order])


@pytest.mark.parametrize("method", METHODS)
def test_numbers_repeat_and_leave_the_global_generator_alone(method: str) -> None:
    before = torch.get_rng_state()
    first, again = (METHODS[method](Draws(5, 2, torch.arange(50))) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_draws_refuses() -> None:
    with pytest.raises(DataError, match="float32"):
        Draws(0, 0, torch.zeros(3))
    with pytest.raises(DataError, match=r"\(2, 2\)"):
        Draws(0, 0, torch.zeros(2, 2, dtype=torch.int64))
    draws = Draws(0, 0, torch.arange(3))
    with pytest.raises(DataError, match="from 4 to below 4"):
        draws.integers(4, 4)
    for p in (-0.1, 1.1, float("nan")):
        with pytest.raises(DataError, match="0 to 1"):
            draws.bernoulli(p)


# ------------------------------------------------------------------ augmentations


def images(count: int, *shape: int) -> Tensor:
    """float32 (count, *shape), each pixel of the whole batch another number, none of them 0."""
    return torch.arange(1.0, 1 + count * torch.Size(shape).numel()).view(count, *shape)


AUGMENTATIONS = {
    "flip": random_flip(),
    "crop": random_crop(2),
    "crop with fill": random_crop(3, fill=-1.0),
    "erase": random_erase(2, 5),
    "compose": compose(random_flip(0.3), random_crop(1), random_erase(1, 3, p=0.8, fill=0.5)),
}
each_augmentation = pytest.mark.parametrize("name", AUGMENTATIONS)


@each_augmentation
def test_a_sample_looks_the_same_in_any_batch(name: str) -> None:
    augment = AUGMENTATIONS[name]
    x, samples = images(61, 1, 9, 11), torch.arange(100, 161)
    whole = augment(x, Draws(1, 4, samples))
    order = torch.randperm(61, generator=torch.Generator().manual_seed(0))
    assert torch.equal(augment(x[order], Draws(1, 4, samples[order])), whole[order])
    for size in (1, 7, 16):
        pieces = zip(x.split(size), samples.split(size), strict=True)
        assert torch.equal(torch.cat([augment(a, Draws(1, 4, b)) for a, b in pieces]), whole)


@each_augmentation
def test_epochs_and_seeds_look_different(name: str) -> None:
    augment, x, samples = AUGMENTATIONS[name], images(30, 1, 9, 9), torch.arange(30)
    seen = [augment(x, Draws(seed, epoch, samples)) for seed in (0, 1) for epoch in (0, 1)]
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i])


@each_augmentation
def test_form_is_kept_and_the_input_untouched(name: str) -> None:
    augment, samples = AUGMENTATIONS[name], torch.arange(20)
    for shape in ((8, 9), (1, 8, 9), (3, 8, 9), (2, 3, 8, 9)):
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int32):
            x = images(20, *shape).to(dtype)
            before = x.clone()
            result = augment(x, Draws(0, 0, samples))
            assert result.shape == x.shape and result.dtype == dtype
            assert torch.equal(x, before)


@each_augmentation
def test_channels_move_together(name: str) -> None:
    augment, samples, x = AUGMENTATIONS[name], torch.arange(40), images(40, 1, 8, 9)
    single = augment(x, Draws(0, 0, samples))
    assert torch.equal(augment(x.expand(-1, 3, -1, -1), Draws(0, 0, samples)), single.expand(-1, 3, -1, -1))
    assert torch.equal(augment(x[:, 0], Draws(0, 0, samples)), single[:, 0])
    channels_last = x.expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last)
    assert torch.equal(augment(channels_last, Draws(0, 0, samples)), single.expand(-1, 3, -1, -1))


@each_augmentation
def test_pickling_keeps_it(name: str) -> None:
    augment, x = AUGMENTATIONS[name], images(10, 1, 8, 9)
    copy = pickle.loads(pickle.dumps(augment))
    assert copy == augment and repr(copy) == repr(augment)
    assert torch.equal(copy(x, Draws(0, 0, torch.arange(10))), augment(x, Draws(0, 0, torch.arange(10))))


@each_augmentation
def test_a_batch_that_holds_no_images_is_refused(name: str) -> None:
    with pytest.raises(DataError, match=r"\(4, 3\)"):
        AUGMENTATIONS[name](torch.zeros(4, 3), Draws(0, 0, torch.arange(4)))


def test_flip_mirrors_left_to_right() -> None:
    x, samples = images(2000, 1, 3, 4), torch.arange(2000)
    assert torch.equal(random_flip(1)(x, Draws(0, 0, samples)), x.flip(3))
    assert torch.equal(random_flip(0)(x, Draws(0, 0, samples)), x)
    mixed = random_flip(0.3)(x, Draws(0, 0, samples))
    flipped = (mixed == x.flip(3)).flatten(1).all(1)
    kept = (mixed == x).flatten(1).all(1)
    assert (flipped ^ kept).all()
    assert stats.binomtest(int(flipped.sum()), 2000, 0.3).pvalue > LEAST_P


@pytest.mark.parametrize("fill", [None, -1.0, 0.0])
def test_crop_is_padding_and_cutting_at_an_even_choice_of_places(fill: float | None) -> None:
    x, samples = images(3000, 2, 6, 5), torch.arange(3000)
    cropped = random_crop(2, fill)(x, Draws(0, 0, samples))
    sides = [2] * 4
    padded = pad(x, sides, mode="replicate") if fill is None else pad(x, sides, value=fill)
    windows = [padded[:, :, top : top + 6, left : left + 5] for top in range(5) for left in range(5)]
    found = torch.stack([(cropped == window).flatten(1).all(1) for window in windows])
    assert (found.sum(0) == 1).all()
    assert stats.chisquare(found.sum(1).numpy()).pvalue > LEAST_P


def test_crop_without_padding_changes_nothing() -> None:
    x = images(5, 1, 4, 4)
    assert torch.equal(random_crop(0)(x, Draws(0, 0, torch.arange(5))), x)


def test_crop_may_shift_an_image_out_of_sight() -> None:
    x = images(300, 1, 2, 2)
    cropped = random_crop(3, fill=0.0)(x, Draws(0, 0, torch.arange(300)))
    assert (cropped.flatten(1) == 0).all(1).any() and (cropped == x).flatten(1).all(1).any()


def test_erase_overwrites_one_rectangle_inside_each_image() -> None:
    count, height, width = 4000, 7, 9
    x = images(count, 1, height, width)
    erased = random_erase(2, 4, p=0.6, fill=-1.0)(x, Draws(0, 0, torch.arange(count)))
    hit = (erased == -1)[:, 0]
    assert torch.equal(erased[:, 0][~hit], x[:, 0][~hit])
    rows, columns = hit.any(2), hit.any(1)
    assert torch.equal(hit, rows.unsqueeze(2) & columns.unsqueeze(1))
    chosen = rows.any(1)
    assert stats.binomtest(int(chosen.sum()), count, 0.6).pvalue > LEAST_P
    for line, length in ((rows[chosen], height), (columns[chosen], width)):
        # One run of ones: it begins once.
        begins = line & ~line.roll(1, 1)
        begins[:, 0] = line[:, 0]
        assert (begins.sum(1) == 1).all()
        side, start = line.sum(1), begins.int().argmax(1)
        assert stats.chisquare(torch.bincount(side, minlength=5)[2:].numpy()).pvalue > LEAST_P
        for each in (2, 3, 4):
            places = torch.bincount(start[side == each], minlength=length - each + 1)
            assert stats.chisquare(places.numpy()).pvalue > LEAST_P
    pairs = torch.bincount(rows[chosen].sum(1) * 5 + columns[chosen].sum(1), minlength=25).view(5, 5)[2:, 2:]
    assert stats.chi2_contingency(pairs.numpy()).pvalue > LEAST_P


def test_erase_with_sides_longer_than_the_image_erases_all_of_it() -> None:
    erased = random_erase(10, 20, p=1.0)(images(5, 1, 4, 6), Draws(0, 0, torch.arange(5)))
    assert (erased == 0).all()


def test_compose_is_one_after_another_on_the_same_draws() -> None:
    x, samples = images(50, 1, 6, 6), torch.arange(50)
    flip, crop = random_flip(), random_crop(2)
    draws = Draws(0, 0, samples)
    assert torch.equal(compose(flip, crop)(x, Draws(0, 0, samples)), crop(flip(x, draws), draws))
    assert torch.equal(compose()(x, Draws(0, 0, samples)), x)


def test_parts_of_compose_draw_numbers_of_their_own() -> None:
    x, samples = images(1000, 1, 2, 2), torch.arange(1000)
    twice = compose(random_flip(), random_flip())(x, Draws(0, 0, samples))
    back = int((twice == x).flatten(1).all(1).sum())
    assert stats.binomtest(back, 1000).pvalue > LEAST_P


@pytest.mark.parametrize(
    "make",
    [
        lambda: random_flip(1.5),
        lambda: random_crop(-1),
        lambda: random_erase(0, 3),
        lambda: random_erase(4, 3),
        lambda: random_erase(1, 3, p=-1),
    ],
)
def test_impossible_settings_are_refused_at_once(make: Callable[[], object]) -> None:
    with pytest.raises(DataError, match="expected"):
        make()
