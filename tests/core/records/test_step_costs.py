"""The record of a step's costs: sums, the round trip through JSON, and wrong records."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hotloop.core.records.step_costs import OperatorCost, StepCosts
from hotloop.errors import HotloopError

PRODUCT = OperatorCost("aten.addmm", "linear", "forward", 2000, 600, 200, (1, 5, 10, 20), launches=1, count=3)
UPDATE = OperatorCost("aten._fused_adam_", "update", "update", 50, 80, 40, (10,), launches=2, tensors=4)
COSTS = StepCosts((PRODUCT, UPDATE), 5, 210, 840, 0, 840, 1680, 400, 1000, 4760, notes=("a line",))


def test_sums_multiply_by_the_number_of_equal_calls() -> None:
    assert COSTS.flops == 3 * 2000 + 50
    assert COSTS.bytes == 3 * 800 + 120
    assert COSTS.launches == 3 + 2
    assert list(COSTS.in_phase("update")) == [UPDATE]


def test_a_record_survives_json() -> None:
    assert StepCosts.from_dict(json.loads(json.dumps(COSTS.to_dict()))) == COSTS


@pytest.mark.parametrize(
    ("change", "word"),
    [({"batch_size": "many"}, "batch_size"), ({"operators": [{"name": "x"}]}, "operators.0"), ({"extra": 1}, "extra")],
)
def test_a_wrong_record_is_named(change: dict, word: str) -> None:
    with pytest.raises(HotloopError, match=word):
        StepCosts.from_dict(COSTS.to_dict() | change)


def test_wrong_operators_are_rejected() -> None:
    with pytest.raises(HotloopError, match="kind 'magic'"):
        replace(PRODUCT, kind="magic")
    with pytest.raises(HotloopError, match="flops -1"):
        replace(PRODUCT, flops=-1)
