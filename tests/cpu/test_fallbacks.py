"""What the compiler leaves to PyTorch is read where it lies, also where PyTorch says otherwise beforehand."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from hotloop.lowering import fallbacks, inductor, packages
from hotloop.parity import prove
from hotloop.plan import Plan
from tests.cpu.eager_or_refused import STEP
from tests.cpu.test_captured_strides import PACKAGE, seeing

aten = torch.ops.aten


class Edged(nn.Module):
    """Images whose channels come last and whose edges are repeated: the gradient of that lies otherwise than torch says."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.edges = nn.Conv2d(1, 8, 2, stride=2), nn.LayerNorm(8), nn.ReplicationPad2d(1)
        self.conv, self.out = nn.Conv2d(8, 8, 3), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.out(self.conv(self.edges(x)).relu().mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("plan", [Plan(compile="forward"), STEP, PACKAGE], ids=lambda plan: plan.compile)
def test_a_compiled_step_reads_a_result_where_it_lies(plan: Plan) -> None:
    found = prove(seeing(Edged), plan)
    assert found.parity in ("fp32-equivalent", "bitwise"), found.reason


@pytest.mark.skipif(torch.__version__ >= "2.14", reason="a later torch may say what is true")
@pytest.mark.parametrize("plan", [STEP, PACKAGE], ids=lambda plan: plan.compile)
def test_by_what_torch_says_it_reads_something_else(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "laid_as_computed", nullcontext)
    for module in (inductor, packages):
        monkeypatch.setattr(module, "MENDED", 0)  # nothing that was compiled otherwise
    assert prove(seeing(Edged), plan).parity == "broken"


@pytest.mark.parametrize(
    ("kernel", "asked"),
    [
        (aten.replication_pad2d_backward.default, True),
        (aten.convolution.default, True),
        (aten.bernoulli.default, False),
        (aten.index_put_.default, False),
    ],
    ids=str,
)
def test_only_what_changes_nothing_is_asked(kernel: torch._ops.OpOverload, asked: bool) -> None:
    assert fallbacks._harmless(kernel) is asked


def test_what_has_no_result_of_zeros_is_believed() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        said = fallbacks._told(aten.linalg_cholesky.default)(mode.from_tensor(torch.eye(3)))
        inverse = fallbacks._told(aten.linalg_inv_ex.default)(mode.from_tensor(torch.eye(3)))[0]
    assert said.shape == inverse.shape == (3, 3)


def test_only_a_cpu_is_asked() -> None:
    value = torch.empty(3, device="meta")
    with pytest.raises(NotImplementedError):
        fallbacks._zeros(value)
