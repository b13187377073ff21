"""fp32 is fp32 on NVIDIA's GPUs too: their switches, which a CPU has as well, are set in the step and put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from hotloop.lowering.context import LoweringContext
from hotloop.lowering.transforms.precision import apply_precision
from hotloop.plan import Plan
from tests.support.programs import a_task

OLDER: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
NEWER: tuple[Any, ...] = (
    torch.backends.cuda.matmul,
    torch.backends.cudnn.conv,  # type: ignore[attr-defined]
    torch.backends.cudnn.rnn,  # type: ignore[attr-defined]
    torch.backends.mkldnn.matmul,  # type: ignore[attr-defined]
)
ON_CPU: tuple[Any, ...] = tuple(getattr(torch.backends.mkldnn, name) for name in ("matmul", "conv", "rnn"))


def chosen() -> list[str]:
    return [switch.fp32_precision for switch in NEWER]


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    yield
    torch.backends.fp32_precision = "none"
    for switch, allowed in zip(OLDER, (False, True), strict=True):  # as torch begins
        switch.allow_tf32 = allowed
    for switch in ON_CPU:
        switch.fp32_precision = "none"


@contextmanager
def around(precision: str, device: str = "cuda") -> Iterator[None]:
    """What a step on a GPU runs in."""
    parts = replace(LoweringContext.from_task(a_task(), Plan(precision=precision)), device=torch.device(device))
    with ExitStack() as stack:
        for context in apply_precision(parts).around:
            stack.enter_context(context())
        yield


PLANS = pytest.mark.parametrize(("precision", "within"), [("fp32", "ieee"), ("tf32", "tf32")])


@PLANS
@pytest.mark.parametrize("before", [(False, True), (True, True), (False, False)])
def test_products_are_what_the_plan_says(precision: str, within: str, before: tuple[bool, bool]) -> None:
    for switch, allowed in zip(OLDER, before, strict=True):
        switch.allow_tf32 = allowed
    own = chosen()
    with around(precision):
        assert chosen() == [within] * 4
        assert [switch.allow_tf32 for switch in OLDER] == [within == "tf32"] * 2
    assert [switch.allow_tf32 for switch in OLDER] == list(before)
    assert chosen() == own


@PLANS
@pytest.mark.parametrize("switch", [torch.backends, *NEWER])
@pytest.mark.parametrize("choice", ["ieee", "tf32"])
def test_whatever_name_of_torch_s_the_program_chose_by(precision: str, within: str, switch: Any, choice: str) -> None:
    """torch has two names for each switch, and refuses to read the older of what was set by the newer."""
    switch.fp32_precision = choice
    own = chosen()
    with around(precision):
        assert chosen() == [within] * 4
    assert chosen() == own


@PLANS
@pytest.mark.parametrize("choice", ["highest", "high", "medium"])
def test_a_choice_for_all_products_at_once_is_put_back(precision: str, within: str, choice: str) -> None:
    torch.set_float32_matmul_precision(choice)
    own = chosen()
    with around(precision):
        assert chosen() == [within] * 4
        assert torch.get_float32_matmul_precision() == ("high" if within == "tf32" else "highest")
    assert torch.get_float32_matmul_precision() == choice
    assert chosen() == own


@pytest.mark.parametrize("choice", ["highest", "high", "medium"])
def test_on_a_cpu_fp32_is_no_bf16_either(choice: str) -> None:
    torch.set_float32_matmul_precision(choice)
    torch.backends.mkldnn.conv.fp32_precision = "bf16"  # type: ignore[attr-defined]
    own = [switch.fp32_precision for switch in ON_CPU]
    assert choice != "medium" or own[:2] == ["bf16"] * 2
    with around("fp32", "cpu"):
        assert [switch.fp32_precision for switch in ON_CPU] == ["ieee"] * 3
    assert [switch.fp32_precision for switch in ON_CPU] == own
    assert torch.get_float32_matmul_precision() == choice
