"""A plan that computes products in fewer bits than the baseline is `reduced-precision`, however small its errors are.

A CPU has no TF32, so layers stand in for it: they round their operands to 10 bits of mantissa where oneDNN's switch for
their class of operators says `tf32`, as NVIDIA's tensor cores do under cuDNN's and cuBLAS'.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from bench.graph_mutations import _through_tf32
from hotloop.core.float32_switches import read_switches
from hotloop.core.number_formats import IEEE
from hotloop.core.records.race import TRUSTED_CLASSES, Parity
from hotloop.lowering.build import lower
from hotloop.lowering.product_counts import count_products
from hotloop.lowering.program import Program
from hotloop.parity.proof import prove_programs
from hotloop.plan import Plan
from hotloop.report.plan import parity_page
from hotloop.task import Task
from tests.support.planted_step_faults import layer_in_bf16, module_of, zero_grad_skipped
from tests.support.programs import seeing
from tests.support.tasks.parity_families import another_family

pytestmark = pytest.mark.usefixtures("one_thread")

ONEDNN: Any = torch.backends.mkldnn


def rounded(value: Tensor, switch: Any) -> Tensor:
    """In 10 bits of mantissa where the switch says so, with the gradient of what isn't rounded."""
    if switch.fp32_precision != "tf32":
        return value
    return value + (_through_tf32(value.detach()) - value.detach())


class Conv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(rounded(x, ONEDNN.conv), rounded(self.weight, ONEDNN.conv), self.bias)


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(rounded(x, ONEDNN.matmul), rounded(self.weight, ONEDNN.matmul), self.bias)


def convolving() -> Task:
    return seeing(
        lambda: nn.Sequential(Conv(1, 4, 3), nn.ReLU(), Conv(4, 4, 3), nn.ReLU(), nn.Flatten(), Linear(256, 4)),
        epochs=9,
    )


@pytest.fixture
def tf32_in_convolutions() -> Iterator[None]:
    """As torch begins on CUDA."""
    ONEDNN.conv.fp32_precision = "tf32"
    yield
    ONEDNN.conv.fp32_precision = "none"


@contextmanager
def switched(switch: Any, kind: str) -> Iterator[None]:
    before = switch.fp32_precision
    switch.fp32_precision = kind
    yield
    switch.fp32_precision = before


def products_in_tf32(program: Program) -> None:
    """As a step that leaves TF32 on."""
    context = partial(switched, ONEDNN.matmul, "tf32")
    program.parts = replace(program.parts, around=(*program.parts.around, context))


def convolution_in_bf16(program: Program) -> None:
    def forward(self: Conv, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.conv2d(x, self.weight, self.bias).float()

    layer = module_of(program, "2")
    layer.forward = MethodType(forward, layer)


FAULTS: dict[str, tuple[Callable[[Program], None], str]] = {
    "products in TF32": (products_in_tf32, "matrix products run in tf32, the baseline's in fp32"),
    "a convolution in bf16": (convolution_in_bf16, "convolutions run in bf16, the baseline's in tf32"),
}


HONEST = Plan(optimizer="foreach")


def proven(*plants: Callable[[Program], None], plan: Plan = HONEST, task: Task | None = None) -> Parity:
    task = task or convolving()
    program = lower(task, plan)
    for plant in plants:
        plant(program)
    return prove_programs(task, [program])[0]


@pytest.mark.few("products in TF32")
@pytest.mark.parametrize("fault", FAULTS)
def test_fewer_bits_than_the_baseline_s_are_reduced_precision(tf32_in_convolutions: None, fault: str) -> None:
    plant, line = FAULTS[fault]
    found = proven(plant)
    assert found.parity == "reduced-precision", found.reason
    assert found.reductions == [line] and found.reason.startswith(f"{line}, which its plan doesn't ask for")


def test_the_floor_alone_would_hide_products_in_tf32(
    tf32_in_convolutions: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotloop.parity.comparison.describe_reductions", lambda plan, baseline: [])
    assert proven(products_in_tf32).parity in TRUSTED_CLASSES


@pytest.mark.more
@pytest.mark.parametrize(
    "plan",
    [HONEST, Plan(precision="fp32"), Plan(accumulation=2)],
    ids=Plan.brief,
)
def test_plans_of_as_many_bits_stay_trusted(tf32_in_convolutions: None, plan: Plan) -> None:
    found = proven(plan=plan)
    assert found.parity in TRUSTED_CLASSES, found.reason
    assert found.arithmetic == {"matmul": "fp32", "conv": "fp32" if plan.precision == "fp32" else "tf32"}


@pytest.mark.more
def test_another_fault_beside_fewer_bits_is_broken(tf32_in_convolutions: None) -> None:
    found = proven(convolution_in_bf16, zero_grad_skipped)
    assert found.parity == "broken" and "convolutions run in bf16" in found.reason
    assert found.first is not None and found.first.startswith("gradient")


@pytest.mark.more
def test_a_layer_in_bf16_under_a_baseline_in_fp32_is_reduced_precision() -> None:
    task = another_family("batchnorm", clip_norm=0.5, average=0.9)
    found = proven(layer_in_bf16, task=task)
    assert found.parity == "reduced-precision", found.reason
    assert found.reductions == ["matrix products run in bf16, the baseline's in fp32"]


def test_check_says_why() -> None:
    line = "matrix products run in tf32, the baseline's in fp32"
    shown: Any = parity_page(Parity(plan="compile=step", parity="reduced-precision", reason=line, states=17))
    text = "\n".join(str(one) for one in shown.renderables)
    assert "compile=step: reduced-precision (another result, computed in fewer bits than the baseline's)" in text
    assert line in text


@pytest.mark.more
def test_the_process_is_left_as_it_was(tf32_in_convolutions: None) -> None:
    before = read_switches()
    proven(convolution_in_bf16)
    assert read_switches() == before and torch.get_float32_matmul_precision() == "highest"


def test_a_captured_step_says_which_products_it_computes() -> None:
    def step(x: Tensor, w: Tensor, image: Tensor, kernel: Tensor) -> Tensor:
        half = (x.bfloat16() @ w.bfloat16()).float() + x @ w
        return half.sum() + F.conv2d(image, kernel).sum()

    given = torch.randn(3, 3), torch.randn(3, 3), torch.randn(1, 1, 4, 4), torch.randn(1, 1, 2, 2)
    counts = {("matmul", "bf16"): 1, ("matmul", "fp32"): 1, ("conv", "fp32"): 1}
    assert dict(count_products(make_fx(step, tracing_mode="fake")(*given), IEEE)) == counts
