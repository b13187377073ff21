"""Operators of traced steps: whose they are, from which line they come, and what kernels on a device add."""

from __future__ import annotations

import gc
import gzip
import inspect
import json
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotloop.profiling.events
from hotloop.counting import Counts
from hotloop.profiles import ModuleTime, OperatorTime
from hotloop.profiling.chrome import MOST_SPANS, Span, write_trace
from hotloop.profiling.events import Event, Reader, copied
from hotloop.profiling.following import Follower
from hotloop.profiling.matching import on_device, scaled, with_counts
from hotloop.profiling.naming import Name
from hotloop.profiling.observing import observers
from hotloop.profiling.operators import Tracer
from hotloop.profiling.sites import Sites
from hotloop.profiling.trail import Mark, Trail
from hotloop.profiling.tree import Own
from hotloop.profiling.watcher import Watch
from tests.cpu import watching


class Scatter(torch.autograd.Function):
    """A pool whose backward is a scatter by index."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out, index = F.max_pool2d(x, 2, return_indices=True)
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        found = torch.zeros(ctx.shape).flatten(2)
        found.scatter_(2, ctx.saved_tensors[0].flatten(2), gradient.flatten(2))  # LINE scatter
        return found.view(ctx.shape)


class Pool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Scatter.apply(x)  # LINE pool


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(1, 2, 3), Pool()
        self.head = nn.ModuleList([nn.Linear(18, 5), nn.Linear(5, 3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.conv(x)).flatten(1)  # LINE conv
        x = torch.tanh(self.head[0](x))  # LINE tanh
        x = x * 3.0  # LINE mul
        return self.head[1](x)


def line(mark: str) -> str:
    """Where this file says `LINE mark`."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f"here:{next(n for n, text in enumerate(lines, 1) if text.endswith(f'# LINE {mark}'))}"


def is_own(code: CodeType) -> bool:
    return code.co_filename == __file__


def tracer(own: Callable[[CodeType], bool] = is_own) -> Tracer:
    return Tracer(own, lambda file, number: f"here:{number}")


def traced(steps: int = 1) -> list[OperatorTime]:
    """A few steps of a network, whose loss is computed once more for nothing."""
    model, seen = Net(), tracer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    for _ in range(steps):
        seen.begin()
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out, y)  # LINE loss
        F.cross_entropy(out.double(), y)  # LINE wasted
        loss.backward()
        optimizer.step()  # LINE update
        seen.end()
    seen.close()
    return seen.operators()


@pytest.fixture(scope="module")
def operators() -> list[OperatorTime]:
    return traced()


def one(operators: list[OperatorTime], name: str, phase: str) -> list[tuple[str, str]]:
    """Modules and lines of an operator."""
    return [(o.module, o.where) for o in operators if o.name == f"aten::{name}" and o.phase == phase]


def check_places(operators: list[OperatorTime]) -> None:
    conv, tanh = line("conv"), line("tanh")
    assert one(operators, "convolution", "forward") == [("conv", conv)]
    assert one(operators, "convolution_backward", "backward") == [("conv", conv)]
    assert one(operators, "tanh_backward", "backward") == [("", tanh)]
    assert set(one(operators, "mm", "backward")) == {("head.0", tanh), ("head.1", _after(line("mul")))}
    assert one(operators, "mul", "forward") == [("", line("mul"))]
    assert one(operators, "scatter_", "backward") == [("pool", line("scatter"))]
    assert one(operators, "nll_loss_backward", "backward") == [("(loss)", line("loss"))]
    assert {where for _, where in one(operators, "add_", "update")} <= {line("update")}


def _after(where: str) -> str:
    return f"here:{int(where.partition(':')[2]) + 1}"


def test_operators_find_their_module_and_the_users_line(operators: list[OperatorTime]) -> None:
    check_places(operators)


def no_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Follower, "_step", lambda self, frame, event, _: self._step)


def no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trail, "enter", lambda self, module, args: len(self._inside))


def by_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "_maker_of", lambda self, node: self._mark_at(node.start))


def one_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hotloop.profiling.events, "bisect_right", lambda found, x: min(1, len(found)))


@pytest.mark.parametrize("plant", [no_lines, no_modules, by_time_alone, one_off])
def test_a_planted_fault_is_seen(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_places(traced())


def test_what_no_backward_walked_is_not_used(operators: list[OperatorTime]) -> None:
    used = {o.where: o.used for o in operators if o.name == "aten::nll_loss_forward"}
    assert used == {line("loss"): True, line("wasted"): False}
    assert {o.used for o in operators if o.name == "aten::convolution"} == {True}
    assert {o.used for o in operators if o.phase in ("backward", "update")} == {None}


def test_shapes_dtypes_and_counts(operators: list[OperatorTime]) -> None:
    (conv,) = [o for o in operators if o.name == "aten::convolution"]
    assert conv.shapes == ["4x1x8x8", "2x1x3x3", "2"] and conv.dtype == "float32" and conv.device == "cpu"
    # A multiplication and an addition for each of the 3x3 weights, for each of the 4x2x6x6 results.
    assert conv.flops == 4 * 2 * 6 * 6 * 9 * 2
    wasted = [o for o in operators if o.where == line("wasted") and o.name == "aten::_log_softmax"]
    assert [o.dtype for o in wasted] == ["float64"]


def test_calls_are_per_step() -> None:
    (conv,) = [o for o in traced(3) if o.name == "aten::convolution"]
    assert conv.calls == 1


def test_phases_without_anybody_who_knows_them(operators: list[OperatorTime]) -> None:
    phases = {o.phase for o in operators}
    assert {"forward", "backward", "update"} <= phases
    assert {o.phase for o in operators if o.where == line("update")} == {"update"}


def test_results_are_bitwise_those_without_the_tracer() -> None:
    def trained(watched: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        seen = tracer()
        for _ in range(3):
            if watched:
                seen.begin()
            optimizer.zero_grad()
            F.dropout(model(torch.randn(4, 1, 8, 8))).square().mean().backward()
            optimizer.step()
            seen.end()
        return [*model.state_dict().values(), torch.rand(3)]

    for watched, alone in zip(trained(True), trained(False), strict=True):
        assert torch.equal(watched, alone)


LIBRARY = """
def each(values):
    for value in values:
        value.mul(2)
"""


def runs() -> dict[str, float | None]:
    """How often lines ran: some that are a loop, and some that have a library go through one."""
    library: dict[str, Any] = {}
    exec(compile(LIBRARY, "library.py", "exec"), library)
    layer, seen = nn.Linear(3, 3), tracer()
    values = [torch.ones(3) for _ in range(9)]
    seen.begin()
    for value in values:
        value.exp()  # LINE loop
    [value + 1 for value in values]  # LINE comprehension
    list(map(layer, values))  # LINE map
    library["each"](values)  # LINE library
    library["each"](list(layer.parameters()) * 4)  # LINE generator
    seen.end()
    marks = ("loop", "comprehension", "map", "library", "generator")
    found = {one.where: one.line_runs for one in seen.operators()}
    return {mark: found[line(mark)] for mark in marks}


def check_runs(found: dict[str, float | None]) -> None:
    assert found["loop"] == 9 and found["library"] == 1
    assert found["comprehension"] >= 9 and found["map"] >= 9
    assert found["generator"] == 1


def test_a_line_runs_as_often_as_python_runs_it_whatever_a_library_does() -> None:
    check_runs(runs())


def test_counting_what_a_library_calls_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.profiling.following._SUSPENDED", 0)  # what goes on counts as called
    with pytest.raises(AssertionError):
        check_runs(runs())


def numbers(count: int) -> Any:
    for number in range(count):
        yield torch.full((2,), float(number))


def leavings() -> list[str]:
    """What a tracer has left behind after a step, in a function that goes on and in a generator that waits."""
    call, model, seen = nn.Module.__call__, Net(), tracer()
    waiting = numbers(5)
    next(waiting)
    seen.begin()
    out = model(torch.randn(4, 1, 8, 8))
    loss = out.sum() + next(waiting).sum()
    loss.backward()
    seen.end()
    left = []
    if sys.gettrace() is not None or inspect.currentframe().f_trace is not None:  # type: ignore[union-attr]
        left.append("tracing")
    if nn.Module.__call__ is not call or torch.autograd._profiler_enabled():
        left.append("replaced functions")
    dead = [weakref.ref(out), weakref.ref(loss)]
    del out, loss
    gc.collect()
    if any(ref() is not None for ref in dead):
        left.append("tensors")
    return left


@pytest.mark.parametrize(("average", "named"), [(None, False), (lambda old, new, many: old + 0.1 * (new - old), True)])
def test_what_an_optimizer_does_is_told_from_what_is_done_beside_it(average: Any, named: bool) -> None:
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    averaged = torch.optim.swa_utils.AveragedModel(net, avg_fn=average)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, foreach=False)

    def loop() -> None:
        for _ in range(60):
            optimizer.zero_grad(set_to_none=False)
            net(torch.randn(8, 4)).pow(2).mean().backward()
            optimizer.step()
            averaged.update_parameters(net)

    profile = watching.watched(loop, observers=lambda watch: observers(watch, None))
    ones = [one for one in profile.operators if one.phase == "update"]
    assert any(one.within == "step" and one.name == "aten::add_" for one in ones)
    assert any(one.within == "zero_grad" and one.name.endswith("zero_") for one in ones)
    beside = {one.name for one in ones if not one.within}
    assert ("aten::mul" in beside) is named


def test_nothing_is_left_after_a_step() -> None:
    assert leavings() == []


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="frames keep no copies of their variables")
def test_a_frame_that_keeps_tensors_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.profiling.following.forget_variables", lambda frame: None)
    assert "tensors" in leavings()


def test_under_the_scripts_own_profiler_nothing_is_traced() -> None:
    seen = tracer()
    with torch.profiler.profile() as theirs:
        seen.begin()
        torch.ones(3) + 1
        seen.end()
    assert seen.operators() == [] and len(seen.notes) == 1
    assert any(event.name == "aten::add" for event in theirs.events())


def test_a_debugger_keeps_its_tracing() -> None:
    def theirs(frame: Any, event: str, argument: Any) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(theirs)
    try:
        seen = tracer()
        seen.begin()
        torch.ones(3) + 1
        seen.end()
        assert sys.gettrace() is theirs
    finally:
        sys.settrace(before)
    assert any("no lines" in note for note in seen.notes)


def test_the_profilers_library_writes_nothing_to_the_scripts_output() -> None:
    code = (
        "import torch; from hotloop.profiling.operators import Tracer\n"
        "t = Tracer(lambda code: True, lambda file, line: '')\n"
        "t.begin(); torch.ones(3) + 1; t.end(); assert t.operators()"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("", "")


# Events of a device, which isn't there: made up as torch's profiler gives them


def device_events() -> tuple[list[Mark], list[Event]]:
    marks = [Mark(0, None, ("a.py", 1), "forward", False), Mark(1, None, ("a.py", 2), "loss", False)]
    events = [
        Event("hotloop#0", 1, 0, 1),
        Event("aten::linear", 1, 10, 50, number=0, id=7, shapes=[[2, 3]], dtypes=["float"]),
        Event("aten::addmm", 1, 12, 48, number=0, id=8, shapes=[[2, 3]], dtypes=["float"]),
        Event("cudaLaunchKernel", 1, 20, 25, id=90, launched_by=8),
        Event("gemm", 0, 100, 400, id=91, launched_by=8, device="cuda:0"),
        Event("hotloop#1", 1, 60, 61),
        Event("aten::copy_", 1, 70, 80, number=1, id=9),
        Event("Memcpy HtoD (Pageable -> Device)", 0, 500, 530, id=92, launched_by=9, device="cuda:0"),
        Event("autograd::engine::evaluate_function: AddmmBackward0", 2, 600, 700, number=0, maker=1, id=10),
        Event("aten::mm", 2, 610, 690, id=11, shapes=[[2, 3]], dtypes=["float"]),
        Event("gemm_t", 0, 700, 1300, id=93, launched_by=11, device="cuda:0"),
    ]
    return marks, events


def counted(event: Event) -> Counts | None:
    return Counts(1.0, 1.0) if event.name == "aten::addmm" else None


def test_kernels_belong_to_the_operators_that_launched_them() -> None:
    marks, events = device_events()
    found = {o.event.name: o for o in Reader(marks, counted).operators(events)}
    assert set(found) == {"aten::linear", "aten::addmm", "aten::copy_", "aten::mm"}
    kernels = {name: [kernel.name for kernel in o.kernels] for name, o in found.items()}
    assert kernels["aten::addmm"] == ["gemm"] and kernels["aten::linear"] == []
    assert kernels["aten::mm"] == ["gemm_t"]
    assert copied(found["aten::copy_"].kernels[0]) == "cpu>cuda:0"
    assert found["aten::linear"].ns == 4 and found["aten::addmm"].ns == 36


def test_backward_on_a_thread_of_its_own_finds_what_made_it() -> None:
    marks, events = device_events()
    found = {o.event.name: o for o in Reader(marks, counted).operators(events)}
    assert (found["aten::mm"].phase, found["aten::mm"].line) == ("backward", ("a.py", 1))
    elsewhere = [event if event.maker != 1 else Event(**{**vars(event), "maker": 5}) for event in events]
    unknown = {o.event.name: o for o in Reader(marks, counted).operators(elsewhere)}
    assert unknown["aten::mm"].mark is None


def test_what_is_inside_of_a_counted_operator_is_its_own() -> None:
    marks, events = device_events()

    def all_of_linear(event: Event) -> Counts | None:
        return Counts(1.0, 1.0) if event.name == "aten::linear" else None

    found = {o.event.name: o for o in Reader(marks, all_of_linear).operators(events)}
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
    assert copied(Event(name, 0, 0, 1, device="cuda:1")) == copies


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
    found = scaled(operators, walls, [], clocks, {"forward": 5.0, "backward": 8.0})
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
    found = scaled(operators, walls, [module("a", 2.0, 60.0)], {"update": 10.0, "data": 5.0})
    assert [(one.module, one.phase, one.ms) for one in found] == [
        ("", "update", 10.0),
        ("a", "backward", 6.0),
        ("a", "forward", 5.0),
        ("", "data", 2.0),
        ("a", "forward", 1.0),
        ("a.inside", "forward", 0.5),
    ]


def test_on_a_device_a_module_takes_what_its_kernels_take() -> None:
    own = {Name("net", ""): Own(1.0, 1.0, 1.0), Name("net", "a"): Own(7.0, 7.0, 1.0)}
    operators = [
        operator("a", "forward", 3.0, device="cuda:0"),
        operator("a", "forward", 100.0),
        operator("a", "backward", 4.0, device="cuda:0"),
        operator("a", "backward", 5.0, device="cuda:0"),
    ]
    assert on_device(own, operators, alone=True) == {
        Name("net", ""): Own(0.0, 0.0, 1.0),
        Name("net", "a"): Own(3.0, 9.0, 1.0),
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


# The file for Perfetto


def test_the_trace_keeps_the_longest_and_stays_small(tmp_path: Path) -> None:
    spans = [Span("row", f"n{n}", n * 10, n * 10 + 1 + n % 2) for n in range(2 * MOST_SPANS)]
    written = write_trace(tmp_path / "trace.json", spans)
    assert written.name == "trace.json.gz" and written.stat().st_size < 5_000_000
    events = json.loads(gzip.decompress(written.read_bytes()))["traceEvents"]
    kept = [event for event in events if event["ph"] == "X"]
    assert len(kept) == MOST_SPANS and {event["dur"] for event in kept} == {0.002}


def test_the_trace_of_a_step_has_rows_for_modules_and_lines(tmp_path: Path) -> None:
    seen = tracer()
    model = Net()
    seen.begin()
    model(torch.randn(4, 1, 8, 8)).sum().backward()
    seen.end()
    written = seen.write(tmp_path / "trace.json")
    assert written is not None
    events = json.loads(written.read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    found = {(rows[event["tid"]], event["name"]) for event in events if event["ph"] == "X"}
    assert {("modules", "conv"), ("modules backward", "conv"), ("lines", line("tanh"))} <= found
    assert ("operators", "aten::convolution") in found


def training(watch: Watch) -> Iterator[str]:
    """A step at a time; gives the kind of the one that is on."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        model(torch.randn(4, 1, 8, 8)).sum().backward()
        optimizer.step()
        yield watch._course.step.kind if watch._course.step is not None else ""


@pytest.mark.parametrize("prepared", ["traced", "settling", "warm-up"])
def test_a_profiler_of_the_scripts_own_may_start_at_any_time(prepared: str) -> None:
    before = torch.autograd.profiler._enable_profiler
    watch = Watch(12, Sites(), lambda facts: None, lambda watch: observers(watch, None))
    watch.install()
    steps = training(watch)
    theirs = torch.profiler.profile(schedule=torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1))
    assert prepared in steps  # up to there
    theirs.start()
    while prepared == "warm-up" and next(steps) != "traced":
        pass
    theirs.step()
    for _ in range(40):
        next(steps)
    theirs.stop()
    watch.close()
    watch.remove()
    assert any(event.key == "aten::addmm" for event in theirs.key_averages())
    assert watch.closed and any("a profiler of its own" in note for note in watch.facts.notes)
    assert torch.autograd.profiler._enable_profiler is before


def slowly_at(number: int, steps: int) -> Tracer:
    """A tracer of some steps, of which one does much that the others don't."""
    seen = tracer()
    for step in range(steps):
        seen.begin()
        torch.ones(3).exp()
        if step == number:
            time.sleep(0.05)
            torch.ones(3).tan()
        seen.end()
    seen.close()
    return seen


@pytest.mark.parametrize("number", [0, 1, 2])
def test_operators_are_those_of_steps_that_are_like_the_others(number: int) -> None:
    names = {one.name: one.calls for one in slowly_at(number, 3).operators()}
    assert names["aten::exp"] == 1 and "aten::tan" not in names


def test_a_step_that_is_dropped_leaves_nothing() -> None:
    seen = tracer()
    for wanted in (False, True):
        seen.begin()
        (torch.exp if wanted else torch.tan)(torch.ones(3))
        seen.end() if wanted else seen.drop()
    seen.close()
    names = {one.name: one.calls for one in seen.operators()}
    assert names["aten::exp"] == 1 and "aten::tan" not in names
