"""A step of two linear layers as a record, without torch."""

from __future__ import annotations

import pytest

from hotloop.core.records.step_costs import OperatorCost, StepCosts


def mlp_costs(batch: int = 256, width: int = 4096, layers: int = 4) -> StepCosts:
    """Returns the costs of linear layers with ReLU and Adam."""
    weight = 4 * width * width
    rows = 4 * batch * width
    operators = [
        OperatorCost("aten.addmm", "linear", "forward", 2 * batch * width * width, rows + weight, rows, (1, batch, width, width), count=layers),
        OperatorCost("aten.relu", "elementwise", "forward", batch * width, rows, rows, (batch * width,), count=layers),
        OperatorCost("aten.mm", "linear", "backward", 2 * batch * width * width, rows + weight, rows, (1, batch, width, width), count=layers),
        OperatorCost("aten.mm", "linear", "backward", 2 * batch * width * width, 2 * rows, weight, (1, width, width, batch), count=layers),
        OperatorCost("aten.threshold_backward", "elementwise", "backward", batch * width, 2 * rows, rows, (batch * width,), count=layers),
        OperatorCost("aten._foreach_add_", "update", "update", 12 * layers * width**2, 4 * layers * weight, 3 * layers * weight, (layers * width**2,)),
    ]  # fmt: skip
    parameters = layers * width * width
    activations = 2 * layers * rows
    return StepCosts(
        tuple(operators), batch, parameters, 4 * parameters, 0, 4 * parameters, 8 * parameters, rows, activations,
        16 * parameters + rows + activations,
    )  # fmt: skip


@pytest.fixture
def costs() -> StepCosts:
    return mlp_costs()
