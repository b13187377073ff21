"""Built-in data sets: Fashion-MNIST, MNIST, and scikit-learn's digits.

The first two are read from the given folder, else from the system's folder or the user's cache, else downloaded into
the cache with a check of SHA-256. The digits are part of scikit-learn. The seed alone decides the validation set: the
same samples on every machine and with every version of every library.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hotloop.core.files.user_folders import cache_folder
from hotloop.data.bundle import Bundle, Pair, Standardize
from hotloop.data.downloads.idx_files import read_idx
from hotloop.errors import DataError

IMAGE_SIDE = 28
DIGITS_TEST = 297
DIGITS_VALIDATION = 200


@dataclass(frozen=True)
class IdxSet:
    """A published data set of four IDX files.

    Args:
        name: the data set's name.
        key: name of its folder in the cache.
        system: folder of the system's package.
        package: name of the Debian package, or "".
        urls: addresses of folders with the four files, tried in turn; each ends in "/".
        sha256: file name -> hex digest, in the order training images, labels, test images, labels.
        pixel_sum: sum of all pixels of the training images, to detect other images.
        classes: name of each label.
    """

    name: str
    key: str
    system: Path
    package: str
    urls: tuple[str, ...]
    sha256: dict[str, str] = field(hash=False)
    pixel_sum: int
    classes: tuple[str, ...]


# Xiao, Rasul, Vollgraf: Fashion-MNIST, arXiv:1708.07747; https://github.com/zalandoresearch/fashion-mnist.
FASHION_MNIST = IdxSet(
    name="Fashion-MNIST",
    key="fashion-mnist",
    system=Path("/usr/share/datasets/fashion-mnist"),
    package="dataset-fashion-mnist",
    urls=(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    ),
    sha256={
        "train-images-idx3-ubyte.gz": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "train-labels-idx1-ubyte.gz": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "t10k-images-idx3-ubyte.gz": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "t10k-labels-idx1-ubyte.gz": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    },
    pixel_sum=3_431_114_169,
    classes=(
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
)

# LeCun, Cortes, Burges: the MNIST database of handwritten digits, http://yann.lecun.com/exdb/mnist/.
MNIST = IdxSet(
    name="MNIST",
    key="mnist",
    system=Path("/usr/share/datasets/mnist"),
    package="",
    urls=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    sha256={
        "train-images-idx3-ubyte.gz": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels-idx1-ubyte.gz": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images-idx3-ubyte.gz": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels-idx1-ubyte.gz": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    },
    pixel_sum=1_567_298_545,
    classes=tuple("0123456789"),
)


def fashion_mnist(
    folder: str | Path | None = None,
    *,
    validation: int = 5000,
    seed: int = 0,
    download: bool = True,
    otherwise: Literal["digits"] | None = None,
) -> Bundle:
    """Fashion-MNIST: 28x28 grey images of clothes in 10 classes.

    By default 55,000 for training, 5,000 for validation and 10,000 for testing.

    Args:
        folder: folder of the four IDX files, compressed by gzip or not; no other folder is searched then.
        validation: number of training samples for validation; 0 for none.
        seed: decides only which samples are for validation.
        download: whether to download files that this machine lacks.
        otherwise: "digits" to get the small digits, with a note, if the data can't be had.

    Returns:
        Images uint8 (N, 28, 28) and labels int64 (N,), in the files' order. `prepare` standardises by mean and std of
        all images of the training file, with those for validation.

    Raises:
        DataError: the data is missing and can't be downloaded, or a file has other content.
        DiskError: the disk is full.
    """
    return load_builtin(FASHION_MNIST, folder, validation, seed, download, otherwise)


def mnist(
    folder: str | Path | None = None,
    *,
    validation: int = 5000,
    seed: int = 0,
    download: bool = True,
    otherwise: Literal["digits"] | None = None,
) -> Bundle:
    """MNIST: 28x28 grey images of handwritten digits; arguments as for `fashion_mnist`."""
    return load_builtin(MNIST, folder, validation, seed, download, otherwise)


def digits(*, validation: int = DIGITS_VALIDATION, seed: int = 0) -> Bundle:
    """scikit-learn's handwritten digits, which need no download.

    By default 1,300 for training, 200 for validation and 297 for testing. The 8x8 pixels of 0..16 become uint8 of
    0..255, each a block of 3x3, within a border of 2: 28x28, as in MNIST, by integer arithmetic.

    Args:
        validation: number of samples for validation; 0 for none. The test set has a fixed size.
        seed: decides only which samples are for test and validation.

    Returns:
        Images uint8 (N, 28, 28) and labels int64 (N,). `prepare` standardises by mean and std of all images without the
        test set.

    Raises:
        DataError: `validation` or `seed` is out of range.
    """
    from sklearn.datasets import load_digits  # takes a second

    raw = load_digits()
    small = torch.from_numpy(raw.images.astype(np.int64)) * 255 // 16
    blocks = small.to(torch.uint8).repeat_interleave(3, dim=1).repeat_interleave(3, dim=2)
    x = torch.nn.functional.pad(blocks, [2] * 4)
    y = torch.from_numpy(raw.target.astype(np.int64))
    _check_request(validation, seed, len(y) - DIGITS_TEST)
    tested, validated, rest = _split_positions(len(y), (DIGITS_TEST, validation), seed)
    return Bundle(
        name="digits",
        train=(x[rest], y[rest]),
        validation=(x[validated], y[validated]) if validation else None,
        test=(x[tested], y[tested]),
        classes=tuple("0123456789"),
        prepare=_standardize(x[torch.cat([validated, rest])]),
    )


def load_builtin(
    spec: IdxSet, folder: str | Path | None, validation: int, seed: int, download: bool, otherwise: str | None
) -> Bundle:
    """Returns the data set of `spec`; see `fashion_mnist`."""
    if otherwise not in (None, "digits"):
        raise DataError(f"otherwise={otherwise!r}", expected="None or 'digits'", fix="Pass otherwise='digits'")
    if folder is not None:
        return _read_bundle(spec, _local_folder(spec, Path(folder).expanduser()), validation, seed)
    try:
        place = _find_folder(spec, download)
    except DataError as error:
        if otherwise is None:
            raise
        note = f"these are scikit-learn's digits, 1,797 small pictures, as {error.given}"
        return replace(digits(validation=min(validation, DIGITS_VALIDATION), seed=seed), note=note)
    return _read_bundle(spec, place, validation, seed)


def _local_folder(spec: IdxSet, folder: Path) -> Path:
    if lacking := _missing_files(spec, folder):
        raise DataError(
            f"{folder} lacks {', '.join(lacking)}" if folder.is_dir() else f"{folder} isn't a folder",
            expected=f"the four IDX files of {spec.name}, with or without .gz",
            fix="Give the folder that holds them, or leave folder out to have them found or downloaded",
        )
    return folder


def _find_folder(spec: IdxSet, download: bool) -> Path:
    cache = cache_folder() / spec.key
    for place in (spec.system, cache):
        if not _missing_files(spec, place):
            return place
    missing = f"{spec.name} is neither in {spec.system} nor in {cache}"
    install = f"install the Debian package {spec.package}, " if spec.package else ""
    remedy = f"{install}give folder= with the four IDX files, or pass otherwise='digits' to use small digits"
    if not download:
        raise DataError(f"{missing}, and downloading is off", fix=f"Pass download=True, {remedy}")
    from hotloop.data.downloads.download import download_files  # slow imports of web clients

    if failure := download_files(spec.urls, spec.sha256, cache):
        raise DataError(f"{missing}, and {failure}", fix=f"Check the network, {remedy}")
    return cache


def _missing_files(spec: IdxSet, folder: Path) -> list[str]:
    return [name for name in spec.sha256 if not _find_file(folder, name).is_file()]


def _find_file(folder: Path, name: str) -> Path:
    packed = folder / name
    return packed if packed.is_file() else folder / name.removesuffix(".gz")


@dataclass(frozen=True)
class BuiltinRead:
    """A data set as it was read; `files` has path, size and time of change of each file."""

    spec: IdxSet
    folder: Path
    validation: int
    seed: int
    files: tuple[tuple[Path, int, int], ...]


reads: list[BuiltinRead] = []
"""The data sets that this process has read."""

_preloaded: dict[BuiltinRead, Bundle] = {}
"""Data sets for the first such call in each forked process, whose changes to the arrays are its own."""


def preload(known: Iterable[BuiltinRead]) -> None:
    """Reads data sets for the processes that this process forks; these share the memory."""
    for read in known:
        if read not in _preloaded:
            _preloaded[read] = _read_files(read.spec, read.folder, read.validation, read.seed)


def _read_bundle(spec: IdxSet, folder: Path, validation: int, seed: int) -> Bundle:
    paths = [_find_file(folder, name).absolute() for name in spec.sha256]
    states = [(path, path.stat()) for path in paths]
    files = tuple((path, state.st_size, state.st_mtime_ns) for path, state in states)
    read = BuiltinRead(spec, folder.absolute(), validation, seed, files)
    reads.append(read)
    return _preloaded.pop(read, None) or _read_files(spec, folder, validation, seed)


def _read_files(spec: IdxSet, folder: Path, validation: int, seed: int) -> Bundle:
    images, labels, test_images, test_labels = (_find_file(folder, name) for name in spec.sha256)
    x, y = _read_pair(spec, images, labels)
    _check_request(validation, seed, len(y))
    validated, rest = _split_positions(len(y), (validation,), seed)
    prepare = _standardize(x)
    published = prepare.mean == spec.pixel_sum / x.numel() / 255
    return Bundle(
        name=spec.name,
        train=(x[rest], y[rest]),
        validation=(x[validated], y[validated]) if validation else None,
        test=_read_pair(spec, test_images, test_labels),
        classes=spec.classes,
        prepare=prepare,
        note="" if published else f"the images in {folder} are not those published as {spec.name}",
    )


def _read_pair(spec: IdxSet, images: Path, labels: Path) -> Pair:
    x, y = read_idx(images), read_idx(labels)
    again = f"Give the folder of an intact copy of {spec.name}"
    if x.dtype != np.uint8 or x.shape[1:] != (IMAGE_SIDE, IMAGE_SIDE) or not len(x):
        raise DataError(
            f"{images} holds {x.dtype} of shape {x.shape}", expected=f"uint8 (N, {IMAGE_SIDE}, {IMAGE_SIDE})", fix=again
        )
    if y.dtype != np.uint8 or y.shape != x.shape[:1]:
        raise DataError(
            f"{labels} holds {y.dtype} of shape {y.shape}",
            expected=f"one uint8 label for each of the {len(x):,} images",
            fix=again,
        )
    if y.max() >= len(spec.classes):
        raise DataError(
            f"{labels} holds the label {y.max()}",
            expected=f"labels from 0 to {len(spec.classes) - 1}",
            fix=again,
        )
    return torch.from_numpy(x), torch.from_numpy(y.astype(np.int64))


def _check_request(validation: int, seed: int, available: int) -> None:
    if not (isinstance(validation, int) and 0 <= validation < available):
        raise DataError(
            f"validation={validation!r}",
            expected=f"a whole number from 0 to {available - 1}",
            fix="Set fewer samples aside; training needs some",
        )
    if not (isinstance(seed, int) and seed >= 0):
        raise DataError(f"seed={seed!r}", expected="a whole number, 0 or more", fix="Pass seed=0, for one")


def _split_positions(samples: int, counts: tuple[int, ...], seed: int) -> list[Tensor]:
    """Returns random disjoint sets of `counts` positions, then the rest; each in ascending order."""
    # NumPy guarantees RandomState's numbers for all versions, unlike its newer generators and torch's.
    order = np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seed))).permutation(samples)
    return [torch.from_numpy(np.sort(part)) for part in np.split(order, np.cumsum(counts))]


def _standardize(images: Tensor) -> Standardize:
    """Standardises by the exact mean and std of uint8 images, from a histogram in integers."""
    values, counts = range(256), torch.bincount(images.flatten(), minlength=256).tolist()
    total = sum(value * count for value, count in zip(values, counts, strict=True))
    squares = sum(value**2 * count for value, count in zip(values, counts, strict=True))
    n = images.numel()
    return Standardize(total / n / 255, math.sqrt(n * squares - total**2) / n / 255, (IMAGE_SIDE, IMAGE_SIDE))
