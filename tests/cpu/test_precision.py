"""fp32 is fp32 on NVIDIA's GPUs too: their switches, which a CPU has as well, are set in the step and put back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from hotloop.lowering.ingredients import Ingredients
from hotloop.lowering.precision import in_precision
from hotloop.plan import Plan
from tests.cpu.programs import a_task

OLDER: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
NEWER: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)  # type: ignore[attr-defined]


def chosen() -> list[str]:
    return [switch.fp32_precision for switch in NEWER]


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    yield
    torch.backends.fp32_precision = "none"
    for switch, allowed in zip(OLDER, (False, True), strict=True):  # as torch begins
        switch.allow_tf32 = allowed


@contextmanager
def around(precision: str) -> Iterator[None]:
    """What a step on a GPU runs in."""
    parts = replace(Ingredients.of(a_task(), Plan(precision=precision)), device=torch.device("cuda"))
    with ExitStack() as stack:
        for context in in_precision(parts).around:
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
        assert chosen() == [within] * 3
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
        assert chosen() == [within] * 3
    assert chosen() == own


def test_on_a_cpu_there_is_nothing_to_switch() -> None:
    parts = Ingredients.of(a_task(), Plan())
    assert in_precision(parts) is parts
