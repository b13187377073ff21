"""Modules that are given one input are told from those that are given one another's outputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from hotloop.core.records.profile import OperatorTime
from hotloop.profiler.timers import module_names
from hotloop.profiler.trace.tracer import Tracer

MANY, WIDTH = 5, 2


class Parts(nn.Module):
    def __init__(self, way: Callable[[nn.ModuleList, Tensor], Tensor]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(MANY))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self.parts, x)


def heads(parts: nn.ModuleList, x: Tensor) -> Tensor:
    return torch.cat([part(x[:, :WIDTH]) for part in parts], 1)


def slices(parts: nn.ModuleList, x: Tensor) -> Tensor:
    return torch.cat([part(piece) for part, piece in zip(parts, x.split(WIDTH, 1), strict=True)], 1)


def layers(parts: nn.ModuleList, x: Tensor) -> Tensor:
    x = x[:, :WIDTH]
    for part in parts:
        x = part(x)
    return x


def overwritten(parts: nn.ModuleList, x: Tensor) -> Tensor:
    x = x[:, :WIDTH].contiguous()
    with torch.no_grad():
        for part in parts:
            x += part(x)
    return parts[0](x)


def freed(parts: nn.ModuleList, x: Tensor) -> Tensor:
    """Each input may lie where the one before did."""
    with torch.no_grad():
        for part in parts:
            part(torch.zeros(len(x), WIDTH))
    return parts[0](x[:, :WIDTH])


def alike(way: Callable[[nn.ModuleList, Tensor], Tensor]) -> set[int]:
    net, tracer = Parts(way), Tracer(lambda code: code.co_filename == __file__, lambda file, number: f"{number}")
    tracer.begin()
    net(torch.ones(4, MANY * WIDTH)).sum().backward()
    tracer.end()
    return {one.alike for one in products(tracer.operators())}


def products(operators: list[OperatorTime]) -> list[OperatorTime]:
    found = [one for one in operators if one.name in ("aten::linear", "aten::mm") and one.module.startswith("parts.")]
    assert {one.module for one in found} == {f"parts.{number}" for number in range(MANY)}
    return found


@pytest.mark.parametrize("way", [heads, slices], ids=lambda way: way.__name__)
def test_modules_that_are_given_one_input_or_slices_of_it_are_alike(way) -> None:
    assert alike(way) == {MANY}


@pytest.mark.parametrize("way", [layers, overwritten, freed], ids=lambda way: way.__name__)
def test_modules_that_are_given_one_after_the_other_are_not(way) -> None:
    assert max(alike(way)) < MANY


def test_memory_that_is_told_by_its_place_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_names, "StorageWeakRef", lambda storage: storage._cdata)
    places = [storage._cdata for storage in (torch.zeros(4, WIDTH).untyped_storage() for _ in range(2))]
    if places[0] == places[1]:  # as the allocator does it nearly always
        assert max(alike(freed)) > 1


def test_asking_for_a_dtype_is_told_from_asking_for_a_device() -> None:
    tracer = Tracer(lambda code: code.co_filename == __file__, lambda file, number: f"{number}")
    x = torch.ones(3)
    tracer.begin()
    x.float(), x.to(torch.float32)
    x.to("cpu"), x.to("cpu", torch.float32), x.to(x)
    tracer.end()
    calls = {one.name: one.calls for one in tracer.operators()}
    assert calls["aten::to.dtype"] == 2
    assert sum(number for name, number in calls.items() if name == "aten::to") == 3
