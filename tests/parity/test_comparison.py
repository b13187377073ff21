"""How far two steps are from each other: many tensors at once come to what each comes to by itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hotloop.parity import comparison
from hotloop.parity.comparison import Key, relative_errors

NAN, INF = math.nan, math.inf


def steps() -> tuple[dict[Key, Tensor], dict[Key, Tensor]]:
    """What one did and what is true, of all kinds."""
    true: dict[Key, Tensor] = {
        ("update", "large"): torch.linspace(1, 2, 3 * comparison.SLICE, dtype=torch.float64),
        ("update", "small"): torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64),
        ("update", "nothing"): torch.zeros(3, dtype=torch.float64),
        ("gradient", "empty"): torch.zeros(0, 4, dtype=torch.float64),
        ("gradient", "not finite"): torch.tensor([NAN, INF, 1.0], dtype=torch.float64),
        ("gradient", "finite"): torch.ones(2, 2, dtype=torch.float64),
        ("gradient", "of another shape"): torch.ones(2, 2, dtype=torch.float64),
        ("loss", "loss"): torch.tensor(2.0, dtype=torch.float64),
        ("optimizer", "step"): torch.tensor(3),
        ("optimizer", "other step"): torch.tensor(3),
    }
    one = {key: value.clone() for key, value in true.items()}
    one["update", "large"][-1] += 3.0
    one["update", "small"] *= 1.01
    one["gradient", "not finite"][2] += 0.5
    one["gradient", "finite"][0, 0] = NAN
    one["gradient", "of another shape"] = torch.ones(4, dtype=torch.float64)
    one["loss", "loss"] += 0.1
    one["optimizer", "other step"] += 1
    one["buffer", "that the truth lacks"] = torch.ones(1)
    return one, true


def test_errors_are_those_of_each_by_itself() -> None:
    one, true = steps()
    sizes = dict.fromkeys(true, 2.0)
    together, apart = relative_errors(one, true, sizes), dict[Key, float]()
    for key, value in one.items():
        apart |= relative_errors({key: value}, true, sizes)
    assert together == apart
    assert apart["update", "large"] == 1.5 and apart["gradient", "not finite"] == 0.25
    assert apart["update", "small"] == pytest.approx(math.hypot(0.01, 0.02, 0.03) / 2)
    assert abs(apart["size of update", "small"] - 0.01) < 1e-9 and ("size of update", "nothing") not in apart
    infinite = {name for (_, name), error in apart.items() if error == INF}
    assert infinite == {"finite", "of another shape", "other step", "that the truth lacks"}
    assert apart["optimizer", "step"] == apart["gradient", "empty"] == apart["update", "nothing"] == 0


def test_no_more_is_held_at_once_than_a_slice_has() -> None:
    several = {("update", str(number)): torch.zeros(2 * comparison.SLICE // 5) for number in range(5)}
    groups = [[key[1] for key, *_ in group] for group in comparison._tensor_groups(several, several)]
    assert groups == [["0", "1"], ["2", "3"], ["4"]]
