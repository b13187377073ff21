"""`hotloop devices` as a real process: its table, its JSON document, and what a wrong name says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hotloop.core.records.hardware import Hardware


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with a home, and so a cache folder, of this file's own, so the CPU is measured once."""
    folder = str(tmp_path_factory.mktemp("home"))
    return {**os.environ, "HOME": folder, "XDG_CACHE_HOME": folder, "LOCALAPPDATA": folder}


@pytest.mark.more
def test_json_is_one_document_with_all_facts_and_is_measured_once(run_cli, home) -> None:
    first = run_cli("devices", "--device", "cpu", "--json", env=home)
    assert first.returncode == 0, first.stderr
    document = json.loads(first.stdout)
    assert document.pop("advice")
    (cpu,) = Hardware.from_dict(document).devices
    assert cpu.name == "cpu"
    assert set(cpu.speed.flop_per_s) == set(cpu.precisions)

    again = json.loads(run_cli("devices", "--device", "cpu", "--json", env=home).stdout)
    assert again["devices"][0]["speed"] == document["devices"][0]["speed"], "stored, with the time of the first"


@pytest.mark.more
def test_the_table_goes_to_stderr_with_advice_below(run_cli, home) -> None:
    done = run_cli("devices", "--device", "cpu", env=home)
    assert (done.returncode, done.stdout) == (0, "")
    for part in (
        "fp32",
        "memory bandwidth",
        "launch overhead",
        "vector extensions",
        "threads",
        "C++ compiler",
    ):
        assert part in done.stderr
    assert "CPU" in done.stderr.splitlines()[-1] + done.stderr.splitlines()[-2]


@pytest.mark.more
def test_a_damaged_store_is_noted_and_replaced(run_cli, home) -> None:
    run_cli("devices", "--device", "cpu", env=home)
    stored = [path for path in Path(home["HOME"]).rglob("*.json") if path.parent.name == "devices"]
    assert len(stored) == 1
    stored[0].write_text("{", encoding="utf-8")
    done = run_cli("devices", "--device", "cpu", "--json", env=home)
    assert done.returncode == 0, done.stderr
    assert "measured anew" in json.loads(done.stdout)["notes"][0]
    assert json.loads(stored[0].read_text(encoding="utf-8"))["speed"]


@pytest.mark.parametrize("name", ["tpu", "cuda:99"])
def test_a_wrong_device_is_one_clear_line(name: str, run_cli, home) -> None:
    done = run_cli("devices", "--device", name, "--json", env=home)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert repr(name) in lines[0]
    assert "cpu" in lines[0]
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "DeviceError"
    assert f"error: {error['message']}" == lines[0]
