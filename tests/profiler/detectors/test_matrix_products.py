"""Products with one-hot matrices, and with weights that are thin products themselves. Records are made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hotloop.core.records.profile import OperatorTime, Remedy
from tests.support.profiler.handmade_steps import operator, product, remedies, seen


def at(name: str, shapes: list[str], ms: float = 0.5, **fields: Any) -> OperatorTime:
    given = dict(where="net.py:9", function="Net.forward", module="net", bytes=1e3, shapes=shapes) | fields
    return operator(name, ms, **given)


def mm(*shapes: str, **fields: Any) -> OperatorTime:
    return at("mm", list(shapes), **fields)


def said(words: str, ones: list[OperatorTime], **fields: Any) -> list[Remedy]:
    beside = product(1.0, where="net.py:3", module="other", used=True)
    found = remedies(seen({"forward": 5.0, "backward": 5.0}, operators=[beside, *ones], **fields))
    return [one for one in found if words in one.cause]


ONE_HOT = [
    at("zero_", ["8x16x500"], module="", where="net.py:7"),
    at("scatter_", ["8x16x500", "8x16x1"], module="", where="net.py:7"),
    at("copy_", ["8x16x500", "8x16x500"], module="", where="net.py:8"),
]


@pytest.mark.parametrize("operands", [("128x500", "500x32"), ("500x128", "128x32")])
def test_rows_that_a_one_hot_matrix_looks_up_are_named_with_all_that_it_takes(operands: tuple[str, str]) -> None:
    (found,) = said("one-hot", [*ONE_HOT, mm(*operands, ms=1.5), mm("500x128", "128x32", phase="backward", ms=1.5)])
    assert found.where == "net.py:9" and "1 in 500" in found.cause
    assert found.gain == pytest.approx(4.5 / 10 * 499 / 500, rel=1e-3)


def test_a_layer_whose_weight_has_as_many_numbers_hides_no_one_hot_product() -> None:
    layer = [
        mm("16x128", "128x500", where="net.py:12"),
        mm("500x16", "16x128", phase="backward", where="net.py:12"),
    ]
    (found,) = said("one-hot", [*ONE_HOT, *layer, mm("128x500", "500x32", ms=1.5)])
    assert found.where == "net.py:9" and found.gain == pytest.approx(3.0 / 10 * 499 / 500, rel=1e-3)


OTHERS = {
    "no product": ONE_HOT,
    "another one's product": [*ONE_HOT, mm("128x400", "400x32")],
    "several of each row": [at("scatter_", ["128x500", "128x8"]), mm("128x500", "500x32")],
    "logits of that size, and their targets": [
        *ONE_HOT,
        mm("128x64", "64x500"),
        mm("500x128", "128x64", phase="backward"),
        mm("128x500", "500x64", phase="backward"),
    ],
    "one that a gradient goes through": [
        *ONE_HOT,
        mm("128x500", "500x32"),
        mm("128x32", "32x500", phase="backward"),
        mm("500x128", "128x32", phase="backward"),
    ],
    "what an update multiplies": [*ONE_HOT, mm("128x500", "500x32", phase="update")],
    "what a backward scatters": [at("scatter_", ["128x500", "128x1"], phase="backward"), mm("128x500", "500x32")],
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_scatters_and_products_look_nothing_up(case: str) -> None:
    assert said("one-hot", OTHERS[case]) == []


ROWS = [
    at("index", ["500x500"], ms=1.0, where="net.py:8"),
    mm("128x500", "500x32", ms=1.5),
    mm("500x128", "128x32", ms=1.5, phase="backward"),
]


def test_rows_of_an_identity_are_one_hot() -> None:
    (found,) = said("one-hot matrix of 128x500", ROWS, identities=["500x500"])
    assert found.where == "net.py:9" and found.gain == pytest.approx(4 / 10 * 499 / 500, rel=1e-3)
    assert said("one-hot", ROWS, identities=["400x400"]) == said("one-hot", ROWS) == []


@pytest.mark.parametrize("operands", [("128x1", "500"), ("1x500", "128x1")])
def test_indices_compared_with_a_row_are_one_hot(operands: tuple[str, str]) -> None:
    cast = at("_to_copy", ["128x500"], ms=1.0, where="net.py:8")
    (found,) = said("one-hot", [at("eq", list(operands)), cast, *ROWS[1:]])
    assert found.gain == pytest.approx(4.5 / 10 * 499 / 500, rel=1e-3)


@pytest.mark.parametrize("operands", [("128x1", "128"), ("128x1", "1x128"), ("128x500", "128x500"), ("128x1", "1")])
def test_other_comparisons_are_not(operands: tuple[str, str]) -> None:
    assert said("one-hot", [at("eq", list(operands)), mm("128x128", "128x32"), *ROWS[1:]]) == []


WEIGHT = [
    mm("512x8", "8x512"),
    at("mul", ["512x512", ""]),
    at("add", ["512x512", "512x512"]),
    at("mul", ["512x512", ""], phase="backward"),
    mm("512x512", "512x8", phase="backward"),
]
GOES_IN = at("addmm", ["512", "32x512", "512x512"], where="net.py:10")


def test_a_weight_that_is_multiplied_out_is_named_where_it_is_made() -> None:
    (found,) = said("thin factors", [*WEIGHT, GOES_IN])
    assert found.where == "net.py:9"
    assert found.gain == pytest.approx(0.25 * (1 - 32 * 1024 / 512**2))


def test_products_that_stay_are_no_part_of_it_however_many_rows_there_are() -> None:
    """As many as the rank is, and through a layer without a bias, around whose product stands another operator."""
    through = [
        at("matmul", ["8x512", "512x512"], where="net.py:10", bytes=None),
        mm("8x512", "512x512", where="net.py:10"),
        mm("8x512", "512x512", where="net.py:10", phase="backward"),
        mm("512x8", "8x512", where="net.py:10", phase="backward"),
    ]
    (found,) = said("thin factors", [*WEIGHT, *through])
    assert found.gain == pytest.approx(0.25 * (1 - 8 * 1024 / 512**2))


KEPT = {
    "as many rows as it has": [*WEIGHT, at("addmm", ["512", "4096x512", "512x512"])],
    "scores that are normalised": [*WEIGHT, at("_softmax", ["512x512"]), GOES_IN],
    "a mask of one's own numbers": [*WEIGHT, at("mul", ["512x512", "512x512"]), GOES_IN],
    "scores that rows are mixed by": [mm("512x8", "8x512"), mm("512x512", "512x8")],
    "factors that aren't thin": [mm("512x384", "384x512"), GOES_IN],
    "nothing that it is multiplied with": WEIGHT,
    "another module's": [*WEIGHT, at("addmm", ["512", "32x512", "512x512"], module="other")],
}


@pytest.mark.parametrize("case", KEPT)
def test_products_that_can_not_be_taken_apart_or_that_pay_are_not_named(case: str) -> None:
    assert said("thin factors", KEPT[case]) == []
