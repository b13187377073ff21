"""Random augmentation with random numbers for each sample, independent of the batch.

`augment(x, draws)` runs on each training batch, after `prepare`. `Draws` computes random numbers from (seed, epoch,
sample, number of the call) by an integer hash, so that batches, devices and workers change nothing. The hash is
SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014) on wrapping int64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from hotloop.core.random.rng import seed_for
from hotloop.errors import DataError


def _to_int64(word: int) -> int:
    """Returns the int64 with the lowest 64 bits of a number."""
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


# Odd, so that their multiples don't repeat within 2**64.
_BY_SAMPLE = _to_int64(0xD1342543DE82EF95)
_BY_CALL = _to_int64(0xDA942042E4DD58B5)
_BY_ELEMENT = _to_int64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _to_int64(0xBF58476D1CE4E5B9), _to_int64(0x94D049BB133111EB)


class Draws:
    """Random numbers for the samples of one batch.

    Each method returns numbers of shape (B, *shape), which depend on the seed, the epoch, the sample, and the number of
    earlier calls; so an augmentation must make the same calls for every batch. All devices give the same bits; only
    `normal` may differ in the last bit, less than once in a million.

    Args:
        seed: the Task's seed.
        epoch: number of the epoch.
        samples: int64 (B,): the samples' positions in the training set, on the device of the random numbers.

    Raises:
        DataError: `samples` has another dtype or shape.
    """

    def __init__(self, seed: int, epoch: int, samples: Tensor) -> None:
        if samples.dtype != torch.int64 or samples.ndim != 1:
            raise DataError(
                f"samples of dtype {samples.dtype} and shape {tuple(samples.shape)}",
                expected="int64 of shape (B,)",
                fix="Give each sample's position in the training set",
            )
        self._streams = _mix_words(samples * _BY_SAMPLE + seed_for(seed, "augment", epoch))
        self._calls = 0

    def uniform(self, *shape: int) -> Tensor:
        """Returns float32 (B, *shape), uniform on the multiples of 2**-24 in [0, 1)."""
        return self._bits(24, shape).to(torch.float32).mul_(2.0**-24)

    def normal(self, *shape: int) -> Tensor:
        """Returns float32 (B, *shape), normal with mean 0 and standard deviation 1; at most 6.7.

        Box and Muller (1958), in float64: devices differ in the last bits of logarithms and cosines.
        """
        words = self._bits(64, shape)
        distance = _shift_right(words, 32).add_(1).to(torch.float64).mul_(2.0**-32)
        angle = (words & 0xFFFFFFFF).to(torch.float64).mul_(math.tau * 2.0**-32)
        return distance.log_().mul_(-2).sqrt_().mul_(angle.cos_()).to(torch.float32)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Returns int64 (B, *shape), uniform on low, ..., high - 1. Raises DataError for an empty range."""
        if not 0 < high - low < 1 << 62:
            raise DataError(
                f"integers from {low} to below {high}",
                expected="a range of at least one number and fewer than 2**62",
                fix="Correct low or high",
            )
        # Of 2**63 words some numbers get one more: a bias of at most (high - low) / 2**63.
        return self._bits(63, shape).remainder_(high - low).add_(low)

    def bernoulli(self, p: float, *shape: int) -> Tensor:
        """Returns bool (B, *shape), True with probability p (to 2**-24). Raises DataError if p isn't within 0..1."""
        _check_probability(p)
        return self._bits(24, shape) < round(p * 2**24)

    def _bits(self, count: int, shape: tuple[int, ...]) -> Tensor:
        """Returns int64 (B, *shape): `count` random low bits each; a new tensor at each call."""
        self._calls += 1
        elements = torch.arange(math.prod(shape), device=self._streams.device)
        streams = self._streams + _to_int64(self._calls * _BY_CALL)
        words = _mix_words(streams.unsqueeze(1) + elements.mul_(_BY_ELEMENT))
        return _shift_right(words, 64 - count).view(len(streams), *shape)


Augmentation = Callable[[Tensor, Draws], Tensor]


@dataclass(frozen=True)
class random_flip:
    """Mirrors each image left to right with probability p. Images are (B, ..., height, width)."""

    p: float = 0.5

    def __post_init__(self) -> None:
        _check_probability(self.p)

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        _check_images(x)
        return torch.where(_per_sample(draws.bernoulli(self.p), x), x.flip(-1), x)


@dataclass(frozen=True)
class random_crop:
    """Shifts each image by up to `padding` pixels vertically and horizontally, each shift equally likely.

    The same as padding all sides and cropping to the old size at random. Images are (B, ..., height, width).

    Args:
        padding: the largest shift, in pixels.
        fill: value of new pixels, of which 0 is the mean after `prepare`; None repeats the outermost pixels.
    """

    padding: int
    fill: float | None = None

    def __post_init__(self) -> None:
        _check_result(self.padding >= 0, f"padding={self.padding}", "0 or more")

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        _check_images(x)
        height, width = x.shape[-2:]
        down, right = draws.integers(-self.padding, self.padding + 1, 2).unbind(1)
        rows = torch.arange(height, device=x.device) - down.unsqueeze(1)
        columns = torch.arange(width, device=x.device) - right.unsqueeze(1)
        row, column = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
        pixels = (row.unsqueeze(2) * width + column.unsqueeze(1)).flatten(1).unsqueeze(1)
        planes = x.reshape(len(x), -1, height * width)
        shifted = planes.gather(2, pixels.expand(-1, planes.shape[1], -1)).view(x.shape)
        if self.fill is None:
            return shifted
        inside = (rows == row).unsqueeze(2) & (columns == column).unsqueeze(1)
        return shifted.masked_fill_(_per_sample(~inside, x), self.fill)


@dataclass(frozen=True)
class random_erase:
    """Overwrites a random rectangle of each image with probability p. Images are (B, ..., height, width).

    As in Zhong and others: Random erasing data augmentation, arXiv:1708.04896, but with sides in whole pixels, uniform
    from `smallest` to `largest` and at most the image's, so that no rounding decides a pixel. The rectangle lies within
    the image, each place equally likely.

    Args:
        smallest, largest: the shortest and the longest side, in pixels.
        p: the probability.
        fill: value of the rectangle; after `prepare`, 0 is the mean.
    """

    smallest: int
    largest: int
    p: float = 0.5
    fill: float = 0.0

    def __post_init__(self) -> None:
        sides = f"smallest={self.smallest} and largest={self.largest}"
        _check_result(1 <= self.smallest <= self.largest, sides, "1 <= smallest <= largest")
        _check_probability(self.p)

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        _check_images(x)
        chosen = draws.bernoulli(self.p)
        sides = draws.integers(self.smallest, self.largest + 1, 2)
        places = draws.integers(0, 1 << 61, 2)
        rows = self._covered(x.shape[-2], sides[:, :1], places[:, :1])
        columns = self._covered(x.shape[-1], sides[:, 1:], places[:, 1:])
        box = rows.unsqueeze(2) & columns.unsqueeze(1) & chosen.view(-1, 1, 1)
        return x.masked_fill(_per_sample(box, x), self.fill)

    @staticmethod
    def _covered(length: int, side: Tensor, place: Tensor) -> Tensor:
        """Returns bool (B, length): the rows (or columns) of the rectangle."""
        side = side.clamp(max=length)
        start = place % (length - side + 1)
        position = torch.arange(length, device=side.device)
        return (position >= start) & (position < start + side)


@dataclass(frozen=True, init=False)
class compose:
    """Applies several augmentations in turn, each with its own random numbers."""

    parts: tuple[Augmentation, ...]

    def __init__(self, *parts: Augmentation) -> None:
        object.__setattr__(self, "parts", parts)

    def __call__(self, x: Tensor, draws: Draws) -> Tensor:
        return reduce(lambda images, part: part(images, draws), self.parts, x)


def _shift_right(words: Tensor, bits: int) -> Tensor:
    """Shifts words to the right, with zeros: int64's own shift repeats the sign."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1) if bits else words


def _mix_words(words: Tensor) -> Tensor:
    """SplitMix64's finaliser: a permutation of the 64-bit words in which each bit depends on all."""
    words = (words ^ _shift_right(words, 30)).mul_(_FIRST)
    words = words.bitwise_xor_(_shift_right(words, 27)).mul_(_SECOND)
    return words.bitwise_xor_(_shift_right(words, 31))


def _per_sample(values: Tensor, x: Tensor) -> Tensor:
    """Reshapes values (B, ...) to broadcast against x (B, ..., ...)."""
    return values.view(len(values), *[1] * (x.ndim - values.ndim), *values.shape[1:])


def _check_probability(p: float) -> None:
    _check_result(0 <= p <= 1, f"a probability of {p}", "a number from 0 to 1")


def _check_images(x: Tensor) -> None:
    if x.ndim < 3:
        raise DataError(
            f"a batch of shape {tuple(x.shape)}",
            expected="images (B, ..., height, width)",
            fix="Use this augmentation for images, or write one of your own",
        )


def _check_result(holds: bool, given: str, expected: str) -> None:
    if not holds:
        raise DataError(given, expected=expected, fix="Correct the augmentation")
