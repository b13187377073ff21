"""The data of all workloads, the same files for all peers: raw arrays, laid down once, read with NumPy alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.speed.workloads import HOME, Kind

PARTS = ("x", "y", "test_x", "test_y")
_AT_ONCE = 1 << 20
ALPHABET = "abcdefghijklmnopqrstuvwxyz .,;:\n"


@dataclass(frozen=True)
class Data:
    """Training and test samples, raw: images uint8 (N, [3,] H, W), texts int64 (N, T); labels int64 (N,) or (N, T)."""

    x: np.ndarray
    y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray

    @property
    def images(self) -> bool:
        return self.x.dtype == np.uint8

    @property
    def scale(self) -> tuple[float, float]:
        """Mean and standard deviation of the training images' numbers, on the scale 0..1."""
        # NumPy counts them as int64: in pieces, or that is the most memory of all peers.
        numbers = self.x.reshape(-1)
        pieces = (numbers[first : first + _AT_ONCE] for first in range(0, numbers.size, _AT_ONCE))
        counts = np.sum([np.bincount(piece, minlength=256) for piece in pieces], axis=0)
        values = np.arange(256) / 255
        mean = float(counts @ values / counts.sum())
        return mean, float((counts @ (values - mean) ** 2 / counts.sum()) ** 0.5)

    def prepared(self) -> Data:
        """Images as standardised float32 (N, channels, H, W); texts as they are."""
        if not self.images:
            return self
        mean, std = self.scale

        def floats(images: np.ndarray) -> np.ndarray:
            grey = images.reshape(len(images), -1, *images.shape[-2:])
            made = grey.astype(np.float32)
            made /= np.float32(255)
            made -= np.float32(mean)
            made /= np.float32(std)
            return made

        return Data(floats(self.x), self.y, floats(self.test_x), self.test_y)


def load(kind: Kind, home: Path = HOME) -> Data:
    """What `lay_down` wrote."""
    return Data(*(np.load(home / "data" / kind / f"{part}.npy") for part in PARTS))


def lay_down(kind: Kind, home: Path = HOME) -> None:
    """Writes the arrays of a data set, unless they are there."""
    folder = home / "data" / kind
    if all((folder / f"{part}.npy").is_file() for part in PARTS):
        return
    made = _made(kind)
    folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        np.save(folder / f"{part}.npy", getattr(made, part))


def _made(kind: Kind) -> Data:
    if kind == "fashion":
        return _fashion()
    if kind == "images-32":
        return _images(32, 2048, 256)
    if kind == "images-224":
        return _images(224, 256, 16)
    return _texts(int(kind.removeprefix("text-")))


def _fashion() -> Data:
    import hotloop  # brings torch, which no peer has to wait for here

    bundle = hotloop.data.fashion_mnist(validation=0)
    assert bundle.test is not None
    return Data(*(part.numpy() for part in (*bundle.train, *bundle.test)))


def _images(side: int, samples: int, tested: int) -> Data:
    """Ten coarse patterns, one for each class, under much noise."""
    draws = np.random.Generator(np.random.PCG64(0))
    patterns = draws.integers(64, 192, (10, 3, 8, 8)).repeat(side // 8, 2).repeat(side // 8, 3)

    def drawn(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = draws.integers(0, 10, count)
        noise = draws.integers(-60, 60, (count, 3, side, side), dtype=np.int16)
        return np.clip(patterns[labels] + noise, 0, 255).astype(np.uint8), labels

    return Data(*drawn(samples), *drawn(tested))


def _texts(length: int) -> Data:
    """Sentences of made-up words, of which some follow others more often, as sequences of letters."""
    draws = np.random.Generator(np.random.PCG64(0))
    letters = list(ALPHABET[:26])
    words = ["".join(draws.choice(letters, size)) for size in draws.integers(2, 9, 400)]
    following = draws.integers(0, len(words), (len(words), 6))
    at, pieces = 0, []
    for pick in draws.integers(0, 6, 80_000):
        at = following[at, pick]
        pieces.append(words[at] + (".\n" if pick == 5 else " "))
    place = {letter: number for number, letter in enumerate(ALPHABET)}
    numbers = np.array([place[letter] for letter in "".join(pieces)], dtype=np.int64)
    rows = (len(numbers) - 1) // length
    x, y = (numbers[shift : shift + rows * length].reshape(rows, length) for shift in (0, 1))
    tested = max(16, rows // 50)
    return Data(x[:-tested], y[:-tested], x[-tested:], y[-tested:])


def samples(kind: Kind, home: Path = HOME) -> int:
    """How many there are to train on."""
    return len(np.load(home / "data" / kind / "y.npy", mmap_mode="r"))


def data_bytes(kind: Kind, home: Path = HOME) -> int:
    """Of the training samples as `prepared` makes them."""
    x, y = (np.load(home / "data" / kind / f"{part}.npy", mmap_mode="r") for part in ("x", "y"))
    return int(x.size * (4 if x.dtype == np.uint8 else x.itemsize) + y.nbytes)
