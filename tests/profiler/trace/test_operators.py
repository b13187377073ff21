"""Operators of traced steps: whose they are, and from which line they come."""

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

import hotloop.profiler.trace.events
from hotloop.core.records.profile import OperatorTime
from hotloop.profiler.base.call_sites import CallSites
from hotloop.profiler.session import ProfilerSession, make_observers
from hotloop.profiler.timers.line_tracer import LineTracer, TraceMarkers
from hotloop.profiler.trace.events import OperatorKey, TracedSteps, TraceReader, merge_typical_steps
from hotloop.profiler.trace.tracer import MAX_SPANS, Span, Tracer, write_trace
from tests.support.profiler import profiled_steps


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
    monkeypatch.setattr(LineTracer, "_step", lambda self, frame, event, _: self._step)


def no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TraceMarkers, "enter", lambda self, module, args: len(self._inside))


def by_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TraceReader, "_maker_of", lambda self, node: self._mark_at(node.start))


def one_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hotloop.profiler.trace.events, "bisect_right", lambda found, x: min(1, len(found)))


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
    layer(layer(layer(layer(layer(layer(layer(layer(values[0]))))))))  # LINE several
    seen.end()
    marks = ("loop", "comprehension", "map", "library", "generator", "several")
    found = {one.where: one.line_runs for one in seen.operators()}
    return {mark: found[line(mark)] for mark in marks}


def check_runs(found: dict[str, float | None]) -> None:
    assert found["loop"] == 9 and found["library"] == 1
    assert found["comprehension"] >= 9 and found["map"] >= 9
    assert found["generator"] == found["several"] == 1


def test_a_line_runs_as_often_as_python_runs_it_whatever_a_library_does() -> None:
    check_runs(runs())


def test_counting_what_a_library_calls_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.profiler.timers.line_tracer._SUSPENDED", 0)  # what goes on counts as called
    with pytest.raises(AssertionError):
        check_runs(runs())


def numbers(count: int) -> Any:
    for number in range(count):
        yield torch.full((2,), float(number))


def leavings() -> list[str]:
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

    profile = profiled_steps.watched(loop, observers=lambda watch: make_observers(watch, None))
    ones = [one for one in profile.operators if one.phase == "update"]
    assert any(one.within == "step" and one.name == "aten::add_" for one in ones)
    assert any(one.within == "zero_grad" and one.name.endswith("zero_") for one in ones)
    beside = {one.name for one in ones if not one.within}
    assert ("aten::mul" in beside) is named


def test_nothing_is_left_after_a_step() -> None:
    assert leavings() == []


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="frames keep no copies of their variables")
def test_a_frame_that_keeps_tensors_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotloop.profiler.timers.line_tracer.clear_frame_variables", lambda frame: None)
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


@pytest.mark.more
def test_the_profilers_library_writes_nothing_to_the_scripts_output() -> None:
    code = (
        "import torch; from hotloop.profiler.trace.tracer import Tracer\n"
        "t = Tracer(lambda code: True, lambda file, line: '')\n"
        "t.begin(); torch.ones(3) + 1; t.end(); assert t.operators()"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ran.stdout, ran.stderr) == ("", "")


# The file for Perfetto


def test_the_trace_keeps_the_longest_and_stays_small(tmp_path: Path) -> None:
    spans = [Span("row", f"n{n}", n * 10, n * 10 + 1 + n % 2) for n in range(2 * MAX_SPANS)]
    written = write_trace(tmp_path / "trace.json", spans)
    assert written.name == "trace.json.gz" and written.stat().st_size < 5_000_000
    events = json.loads(gzip.decompress(written.read_bytes()))["traceEvents"]
    kept = [event for event in events if event["ph"] == "X"]
    assert len(kept) == MAX_SPANS and {event["dur"] for event in kept} == {0.002}


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


def training(watch: ProfilerSession) -> Iterator[str]:
    """A step at a time; gives the kind of the one that is on."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        model(torch.randn(4, 1, 8, 8)).sum().backward()
        optimizer.step()
        yield watch._sequence.step.kind if watch._sequence.step is not None else ""


@pytest.mark.more
@pytest.mark.few("settling")
@pytest.mark.parametrize("prepared", ["traced", "settling", "warm-up"])
def test_a_profiler_of_the_scripts_own_may_start_at_any_time(prepared: str) -> None:
    before = torch.autograd.profiler._enable_profiler
    watch = ProfilerSession(12, CallSites(), lambda facts: None, lambda watch: make_observers(watch, None))
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


KEY = OperatorKey("aten::mm", "forward", None, ("train.py", 7), ("8x8",), "float32", "cpu", "", None)


def traced_steps(*operators_ms: float, calls: int = 1, key: OperatorKey = KEY) -> list[TracedSteps]:
    """Steps of 10 ms beside an operator, which takes so long in each."""
    steps = []
    for ms in operators_ms:
        step = TracedSteps(10.0 + ms, steps=1)
        step.sums[key].add(ms * 1e6, None, None, calls)
        step.walls[key.module, key.phase] = step.phases[key.phase] = round((4 + ms) * 1e6)
        steps.append(step)
    return steps


@pytest.mark.parametrize("held_up", range(3))
def test_what_an_operator_takes_longer_for_losing_its_core_once_is_none_of_its_time(held_up: int) -> None:
    times = [1.0, 1.2, 1.1]
    times[held_up] = 5.0
    found, usual = merge_typical_steps(traced_steps(*times)), sorted(times)[1]
    assert found.sums[KEY].ns == pytest.approx((sum(times) - 5 + usual) * 1e6)
    assert found.walls[None, "forward"] == found.phases["forward"] == pytest.approx(12e6 + found.sums[KEY].ns)
    assert found.ms == pytest.approx(30 + found.sums[KEY].ns / 1e6)


def test_what_differs_somewhat_counts_as_it_is() -> None:
    assert merge_typical_steps(traced_steps(1.0, 2.0, 2.9)).sums[KEY].ns == pytest.approx(5.9e6)


def test_of_two_steps_nobody_knows_which_was_held_up() -> None:
    assert merge_typical_steps(traced_steps(1.0, 5.0)).sums[KEY].ns == pytest.approx(6e6)


def test_an_operator_that_is_called_more_often_in_a_step_wasnt_held_up() -> None:
    many = traced_steps(1.0, 1.1) + traced_steps(8.0, calls=8)
    assert merge_typical_steps(many).sums[KEY].ns == pytest.approx(10.1e6)


def test_kernels_of_an_accelerator_have_no_core_to_lose() -> None:
    key = KEY._replace(device="cuda:0")
    assert merge_typical_steps(traced_steps(1.0, 1.1, 5.0, key=key)).sums[key].ns == pytest.approx(7.1e6)


def test_a_step_that_took_several_times_as_long_counts_for_nothing() -> None:
    assert merge_typical_steps(traced_steps(1.0, 1.0, 1.0, 90.0)).steps == 3
