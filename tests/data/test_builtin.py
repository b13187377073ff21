"""The built-in data sets: their content, their parts, and the folders they are read from."""

from __future__ import annotations

import gzip
import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from hotloop.data.builtin import FASHION_MNIST, digits, fashion_mnist, mnist
from hotloop.data.bundle import Bundle, Standardize
from hotloop.errors import DataError
from tests.support.tasks.idx_datasets import NAMES, assert_says, idx_bytes, put, small_files

# ------------------------------------------------------------------ the real Fashion-MNIST


@pytest.fixture(scope="module")
def real(fashion: Path) -> Bundle:
    return fashion_mnist(fashion)


def raw(folder: Path, name: str, header_bytes: int) -> np.ndarray:
    return np.frombuffer(gzip.decompress((folder / name).read_bytes()), np.uint8, offset=header_bytes)


def test_fashion_mnist_has_its_published_form(real: Bundle) -> None:
    assert real.validation is not None and real.test is not None
    for (x, y), count in ((real.train, 55_000), (real.validation, 5_000), (real.test, 10_000)):
        assert x.shape == (count, 28, 28) and x.dtype == torch.uint8
        assert y.shape == (count,) and y.dtype == torch.int64
        assert y.min() == 0 and y.max() == 9
    assert torch.equal(real.test[1].bincount(), torch.full((10,), 1000))
    assert torch.equal(real.train[1].bincount() + real.validation[1].bincount(), torch.full((10,), 6000))
    assert len(real.classes) == 10 and real.classes[0] == "T-shirt/top" and real.classes[9] == "Ankle boot"
    assert real.name == "Fashion-MNIST" and real.note == ""
    assert "train=55,000, validation=5,000, test=10,000" in repr(real)


def test_training_and_validation_are_the_training_file_each_sample_once(real: Bundle, fashion: Path) -> None:
    assert real.validation is not None and real.test is not None
    pixels = raw(fashion, NAMES[0], 16).reshape(60_000, 784)
    labels = raw(fashion, NAMES[1], 8)

    def rows(x: np.ndarray, y: np.ndarray) -> list[bytes]:
        return [image.tobytes() + bytes([label]) for image, label in zip(x, y, strict=True)]

    def of(pair: tuple[torch.Tensor, torch.Tensor]) -> list[bytes]:
        return rows(pair[0].flatten(1).numpy(), pair[1].numpy().astype(np.uint8))

    assert sorted(of(real.train) + of(real.validation)) == sorted(rows(pixels, labels))
    assert of(real.test) == rows(raw(fashion, NAMES[2], 16).reshape(-1, 784), raw(fashion, NAMES[3], 8))


@pytest.mark.more
def test_prepare_makes_mean_0_and_std_1_of_the_training_file(real: Bundle, fashion: Path) -> None:
    pixels = raw(fashion, NAMES[0], 16) / 255
    assert isinstance(real.prepare, Standardize)
    assert real.prepare.mean == pytest.approx(pixels.mean(), rel=1e-12)
    assert real.prepare.std == pytest.approx(pixels.std(), rel=1e-9)
    assert real.validation is not None
    both = torch.cat([real.prepare(x) for x, _ in (real.train, real.validation)]).double()
    assert both.mean().abs() < 1e-6 and (both.std(correction=0) - 1).abs() < 1e-6


def test_the_published_checksums_fit_the_real_data(fashion: Path) -> None:
    # Debian packs the files without name and time (gzip -n); with both put back they are the published ones.
    for name, digest in FASHION_MNIST.sha256.items():
        packed = (fashion / name).read_bytes()
        time = 1504176606 if name.startswith("train") else 1504176627  # 31 August 2017
        head = b"\x1f\x8b\x08\x08" + struct.pack("<I", time) + packed[8:10] + name.removesuffix(".gz").encode()
        assert hashlib.sha256(head + b"\0" + packed[10:]).hexdigest() == digest


@pytest.mark.more
def test_other_data_in_the_same_form_is_pointed_out(fashion: Path) -> None:
    bundle = mnist(fashion, validation=0)
    assert "not those published as MNIST" in bundle.note and str(fashion) in bundle.note


# ------------------------------------------------------------------ a small set of ours


@pytest.fixture(scope="module")
def content() -> dict[str, bytes]:
    return small_files()


@pytest.fixture
def folder(content: dict[str, bytes], tmp_path: Path) -> Path:
    return put(content, tmp_path / "mine")


def greys(bundle: Bundle) -> list[set[int]]:
    return [
        set(pair[0][:, 0, 0].tolist()) if pair else set() for pair in (bundle.train, bundle.validation, bundle.test)
    ]


def test_validation_is_split_off_by_the_seed_alone(folder: Path) -> None:
    first, again, other = (greys(fashion_mnist(folder, validation=8, seed=seed)) for seed in (1, 1, 2))
    assert first == again and first[1] != other[1]
    train, validation, test = first
    assert len(validation) == 8 and not train & validation and train | validation == set(range(40))
    assert test == set(range(100, 110))


def test_images_keep_their_labels_and_the_files_order(folder: Path, content: dict[str, bytes]) -> None:
    labels = list(gzip.decompress(content[NAMES[1]])[8:])
    bundle = fashion_mnist(folder, validation=8)
    assert bundle.validation is not None
    for x, y in (bundle.train, bundle.validation):
        positions = x[:, 0, 0].tolist()
        assert positions == sorted(positions)
        assert y.tolist() == [labels[position] for position in positions]


def test_every_sample_is_held_back_about_as_often(folder: Path) -> None:
    held = [grey for seed in range(200) for grey in greys(fashion_mnist(folder, validation=10, seed=seed))[1]]
    # 50 expected of each; the standard deviation is 6.
    assert all(20 < held.count(grey) < 80 for grey in range(40))


def test_no_validation(folder: Path) -> None:
    bundle = fashion_mnist(folder, validation=0)
    assert bundle.validation is None and len(bundle.train[0]) == 40
    assert "validation=0" in repr(bundle)


@pytest.mark.parametrize(
    "bad", [{"validation": 40}, {"validation": -1}, {"validation": 0.1}, {"seed": -1}, {"seed": "a"}]
)
def test_impossible_splits_are_refused(bad: dict, folder: Path) -> None:
    ((name, value),) = bad.items()
    with pytest.raises(DataError) as error:
        fashion_mnist(folder, **{"validation": 5, **bad})
    assert_says(error, f"{name}={value!r}")


def test_unpacked_files_and_a_path_as_text_will_do(folder: Path) -> None:
    packed = fashion_mnist(folder, validation=5)
    for name in NAMES:
        (folder / name.removesuffix(".gz")).write_bytes(gzip.decompress((folder / name).read_bytes()))
        (folder / name).unlink()
    unpacked = fashion_mnist(str(folder), validation=5)
    assert torch.equal(packed.train[0], unpacked.train[0]) and torch.equal(packed.train[1], unpacked.train[1])


def test_a_folder_that_lacks_files_is_the_only_one_looked_in(folder: Path) -> None:
    (folder / NAMES[0]).unlink()
    (folder / NAMES[3]).unlink()
    for otherwise in (None, "digits"):
        with pytest.raises(DataError) as error:
            fashion_mnist(folder, otherwise=otherwise)
        assert_says(error, folder, NAMES[0], NAMES[3])
        assert NAMES[1] not in str(error.value)
    with pytest.raises(DataError) as error:
        fashion_mnist(folder / "nowhere")
    assert_says(error, "nowhere isn't a folder")


@pytest.mark.parametrize(
    ("file", "array", "found"),
    [
        (0, np.zeros((40, 32, 32), np.uint8), "(40, 32, 32)"),
        (0, np.zeros((40, 28, 28), np.float32), "float32"),
        (0, np.zeros((0, 28, 28), np.uint8), "(0, 28, 28)"),
        (1, np.zeros(39, np.uint8), "(39,)"),
        (1, np.zeros((40, 1), np.uint8), "(40, 1)"),
        (1, np.full(40, 10, np.uint8), "label 10"),
        (0, np.full((40, 28, 28), 7, np.uint8), "std 0"),
    ],
)
def test_files_that_do_not_fit_are_refused(file: int, array: np.ndarray, found: str, folder: Path) -> None:
    (folder / NAMES[file]).write_bytes(idx_bytes(array))
    with pytest.raises(DataError) as error:
        fashion_mnist(folder, validation=5)
    assert_says(error, found)


# ------------------------------------------------------------------ digits


def test_digits_are_scikit_learns_enlarged() -> None:
    bundle = digits()
    assert bundle.validation is not None and bundle.test is not None
    parts = (bundle.train, bundle.validation, bundle.test)
    assert [len(x) for x, _ in parts] == [1300, 200, 297]
    x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    assert x.dtype == torch.uint8 and x.shape == (1797, 28, 28) and y.dtype == torch.int64
    blocks = x[:, 2:26, 2:26].unflatten(2, (8, 3)).unflatten(1, (8, 3))
    assert torch.equal(blocks, blocks[:, :, :1, :, :1].expand_as(blocks))
    assert x.sum(dtype=torch.int64) == blocks.sum(dtype=torch.int64), "the border is black"
    given = load_digits()
    small = (blocks[:, :, 0, :, 0].float() / 255 * 16).round()  # 17 greys, all told apart
    expected = [(image.tolist(), label) for image, label in zip(given.images, given.target.tolist(), strict=True)]
    assert sorted(zip(small.tolist(), y.tolist(), strict=True)) == sorted(expected)
    assert x.max() == 255 and bundle.classes == tuple("0123456789") and bundle.note == ""


def test_the_test_digits_stay_whatever_is_held_back() -> None:
    few, none, other = digits(validation=50), digits(validation=0), digits(validation=50, seed=1)
    assert few.test is not None and none.test is not None and other.test is not None
    assert none.validation is None and len(none.train[0]) == 1500 and len(few.train[0]) == 1450
    assert torch.equal(few.test[0], none.test[0]) and not torch.equal(few.test[0], other.test[0])
    assert few.prepare == none.prepare
    with pytest.raises(DataError, match="validation=1500"):
        digits(validation=1500)


def test_prepare_of_digits_standardises_all_but_the_test_set() -> None:
    bundle = digits(validation=0)
    assert bundle.prepare is not None
    prepared = bundle.prepare(bundle.train[0]).double()
    assert prepared.mean().abs() < 1e-6 and (prepared.std(correction=0) - 1).abs() < 1e-6
