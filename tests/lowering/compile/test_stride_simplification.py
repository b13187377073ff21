"""torch's compiler isn't kept from its end by what it finds out about indices."""

from __future__ import annotations

import pytest
import sympy
import torch
from torch import Tensor, nn
from torch._inductor import sizevars
from torch.utils._sympy.functions import FloorDiv, ModularIndexing

import hotloop
from hotloop.lowering.compile.inductor_patches import patch_stride_simplify
from tests.support.eager_comparison import STEP
from tests.support.programs import a_task, advance, state_after

X, Y = (sympy.Symbol(name, integer=True, nonnegative=True) for name in "xy")
LONG = (
    FloorDiv(X + 7 * Y, 3) * 5 + ModularIndexing(X * 3 + Y, 2, 9) * 4 + FloorDiv(Y * 9 + X * 2 + 1, 5) + X * Y * 2 + 3
)


@pytest.fixture
def simplified(monkeypatch: pytest.MonkeyPatch) -> list[sympy.Expr]:
    """What sympy is asked to simplify."""
    asked: list[sympy.Expr] = []
    simplify = sympy.simplify
    monkeypatch.setattr(sympy, "simplify", lambda index: asked.append(index) or simplify(index))
    return asked


def test_only_short_indices_are_simplified(simplified: list[sympy.Expr]) -> None:
    with patch_stride_simplify():
        assert sizevars.sympy.simplify(X + 2 * Y - Y) == X + Y and len(simplified) == 1
        assert sizevars.sympy.simplify(LONG) == LONG and len(simplified) == 1  # no shorter for being expanded
        assert sizevars.sympy.simplify((X + Y + 1) * (X + 2) - (X + Y + 1) * (X + 1)) == X + Y + 1
        assert sizevars.sympy.Symbol is sympy.Symbol
    assert sizevars.sympy is sympy


@pytest.mark.parametrize(
    ("index", "stride"),
    [(64 * Y + X, 1), (64 * X + Y, 64), (Y, 0), (X + LONG.subs(X, Y), 1), (8 * (X + Y) + LONG.subs(X, 3), 8)],
)
def test_strides_are_found_as_before(index: sympy.Expr, stride: int) -> None:
    with patch_stride_simplify():
        assert sizevars.stride_at.__wrapped__(index, X) == stride


class Shifted(nn.Module):
    """Reads rows in another width again and again, as relative positions do: indices of a hundred operations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(6, 63), nn.Linear(15, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.layer(x).unflatten(1, (7, 9))[:, 1:6, 2:]
        rows = rows.reshape(-1, 7, 5)[:, :, 1:4]
        rows = rows.reshape(-1, 3, 7)[:, :, 1:6]
        return self.out(rows.relu().flatten(1))  # type: ignore[no-any-return]


@pytest.mark.more
def test_a_step_of_long_indices_trains_as_eagerly(simplified: list[sympy.Expr]) -> None:
    with torch._inductor.config.patch(fx_graph_cache=False):  # or nothing is looked at a second time
        program = hotloop.lower(a_task(model=Shifted), STEP)
    advance(program, 4)
    assert program.compiled_steps
    expected = state_after(a_task(model=Shifted), 4)
    torch.testing.assert_close(program.state().parameters, expected.parameters)
    assert simplified and all(index.count_ops() <= 8 for index in simplified)


def test_the_compiler_finds_sympy_as_it_was_after_an_error() -> None:
    with pytest.raises(ValueError), patch_stride_simplify():
        raise ValueError
    assert sizevars.sympy is sympy
