"""What kernels on a device add to operators, and what the clocks make of their times."""

from __future__ import annotations

from typing import Any

import pytest

from hotloop.core.records.profile import ModuleTime, OperatorTime
from hotloop.profiler.operator_cost import OpCost
from hotloop.profiler.timers.line_tracer import TraceMark
from hotloop.profiler.timers.module_names import ModuleName, OwnTime
from hotloop.profiler.trace.events import (
    TraceEvent,
    TraceReader,
    copy_direction,
    remove_profiler_overhead,
    with_counts,
    with_device_times,
)

# Events of a device, which isn't there: made up as torch's profiler gives them


def device_events() -> tuple[list[TraceMark], list[TraceEvent]]:
    marks = [TraceMark(0, None, ("a.py", 1), "forward", False), TraceMark(1, None, ("a.py", 2), "loss", False)]
    events = [
        TraceEvent("hotloop#0", 1, 0, 1),
        TraceEvent("aten::linear", 1, 10, 50, number=0, id=7, shapes=[[2, 3]], dtypes=["float"]),
        TraceEvent("aten::addmm", 1, 12, 48, number=0, id=8, shapes=[[2, 3]], dtypes=["float"]),
        TraceEvent("cudaLaunchKernel", 1, 20, 25, id=90, launched_by=8),
        TraceEvent("gemm", 0, 100, 400, id=91, launched_by=8, device="cuda:0"),
        TraceEvent("hotloop#1", 1, 60, 61),
        TraceEvent("aten::copy_", 1, 70, 80, number=1, id=9),
        TraceEvent("Memcpy HtoD (Pageable -> Device)", 0, 500, 530, id=92, launched_by=9, device="cuda:0"),
        TraceEvent("autograd::engine::evaluate_function: AddmmBackward0", 2, 600, 700, number=0, maker=1, id=10),
        TraceEvent("aten::mm", 2, 610, 690, id=11, shapes=[[2, 3]], dtypes=["float"]),
        TraceEvent("gemm_t", 0, 700, 1300, id=93, launched_by=11, device="cuda:0"),
    ]
    return marks, events


def counted(event: TraceEvent) -> OpCost | None:
    return OpCost(1.0, 1.0) if event.name == "aten::addmm" else None


def test_kernels_belong_to_the_operators_that_launched_them() -> None:
    marks, events = device_events()
    found = {o.event.name: o for o in TraceReader(marks, counted).operators(events)}
    assert set(found) == {"aten::linear", "aten::addmm", "aten::copy_", "aten::mm"}
    kernels = {name: [kernel.name for kernel in o.kernels] for name, o in found.items()}
    assert kernels["aten::addmm"] == ["gemm"] and kernels["aten::linear"] == []
    assert kernels["aten::mm"] == ["gemm_t"]
    assert copy_direction(found["aten::copy_"].kernels[0]) == "cpu>cuda:0"
    assert found["aten::linear"].ns == 4 and found["aten::addmm"].ns == 36


def test_backward_on_a_thread_of_its_own_finds_what_made_it() -> None:
    marks, events = device_events()
    found = {o.event.name: o for o in TraceReader(marks, counted).operators(events)}
    assert (found["aten::mm"].phase, found["aten::mm"].line) == ("backward", ("a.py", 1))
    elsewhere = [event if event.maker != 1 else TraceEvent(**{**vars(event), "maker": 5}) for event in events]
    unknown = {o.event.name: o for o in TraceReader(marks, counted).operators(elsewhere)}
    assert unknown["aten::mm"].mark is None


def test_what_is_inside_of_a_counted_operator_is_its_own() -> None:
    marks, events = device_events()

    def all_of_linear(event: TraceEvent) -> OpCost | None:
        return OpCost(1.0, 1.0) if event.name == "aten::linear" else None

    found = {o.event.name: o for o in TraceReader(marks, all_of_linear).operators(events)}
    assert "aten::addmm" not in found
    assert found["aten::linear"].ns == 40 and [k.name for k in found["aten::linear"].kernels] == ["gemm"]


@pytest.mark.parametrize(
    ("name", "copies"),
    [
        ("Memcpy DtoH (Device -> Pinned)", "cuda:1>cpu"),
        ("Memcpy HtoD (Pinned -> Device)", "cpu>cuda:1"),
        ("Memcpy DtoD (Device -> Device)", ""),
        ("gemm", ""),
    ],
)
def test_copies_between_devices(name: str, copies: str) -> None:
    assert copy_direction(TraceEvent(name, 0, 0, 1, device="cuda:1")) == copies


# Beside the clocks


def operator(module: str, phase: Any, ms: float, **more: Any) -> OperatorTime:
    return OperatorTime(name="aten::x", phase=phase, module=module, calls=1, ms=ms, **more)


def module(name: str, forward_ms: float, backward_ms: float) -> ModuleTime:
    own = {"own_forward_ms": forward_ms, "own_backward_ms": backward_ms}
    return ModuleTime(name=name, kind="", calls=1, forward_ms=forward_ms, backward_ms=backward_ms, share=0.5, **own)


def test_operators_grow_with_a_phase_that_others_held_up_while_the_clocks_ran() -> None:
    operators = [operator("a", "forward", 4.0), operator("a", "backward", 6.0), operator("", "update", 1.0)]
    walls: Any = {("a", "forward"): 5.0, ("a", "backward"): 6.0}
    clocks = {"forward": 10.0, "backward": 4.0, "update": 3.0}
    found = remove_profiler_overhead(operators, walls, [], clocks, {"forward": 5.0, "backward": 8.0})
    assert {one.phase: one.ms for one in found} == {"forward": 8.0, "backward": 4.0, "update": 1.0}


def test_traced_times_shrink_to_what_the_clocks_say() -> None:
    operators = [
        operator("a", "forward", 4.0),
        operator("a.inside", "forward", 2.0),  # of a compiled module, whose inside has no clock
        operator("a", "backward", 6.0),
        operator("", "update", 30.0),
        operator("", "data", 2.0),
        operator("a", "forward", 5.0, device="cuda:0"),
    ]
    walls: Any = {("a", "forward"): 8.0, ("a", "backward"): 6.0, ("", "update"): 1.0}
    found = remove_profiler_overhead(operators, walls, [module("a", 2.0, 60.0)], {"update": 10.0, "data": 5.0})
    assert [(one.module, one.phase, one.ms) for one in found] == [
        ("", "update", 10.0),
        ("a", "backward", 6.0),
        ("a", "forward", 5.0),
        ("", "data", 2.0),
        ("a", "forward", 1.0),
        ("a.inside", "forward", 0.5),
    ]


def test_on_a_device_a_module_takes_what_its_kernels_take() -> None:
    own = {ModuleName("net", ""): OwnTime(1.0, 1.0, 1.0), ModuleName("net", "a"): OwnTime(7.0, 7.0, 1.0)}
    operators = [
        operator("a", "forward", 3.0, device="cuda:0"),
        operator("a", "forward", 100.0),
        operator("a", "backward", 4.0, device="cuda:0"),
        operator("a", "backward", 5.0, device="cuda:0"),
    ]
    assert with_device_times(own, operators, alone=True) == {
        ModuleName("net", ""): OwnTime(0.0, 0.0, 1.0),
        ModuleName("net", "a"): OwnTime(3.0, 9.0, 1.0),
    }


def test_a_modules_counts_are_those_of_its_operators_and_all_inside() -> None:
    modules = [module("", 9.0, 9.0), module("a", 4.0, 4.0), module("a.b", 2.0, 2.0), module("(loss)", 1.0, 1.0)]
    operators = [
        operator("a", "forward", 1.0, flops=10.0, bytes=1.0),
        operator("a.b", "backward", 1.0, flops=20.0, bytes=2.0),
        operator("ab", "forward", 1.0, flops=40.0, bytes=4.0),
        operator("(loss)", "loss", 1.0, flops=80.0, bytes=8.0),
        operator("", "update", 9.0, flops=160.0, bytes=16.0),
    ]
    found = {one.name: (one.flops, one.bytes) for one in with_counts(modules, operators)}
    assert found == {"": (70.0, 7.0), "a": (30.0, 3.0), "a.b": (20.0, 2.0), "(loss)": (80.0, 8.0)}


def test_counts_are_unknown_where_most_of_the_time_is() -> None:
    operators = [operator("a", "forward", 9.0), operator("a", "forward", 1.0, flops=10.0)]
    assert with_counts([module("a", 4.0, 4.0)], operators)[0].flops is None
