"""Each layer gives what torch and its autograd give, in float64, on random shapes; a sign turned round is seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.special
from hypothesis import given, settings
from hypothesis import strategies as st

from hotloop import arrays
from hotloop.arrays.activations import erf
from tests.support.array_layer_checks import (
    CASES,
    NAMESPACES,
    PLANTED,
    QUIET,
    Case,
    close,
    compare,
    examples,
    remade,
    turned,
)


@pytest.mark.parametrize("space", NAMESPACES)
@pytest.mark.parametrize("name", CASES)
def test_a_layer_gives_what_torch_gives(name: str, space: str) -> None:
    @settings(max_examples=examples(space), **QUIET)
    @given(st.data())
    def agrees(data: st.DataObject) -> None:
        compare(CASES[name], data.draw, NAMESPACES[space])

    agrees()


def is_caught(case: Case, layer: type[Any] | None = None) -> bool:
    """Whether the comparison fails, with the layer as it is now or another in its place."""

    @settings(**PLANTED)
    @given(st.data())
    def agrees(data: st.DataObject) -> None:
        compare(case, data.draw, NAMESPACES["numpy"], layer)

    try:
        agrees()
    except Exception:
        return True
    return False


def negated(layer: type[Any], what: str) -> Callable[..., Any]:
    """A method of the layer that gives the negative of what it should."""
    method = "forward" if what == "forward" else "backward"
    right = getattr(layer, method)

    def wrong(self: Any, *arguments: Any, **named: Any) -> Any:
        result = right(self, *arguments, **named)
        if what in ("forward", "dX"):
            return -result
        self.gradients[what] = -self.gradients[what]
        return result

    return wrong


GRADIENTS = {
    "Dense": ("weight", "bias"),
    "Embedding": ("weight",),
    "BatchNorm": ("weight", "bias"),
    "LayerNorm": ("weight", "bias"),
    "Conv": ("weight", "bias"),
    "RNN": ("weight_ih", "weight_hh", "bias_ih", "bias_hh"),
    "LSTM": ("weight_ih", "weight_hh", "bias_ih", "bias_hh"),
}
NO_DX = ("Embedding", "Step")
SIGNS = [(name, what) for name in CASES for what in ("forward", *(() if name in NO_DX else ("dX",)))]
SIGNS += [(name, what) for name, names in GRADIENTS.items() for what in names]


@pytest.mark.parametrize(("name", "what"), SIGNS, ids=[f"{name}-{what}" for name, what in SIGNS])
def test_the_negative_of_a_result_is_seen(name: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    assert not is_caught(case)
    method = "forward" if what == "forward" else "backward"

    def with_what_it_has(self: Any, *arguments: Any, **named: Any) -> Any:
        return wrong(self, *arguments, **named)

    wrong = negated(case.layer, what)
    monkeypatch.setattr(case.layer, method, with_what_it_has)
    assert is_caught(case)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("Residual", "AveragePool of all")])
def test_each_sign_of_its_arithmetic_matters(name: str) -> None:
    case = CASES[name]
    assert not is_caught(case, remade(case.layer))
    assert [line for line, wrong in turned(case.layer) if not is_caught(case, wrong)] == []


def test_what_all_of_them_miss_is_an_error_too() -> None:
    """The comparison itself: another number of the size of the tolerance is seen, one below is not."""
    close(np.ones(3) + 0.5e-10, np.ones(3), "x")
    for wrong in (np.ones(3) + 2e-10, np.full(3, np.nan), np.ones((3, 1))):
        with pytest.raises(AssertionError):
            close(wrong, np.ones(3), "x")


@pytest.mark.parametrize("space", NAMESPACES)
def test_the_error_function_is_that_of_scipy(space: str) -> None:
    x = np.concatenate([np.linspace(-7, 7, 2001), [0.0, 1e-300, -1e-9, 40.0, -1e6]])
    found = np.from_dlpack(erf(NAMESPACES[space].asarray(x)))
    assert np.abs(found - scipy.special.erf(x)).max() < 1e-14


def test_equal_numbers_in_a_window_share_what_comes_back() -> None:
    pool = arrays.MaxPool(2)
    x = np.array([[[[3.0, 1.0, 5.0, 5.0], [3.0, 2.0, 5.0, 5.0]]]])
    assert pool.forward(x, training=True).tolist() == [[[[3.0, 5.0]]]]
    assert pool.backward(np.array([[[[1.0, 1.0]]]])).tolist() == [[[[0.5, 0, 0.25, 0.25], [0.5, 0, 0.25, 0.25]]]]


def test_dropout_keeps_the_mean_and_only_acts_in_training() -> None:
    net = arrays.Network([arrays.Dropout(0.25), arrays.Dense(2)])
    net.predict(np.ones((2, 3)))
    dropout, x = net.chain.layers[0], np.ones((400, 400))
    y = dropout.forward(x, training=True)
    assert set(np.unique(y)) == {0.0, 1 / 0.75}
    assert abs(y.mean() - 1) < 0.02
    assert not np.array_equal(y, dropout.forward(x, training=True))
    assert dropout.forward(x) is x
