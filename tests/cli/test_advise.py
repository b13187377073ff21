"""`hotloop advise`: the answer, the table, JSON, the page, wrong options, scripts and the score."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from torch import nn

import hotloop as package
from hotloop.advisor.rates import CPU_INTERVAL
from hotloop.cli.options import console
from hotloop.core.hardware import probe
from hotloop.core.records.step_costs import CpuRates
from hotloop.errors import HotloopError
from hotloop.profiler.step_costs import cpu_probe
from tests.support.processes.in_process_command import SMALL, Hotloop

CHIPS = ("--chips", "RTX 4090,H100")

FIELDS = {"name", "step_ms", "low_ms", "high_ms", "memory_bytes", "fits", "run_s", "cost"}


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _once(monkeypatch)
    path = tmp_path / "task.py"
    path.write_text(f"{SMALL}task = make(epochs=2)\n")
    return path


_MEASURED = []


def _once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures this machine's speed once for all tests, whose cache folders are empty."""
    if not _MEASURED:
        _MEASURED.append(probe.measure_hardware())
    monkeypatch.setattr("hotloop.advisor.this_machine.measure_hardware", lambda **options: _MEASURED[0])


def test_the_answer_comes_first(task: Path, hotloop: Hotloop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_width", 140)
    done = hotloop("advise", task, *CHIPS)
    assert done.code == 0
    lines = [line for line in done.err.splitlines() if not line.startswith(("tracing", "measuring"))]
    assert lines[0].startswith("Stage 1 of 4: this machine is enough")
    for words in ("RTX 4090", "H100", "this machine", "launches", "a step measured here", "Prices per hour"):
        assert words in done.err


def test_json_has_stage_and_machines(task: Path, hotloop: Hotloop) -> None:
    found = hotloop("advise", task, *CHIPS, "--gpus", "1,8", "--batch-sizes", "5,20", "--json").document
    assert found["stage"] == 1 and found["answer"].startswith("Stage 1")
    names = [(row["name"], row["batch_size"]) for row in found["machines"]]
    assert ("8 x H100 SXM5 80GB", 20) in names and ("this machine (CPU)", 5) in names and len(names) == 10
    for row in found["machines"]:
        assert row.keys() >= FIELDS and row["low_ms"] <= row["step_ms"] <= row["high_ms"]
        steps = 2 * 20 / row["batch_size"]
        assert row["run_s"] == pytest.approx(row["step_ms"] * steps / 1e3)
    assert {mark for row in found["machines"] for mark in row["marks"]} == {"cheapest", "fastest"}


def test_a_batch_larger_than_the_data_is_left_out_with_a_note(task: Path, hotloop: Hotloop) -> None:
    found = hotloop("advise", task, *CHIPS, "--batch-sizes", "5,5000", "--json").document
    assert {row["batch_size"] for row in found["machines"]} == {5}
    assert any(note.startswith("batch 5,000 is left out") for note in found["notes"])
    alone = hotloop("advise", task, *CHIPS, "--batch-sizes", "5000")
    assert alone.code == 1 and "larger than the data" in alone.err


def test_rows_fit_a_terminal_of_80_columns(task: Path, hotloop: Hotloop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_width", 80)
    shown = hotloop("advise", task, *CHIPS, "--batch-sizes", "5,20").err
    assert sum("RTX 4090" in line and "launches" in line for line in shown.splitlines()) == 2


def test_budget_and_deadline_and_own_prices_decide(task: Path, tmp_path: Path, hotloop: Hotloop) -> None:
    (tmp_path / "mine.csv").write_text("name,price per hour\nrtx4090,1000000\nH100,2\n")
    found = hotloop(
        "advise", task, *CHIPS, "--prices", "mine.csv", "--budget", "0.01", "--deadline", "8h", "--json"
    ).document
    meets = {row["chip"]: row["meets"] for row in found["machines"]}
    assert meets["H100 SXM5 80GB"] and not meets["RTX 4090"]
    costs = {row["chip"]: row["cost_per_1000_steps"] / row["step_ms"] for row in found["machines"]}
    assert costs["RTX 4090"] == pytest.approx(1e6 / 3600) and costs["H100 SXM5 80GB"] == pytest.approx(2 / 3600)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--chips", "RTX 4091"), "RTX 4090"),
        (("--chips", "GPU of mine"), "unknown chip 'GPU of mine'"),
        (("--prices", "nowhere.csv"), "nowhere.csv"),
        (("--gpus", "0"), "--gpus is '0'; expected whole numbers of 1 or more"),
        (("--batch-sizes", "32,x"), "--batch-sizes"),
        (("--deadline", "soon"), "deadline='soon'"),
        (("--budget", "-1"), "--budget is -1.0; expected 0 or more"),
        (("--precision", "fp7"), "--precision is fp7; expected one of fp32"),
        (("--plan", "auto"), "--plan auto depends on the machine"),
        (("--steps", "3"), "--steps is for a script"),
        (("--out", "task.py/page.html"), "task.py/page.html can't be written"),
        (("--score",), "give no Task"),
    ],
)
def test_a_wrong_option_is_one_line(task: Path, hotloop: Hotloop, options: tuple[str, ...], said: str) -> None:
    done = hotloop("advise", task, *options)
    assert done.code in (1, 2) and said in done.err and "Traceback" not in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_the_page_is_written(task: Path, tmp_path: Path, hotloop: Hotloop) -> None:
    found = hotloop("advise", task, *CHIPS, "--out", "page.html", "--json").document
    assert found["page"] == "page.html" and "Step against batch size" in (tmp_path / "page.html").read_text()


def test_training_measures_the_prediction_and_the_score_shows_both(task: Path, hotloop: Hotloop) -> None:
    assert "no prediction has been measured yet" in hotloop("advise", "--score").err
    hotloop("advise", task, *CHIPS)
    done = hotloop("train", task, "--plan", "baseline", "--device", "cpu")
    assert done.code == 0
    (line,) = [line for line in done.err.splitlines() if line.startswith("predicted ")]
    assert " ms a step (" in line and "), measured " in line
    score = hotloop("advise", "--score", "--json").document
    assert score["measured"] == 1 and score["median_error"] >= 0 and score["coverage"] in (0, 1)
    assert "within the 90 % interval" in hotloop("advise", "--score").err


def test_a_step_that_takes_too_long_is_predicted_from_operators_measured_once(
    task: Path, hotloop: Hotloop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotloop.advisor.advice._MEASURABLE_S", 0.0)
    slow, calls = rates_of(seconds=0.5), []
    monkeypatch.setattr(cpu_probe, "measure_cpu_rates", lambda tick: calls.append(tick) or slow)
    first = hotloop("advise", task, *CHIPS, "--json").document
    here = first["machines"][0]
    assert here["source"] == "predicted from operators measured here" and here["step_ms"] > 1000
    assert here["low_ms"] == pytest.approx(CPU_INTERVAL[0] * here["step_ms"])
    again = hotloop("advise", task, *CHIPS)
    assert "this machine (CPU): predicted from operators measured here; other machines: predicted" in one_line(
        again.err
    )
    assert len(calls) == 1
    task.with_name("compiled.toml").write_text('compile = "step"\n')
    compiled = hotloop("advise", task, *CHIPS, "--plan", "compiled.toml", "--json").document["machines"][0]
    assert compiled["source"] != here["source"] and compiled["step_ms"] < 1000


def rates_of(seconds: float) -> CpuRates:
    """Returns rates with which each operator without FLOPs takes so many seconds."""
    names = ("view", "node", "module", "parameter", "optimizer", "engine")
    return CpuRates(
        {}, {"aten.mul": (((1.0,), seconds), ((1e12,), seconds))}, dict.fromkeys(names, 1e-6), 0.0, 0.0, 2**25
    )


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.more
def test_a_race_measures_the_prediction_of_each_plan_that_was_predicted(task: Path, hotloop: Hotloop) -> None:
    hotloop("advise", task, *CHIPS)
    task.with_name("foreach.toml").write_text('optimizer = "foreach"\n')
    done = hotloop("race", task, "--plans", "baseline,foreach.toml", "--json")
    assert done.code == 0
    (line,) = [line for line in done.err.splitlines() if "predicted " in line]
    found = re.fullmatch(r"baseline: predicted ([\d.]+) ms a step \(([\d.]+) to ([\d.]+)\), measured ([\d.]+)", line)
    step_ms, low_ms, high_ms, measured_ms = map(float, found.groups())
    assert low_ms <= step_ms <= high_ms
    plan, _ = done.document["plans"]
    assert measured_ms == pytest.approx(plan["step_ms"], rel=0.01)
    (stored,) = (one for one in hotloop("advise", "--score", "--json").document["predictions"] if one["measured_ms"])
    assert stored["measured_ms"] == [plan["step_ms"]]


def test_training_without_a_prediction_says_nothing(task: Path, hotloop: Hotloop) -> None:
    assert "predicted" not in hotloop("train", task, "--plan", "baseline", "--device", "cpu").err


SCRIPT = """
import sys
import torch
from torch import nn

net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=float(sys.argv[1]))
x, y = torch.randn(50, 20), torch.randint(0, 3, (50,))
for step in range(100_000_000):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
"""


def test_a_script_is_recorded_and_stopped(task: Path, tmp_path: Path, hotloop: Hotloop) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = hotloop("advise", "script.py", *CHIPS, "--steps", "4", "--json", "--", "0.1")
    found = json.loads(done.out)
    assert done.code == 0 and found["subject"] == "script.py"
    assert found["parameters"] == 20 * 64 + 64 + 64 * 3 + 3 and found["batch_size"] == 50
    assert found["machines"][0]["source"] == "a step measured here"
    products = 2 * 50 * (20 * 64 + 64 * 3) + 2 * 50 * (20 * 64 + 2 * 64 * 3)  # the input needs no gradient
    assert products <= found["flops"] < 1.5 * products


EPOCHS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
x, y = torch.randn(48, 1, 8, 8), torch.randint(0, 3, (48,))
train, test = DataLoader(TensorDataset(x, y), batch_size=8), DataLoader(TensorDataset(x, y), batch_size=24)


def train_epoch():
    for inputs, target in train:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), target).backward()
        optimizer.step()


for epoch in range(5):
    for inputs, _ in test:
        with torch.no_grad():
            net(inputs)
    train_epoch()
print("the end")
"""


@pytest.mark.parametrize(
    ("options", "epochs"), [((), 5), (("--epochs", "2"), 2), (("--steps", "999"), 5)], ids=["seen", "given", "short"]
)
def test_a_script_counts_with_all_its_epochs(
    task: Path, tmp_path: Path, hotloop: Hotloop, options: tuple[str, ...], epochs: int
) -> None:
    (tmp_path / "script.py").write_text(EPOCHS)
    done = hotloop("advise", "script.py", *CHIPS, "--steps", "4", *options, "--json")
    found = json.loads(done.out)
    assert (found["epochs"], found["steps"], found["batch_size"]) == (epochs, 6 * epochs, 8)
    assert "Traceback" not in done.err and "KeyboardInterrupt" not in done.err
    assert ("the end" in done.err) is ("999" in options)


def test_a_script_that_trains_nothing_is_one_line(task: Path, tmp_path: Path, hotloop: Hotloop) -> None:
    (tmp_path / "script.py").write_text("import torch\nprint(torch.ones(2).sum())\n")
    done = hotloop("advise", "script.py", *CHIPS)
    assert done.code == 1 and "error: no training step of script.py was recognised" in done.err


def test_a_module_and_an_example_batch() -> None:
    import torch

    found = package.estimate_step(nn.Linear(512, 512), torch.ones(64, 512), chip="a100-sxm 40GB")
    assert 0 < found.low_ms < found.step_ms < found.high_ms
    assert found.memory_bytes >= 4 * 4 * (512 * 512 + 512)  # weights, gradients and Adam's two states
    assert sum(found.parts.values()) == pytest.approx(found.step_ms) and found.source
    with pytest.raises(HotloopError, match="unknown chip 'H1000'"):
        package.estimate_step(nn.Linear(2, 2), torch.ones(1, 2), chip="H1000")


LARGE = """
import resource
resource.setrlimit(resource.RLIMIT_DATA, (4 << 30, 4 << 30))
import torch
from torch import nn
import hotloop

class Block(nn.Module):
    def __init__(self, width=4096, hidden=11008):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.gate, self.down = (
            nn.Linear(a, b, bias=False) for a, b in ((width, hidden), (width, hidden), (hidden, width)))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (32, 128)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))

def model():
    return nn.Sequential(nn.Embedding(32000, 4096), *(Block() for _ in range(32)), nn.Linear(4096, 32000, bias=False))

X = torch.zeros(64, 1024, dtype=torch.long)
task = hotloop.Task(
    model=model, loss=lambda out, y: nn.functional.cross_entropy(out.flatten(0, 1), y.flatten()),
    optimizer=lambda parameters: torch.optim.AdamW(parameters), data=(X, X), batch_size=8, epochs=1)
if __name__ == "__main__":
    found = hotloop.advise(task, precision="bf16")
    print(found.parameters, found.stage, {row.name: row.fits for row in found.machines})
"""


@pytest.mark.more
def test_a_model_of_seven_billion_parameters_needs_no_memory(tmp_path: Path, monkeypatch) -> None:
    import subprocess

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "large.py").write_text(LARGE)
    done = subprocess.run([sys.executable, "large.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    parameters, stage, fits = done.stdout.split(" ", 2)
    assert 6.5e9 < int(parameters) < 7e9 and stage == "4"
    assert "'RTX 4090': 'no'" in fits and "sharded" in fits
