"""`engine=arrays` from the command line: training, going on, racing, checking, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hotloop.lowering.arrays_engine.arrays_step import ArraysStep
from tests.support.processes.in_process_command import SMALL, Hotloop, commands

CPU = ("--device", "cpu")


@pytest.fixture
def hotloop(tmp_path: Path, monkeypatch, capfd) -> Iterator[Hotloop]:
    monkeypatch.setattr("hotloop.tuning.race_cache.races_folder", lambda: tmp_path / "kept")
    monkeypatch.setattr("hotloop.tuning.races.measure.WARM_UP_S", 0.01)
    monkeypatch.setattr("hotloop.tuning.races.rounds._WINDOW_S", {"cpu": 0.0005})
    (tmp_path / "task.py").write_text(
        f"{SMALL}task = make(epochs=4)\n"
        "class Mine(nn.Linear): pass\n"
        "odd = make(model=lambda: nn.Sequential(nn.ReLU(), Mine(4, 3)))\n"
    )
    with commands(tmp_path, monkeypatch, capfd) as run:
        yield run


def test_it_trains_and_goes_on_with_another_plan(hotloop: Hotloop, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    backward = ArraysStep._backward
    monkeypatch.setattr(ArraysStep, "_backward", lambda *args: steps.append(args[3]) or backward(*args))
    done = hotloop("train", "task.py", "--set", "engine=arrays", "--epochs", "2", "--run", "run", *CPU)
    assert done.code == 0, done.err
    assert "plan: engine=arrays" in done.err
    assert steps == list(range(8))
    assert 'engine = "arrays"' in Path("run/plan.toml").read_text()
    assert hotloop("evaluate", "run", "--on", "train").code == 0
    done = hotloop("train", "--resume", "run", "--epochs", "4", "--set", "engine=eager")
    assert done.code == 0, done.err
    assert steps == list(range(8))


def test_it_is_checked(hotloop: Hotloop) -> None:
    done = hotloop("check", "task.py", "--plan", "arrays", *CPU, "--json")
    assert done.code == 0, done.err
    assert done.document["parity"] in ("bitwise", "fp32-equivalent")


@pytest.mark.more
def test_its_layers_are_profiled(hotloop: Hotloop) -> None:
    done = hotloop("profile", "task.py", "--set", "engine=arrays", "--steps", "8", *CPU, "--json")
    assert done.code == 0, done.err
    found = done.document
    assert found["engine"] == "arrays" and found["bound"] in ("unknown", "overhead", "input")
    assert {"forward", "backward", "update"} <= found["phases"].keys()
    assert all(one["update_ms"] is not None and one["flops"] is None for one in found["modules"])
    assert not any("engine" in one["axes"] for one in found["remedies"])
    shown = hotloop("profile", "task.py", "--plan", "arrays", "--steps", "8", *CPU)
    assert "(engine=arrays) on cpu" in shown.err and "only a race measures" in shown.err
    assert "Nothing was found" not in shown.err and "FLOPs" not in shown.err


def test_what_it_cannot_write_out_is_one_line_and_no_run(hotloop: Hotloop) -> None:
    done = hotloop("train", "task.py:odd", "--plan", "arrays", "--run", "run", *CPU)
    assert done.code == 1
    (line,) = done.err.splitlines()
    assert line.startswith("error: engine=arrays doesn't support '1' (Mine)")
    assert not Path("run").exists()
