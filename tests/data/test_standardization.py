"""`prepare` of grey images: from raw pixels to model input."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch

from hotloop.data.bundle import Standardize
from hotloop.errors import DataError
from tests.support.tasks.idx_datasets import assert_says

PREPARE = Standardize(0.3, 0.4, (28, 28))
RAW = torch.randint(0, 256, (9, 28, 28), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_prepare_scales_and_standardises() -> None:
    result = PREPARE(RAW)
    assert result.shape == (9, 1, 28, 28) and result.dtype == torch.float32
    truth = (RAW.double().unsqueeze(1) / 255 - 0.3) / 0.4
    assert torch.allclose(result.double(), truth, rtol=0, atol=1e-6)


def test_prepare_takes_either_shape_and_any_dtype() -> None:
    expected = PREPARE(RAW)
    for x in (RAW.unsqueeze(1), RAW.long(), RAW.short(), RAW.unsqueeze(1).int()):
        assert torch.equal(PREPARE(x), expected)
    for x in (RAW / 255, RAW.double() / 255, (RAW / 255).unsqueeze(1)):
        assert PREPARE(x).dtype == torch.float32
        assert torch.allclose(PREPARE(x), expected, rtol=0, atol=1e-6)


def test_prepare_works_sample_by_sample_and_leaves_its_input() -> None:
    for x in (RAW, RAW / 255):
        before = x.clone()
        whole = PREPARE(x)
        assert torch.equal(torch.cat([PREPARE(x[i : i + 1]) for i in range(len(x))]), whole)
        assert torch.equal(x, before)
        assert PREPARE(x[:0]).shape == (0, 1, 28, 28)


def test_prepare_survives_pickling() -> None:
    assert pickle.loads(pickle.dumps(PREPARE)) == PREPARE


@pytest.mark.parametrize("shape", [(28, 28), (9, 32, 32), (9, 3, 28, 28), (9, 28, 28, 1), (9,), (2, 2, 1, 28, 28)])
def test_prepare_refuses_other_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError) as error:
        PREPARE(torch.zeros(shape, dtype=torch.uint8))
    assert_says(error, shape, "(N, 28, 28) or (N, 1, 28, 28)")


def test_prepare_without_a_size_takes_images_of_any() -> None:
    free = Standardize(0.0, 1.0)
    assert free(torch.zeros(2, 5, 7, dtype=torch.uint8)).shape == (2, 1, 5, 7)
    with pytest.raises(DataError, match="height, width"):
        free(torch.zeros(2, 3, 5, 7, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("x", "found"),
    [
        (RAW.float(), "to 255"),
        (PREPARE(RAW), "from -0.75"),
        (RAW.short() - 1, "from -1"),
        (RAW.int() + 1, "to 256"),
        (RAW > 100, "bool"),
        (RAW * 1j, "complex64"),
    ],
)
def test_prepare_refuses_values_on_another_scale(x: torch.Tensor, found: str) -> None:
    with pytest.raises(DataError) as error:
        PREPARE(x)
    assert_says(error, found)


def test_prepare_lets_nan_through_for_others_to_find() -> None:
    x = RAW / 255
    x[3, 4, 5] = float("nan")
    assert PREPARE(x).isnan().sum() == 1


@pytest.mark.parametrize("make", [partial(Standardize, 0.5, 0.0), partial(Standardize, float("nan"), 1.0)])
def test_impossible_statistics_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(DataError, match="std"):
        make()
