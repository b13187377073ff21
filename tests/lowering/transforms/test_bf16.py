"""Training in bf16 on a CPU that has instructions for it: as true as such a step can be, and resumed to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import hotloop
from hotloop.core.hardware.probe import probe_hardware
from hotloop.core.state import differing_paths
from hotloop.parity.proof import prove, prove_programs
from hotloop.plan import Plan
from tests.support.programs import advance, through_file
from tests.support.tasks.model_families import FAMILIES, family

CPU = probe_hardware("cpu").device("cpu")
pytestmark = pytest.mark.skipif(
    CPU is None or "bf16" not in CPU.precisions, reason="this CPU has no bf16 instructions, so bf16 is refused here"
)

EAGER, COMPILED = Plan(precision="bf16"), Plan(precision="bf16", compile="step")
TURNED = Plan(precision="bf16", layout="channels_last")
CASES = [
    *((name, EAGER) for name in FAMILIES),
    *(pytest.param(name, COMPILED, marks=[pytest.mark.more] * (name != "mlp")) for name in ("mlp", "cnn", "gpt")),
    *(pytest.param(name, TURNED, marks=[pytest.mark.more] * (name == "cnn")) for name in ("cnn", "residual")),
]


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_it_is_proven_beside_eager_steps_in_bf16(name: str, plan: Plan) -> None:
    found = prove(family(name), plan)
    assert found.parity == "reduced-precision", found.reason


def test_a_fault_larger_than_what_bf16_rounds_is_seen() -> None:
    program = hotloop.lower(family("cnn"), TURNED)
    backward = program._step._backward_of

    def without_the_first(loss: Tensor) -> None:
        backward(loss)
        first = next(program.model.parameters()).grad
        assert first is not None
        first.zero_()

    program._step._backward_of = without_the_first  # type: ignore[method-assign]
    assert prove_programs(family("cnn"), [program])[0].parity == "broken"


@pytest.mark.parametrize("plan", [EAGER, COMPILED], ids=Plan.brief)
def test_it_goes_on_from_a_checkpoint_to_the_bit(plan: Plan) -> None:
    program, again = hotloop.lower(family("gpt"), plan), hotloop.lower(family("gpt"), plan)
    advance(program, 5)
    again.restore(through_file(program.state()))
    for each in (program, again):
        advance(each, 5)
    assert differing_paths(program.state(), again.state()) == []
    assert {value.dtype for value in program.state().parameters.values()} == {torch.float32}
