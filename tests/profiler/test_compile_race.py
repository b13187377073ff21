"""The child that compiles and measures: the parent keeps its state, and ends the child and all that it started."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from hotloop.core.processes import CompileProcess
from hotloop.core.records.profile import ThreadUse
from hotloop.profiler.base.steps import ProfileSettings
from hotloop.profiler.compile_race import NetworkCall, NetworkCallRecorder, race_compiled
from hotloop.profiler.hooks.resources import Cores
from hotloop.profiler.profile import busy_warning, record_script

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")

ENDLESS_S, BOUND_S = 300.0, 60.0


def test_what_the_child_does_is_its_own_and_what_it_returns_arrives() -> None:
    values = [1]

    def work() -> dict[str, Any]:
        values.append(2)
        return {"values": values, "pid": os.getpid()}

    with CompileProcess(work) as child:
        found = child.result(BOUND_S)
    assert found == {"values": [1, 2], "pid": child.pid} and values == [1]


def test_an_error_is_one_line() -> None:
    def work() -> dict[str, Any]:
        raise ValueError("no such thing\nat all")

    with CompileProcess(work) as child:
        failure = child.result(BOUND_S)["failure"]
    assert failure.startswith("ValueError: no such thing") and "\n" not in failure


def test_a_child_that_is_killed_is_told() -> None:
    with CompileProcess(lambda: os.kill(os.getpid(), signal.SIGKILL) or {}) as child:
        assert child.result(BOUND_S) == {"failure": "the compiling process died"}


def test_a_result_that_is_cut_off_is_that_of_a_child_that_died() -> None:
    reading, writing = os.pipe()
    os.write(writing, b'{"ratio": 1.')
    os.close(writing)
    child = CompileProcess.__new__(CompileProcess)
    child._reading = reading
    assert child.result(BOUND_S) == {"failure": "the compiling process died"}
    os.close(reading)


def test_a_child_that_takes_too_long_ends_with_the_compilers_that_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"

    def work() -> dict[str, Any]:
        other = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({ENDLESS_S})"])
        note.write_text(str(other.pid))
        other.wait()
        return {}

    began = time.monotonic()
    with CompileProcess(work) as child:
        while not (note.exists() and note.read_text()):
            time.sleep(0.01)
        failure = child.result(0.1)["failure"]
    assert "did not finish within" in failure and time.monotonic() - began < BOUND_S
    assert not psutil.pid_exists(child.pid)
    for _ in range(500):  # its parent is gone, so the system takes a moment to clear it away
        if not psutil.pid_exists(int(note.read_text())) or psutil.Process(int(note.read_text())).status() == "zombie":
            break
        time.sleep(0.01)
    else:
        pytest.fail("the compiler runs on")


def test_operations_of_several_threads_run_in_the_child() -> None:
    """OpenMP's threads of the parent are not in a fork, where its first thread would wait for them for ever."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        inputs = torch.randn(600, 600)
        (inputs @ inputs).relu().sum()
        torch.arange(1 << 20).float().exp().sum()

        def work() -> dict[str, Any]:
            return {"sum": float(torch.arange(1 << 20).float().mul(0).exp().sum()), "threads": torch.get_num_threads()}

        with CompileProcess(work) as child:
            assert child.result(BOUND_S) == {"sum": float(1 << 20), "threads": 2}
    finally:
        torch.set_num_threads(before)


class Sleeping(nn.Module):
    """Takes so long by itself; a compiled one, as planted here, takes another time."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.inner, self.seconds = nn.Linear(4, 3), seconds

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        time.sleep(self.seconds)
        return {"logits": scale * self.inner(x)}


def recorded(network: nn.Module) -> NetworkCall | None:
    recorder = NetworkCallRecorder()
    recorder.on = True
    x = torch.randn(5, 4)
    recorder.note((network, x), {"scale": 2.0}, network(x, scale=2.0)["logits"])
    x.zero_()  # the step goes on with it
    return recorder.largest


@pytest.mark.more
@pytest.mark.parametrize(("compiled_s", "faster"), [(0.002, True), (0.02, False)])
def test_the_compiled_network_is_raced_in_interleaved_pairs(compiled_s: float, faster: bool, monkeypatch) -> None:
    def compiled(network: Sleeping) -> Sleeping:
        other = Sleeping(compiled_s)
        other.load_state_dict(network.state_dict())
        return other

    monkeypatch.setattr(torch, "compile", compiled)
    network = Sleeping(0.008)
    call = recorded(network)
    assert call is not None and call.arguments[0].abs().sum() > 0 and call.keywords == {"scale": 2.0}
    found = race_compiled(call, ENDLESS_S)
    assert (found["low"] > 1, found["high"] < 1, found["network"]) == (faster, not faster, "Sleeping"), found
    assert network.inner.weight.grad is None  # nothing was done to the network itself


def test_a_network_that_does_not_compile_is_a_failure(monkeypatch) -> None:
    def compiled(network: nn.Module) -> nn.Module:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(torch, "compile", compiled)
    assert "no compiler here" in race_compiled(recorded(Sleeping(0.0)), ENDLESS_S)["failure"]
    assert race_compiled(None, BOUND_S) == {"failure": "no call of a network was recorded"}


def test_what_a_child_can_t_measure_is_refused_with_the_reason() -> None:
    network = Sleeping(0.0)
    on_meta = NetworkCall.of(Sleeping(0.0).to("meta"), (), {})
    assert "accelerator" in race_compiled(on_meta, BOUND_S)["failure"]
    network.compile(backend="eager")
    assert race_compiled(NetworkCall.of(network, (), {}), BOUND_S)["failure"] == "the network is compiled already"


def test_a_child_that_has_too_little_time_says_what_gives_more(monkeypatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda network: time.sleep(ENDLESS_S))
    assert "--time-limit gives more time" in race_compiled(recorded(Sleeping(0.0)), 1.0)["failure"]


SCRIPT = """
import time, torch
from torch import nn

class Net(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.inner, self.seconds = nn.Linear(4, 3), seconds
    def forward(self, x):
        time.sleep(self.seconds)
        return self.inner(x)

net = Net(0.01)
torch.compile = lambda network: Net({compiled_s})
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x = torch.randn(8, 4)
for step in range({steps}):
    optimizer.zero_grad()
    net(x).sum().backward()
    optimizer.step()
print(step, float(net.inner.weight.sum()))
"""


@pytest.mark.more
@pytest.mark.parametrize(("compiled_s", "steps"), [(0.001, 90), (0.03, 12)])
def test_a_scripts_network_is_raced_and_the_script_goes_on(
    compiled_s: float, steps: int, tmp_path: Path, capfd
) -> None:
    """With fewer steps than are measured, the race comes when the script ends."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(compiled_s=compiled_s, steps=steps))
    found = record_script(script, settings=ProfileSettings(8 if steps > 20 else None, try_s=ENDLESS_S))
    assert found.exit_code == 0 and capfd.readouterr().out.startswith(f"{steps - 1} ")
    assert found.compiled is not None and found.compiled.failure is None, found.compiled
    assert found.compiled.is_faster is (compiled_s < 0.01)


@pytest.mark.more
def test_a_real_compiler_runs_in_the_child() -> None:
    network = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8))
    x = torch.randn(16, 8)
    network(x).sum().backward()
    found = race_compiled(NetworkCall.of(network, (x,), {}), ENDLESS_S)
    assert found.get("ratio"), found


@pytest.mark.more
def test_a_process_that_burns_a_core_is_seen() -> None:
    """Of another program: a child process would be part of the training."""
    burn = f"{shlex.quote(sys.executable)} -c 'while True: pass' >/dev/null 2>&1 & echo $!"
    burner = int(subprocess.run(["sh", "-c", burn], capture_output=True, text=True, check=True).stdout)
    try:
        cores = Cores()
        cores.begin()
        time.sleep(2.0)
        cores.end(clean=True)
        record = cores.record()
        assert record is not None and busy_warning(ThreadUse(**record)).startswith("The machine is busy"), record
    finally:
        os.kill(burner, signal.SIGKILL)
