"""The GPU checks themselves, rehearsed on the CPU: parts run, and each can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import commands
from bench.gpu.catalogue import CHECKS, jobs_of
from bench.gpu.checks import beside, check, devices, faults, profile, race, steps
from bench.gpu.commands import CommandFailed, Done
from bench.gpu.loops import ratios
from bench.gpu.setting import ROOT, Setting


@pytest.fixture
def rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Setting:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(ROOT)
    return Setting("cpu", True, tmp_path)


@pytest.fixture
def on_cuda(tmp_path: Path) -> Setting:
    """A visit to a GPU, for what is judged there of documents that are made up here."""
    return Setting("cuda", False, tmp_path)


def test_each_check_has_its_file_and_each_part_a_limit_above_its_estimate() -> None:
    for each in CHECKS:
        assert (ROOT / "bench" / "gpu" / "checks" / f"{each.module.rpartition('.')[2]}.py").is_file()
    jobs = jobs_of(CHECKS)
    assert len({job.key for job in jobs}) == len(jobs)
    assert all(job.part.limit_s >= 2 * job.part.estimate_s for job in jobs)
    assert [each.name for each in CHECKS][:2] == ["devices", "train"]


def test_a_fault_that_is_not_planted_is_not_found(rehearsal: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "tf32_rounded", lambda program: None)
    assert faults.run("tf32-product", rehearsal).wrong == "not found under optimizer=foreach, graphs=step"


@pytest.mark.more
def test_honest_plans_are_trusted_and_a_refused_one_is_named(
    rehearsal: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert faults.run("honest-mlp", rehearsal).figure == "3 of 3 honest plans trusted"
    real = faults.proof_of
    monkeypatch.setattr(faults, "proof_of", lambda *given: real(*given, change=faults.tf32_rounded))
    assert "optimizer=foreach is broken" in faults.run("honest-mlp", rehearsal).wrong


def test_networks_are_measured_beside_the_tutorials_loop(rehearsal: Setting) -> None:
    found = beside.run("W7-bf16", rehearsal)
    assert found.wrong == ""
    assert {"tutorial", "tutorial bf16"} < set(found.figures["lanes"])


def test_a_step_slower_than_the_tutorials_loop_is_wrong(monkeypatch: pytest.MonkeyPatch, on_cuda: Setting) -> None:
    windows = {"tutorial": [1.0] * 10, "torch.compile": [1.0] * 10, "plan": [2.0] * 10}
    found = ratios(windows, "plan")
    assert found["tutorial"]["times_as_long"] == 0.5 and found["tutorial"]["high"] == 0.5
    monkeypatch.setattr("bench.gpu.loops.in_turn", lambda *given, **more: windows)
    monkeypatch.setattr("bench.gpu.loops.tutorial_steps", lambda *given, **more: None)
    monkeypatch.setattr("bench.gpu.loops.kernels_of", lambda *given, **more: {})
    monkeypatch.setattr("bench.gpu.tasks.task", lambda *given, **more: None)
    monkeypatch.setattr(beside, "programs_of", lambda *given: ({"plan": None}, {}))
    assert beside.run("W6", on_cuda).wrong.startswith("slower than the tutorial's loop")


def replied(document: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
    for module in modules:
        monkeypatch.setattr(module, "within", lambda *given, **more: Done(0, json.dumps(document), ""))


def test_a_plan_that_is_not_proven_is_wrong(monkeypatch: pytest.MonkeyPatch, on_cuda: Setting) -> None:
    found = {"parity": "broken", "reason": "the gradient differs", "seconds": 1.0, "errors": []}
    replied(found, monkeypatch, check)
    assert "the gradient differs" in check.run("W6", on_cuda).wrong
    replied(found | {"parity": "bitwise"}, monkeypatch, check)
    assert check.run("W6", on_cuda).wrong == ""
    assert "bitwise" in check.run("W6-bf16", on_cuda).wrong  # bf16 that computes as fp32 wasn't bf16


@pytest.mark.parametrize(("parity", "wrong"), [("unproven", True), ("fp32-equivalent", False)])
def test_a_winner_that_is_not_proven_is_wrong(
    monkeypatch: pytest.MonkeyPatch, on_cuda: Setting, parity: str, wrong: bool
) -> None:
    plans = [
        {"name": "baseline", "step_ms": 2.0},
        {"name": "auto", "step_ms": 1.0, "ratio": 2.0, "parity": parity, "parity_reason": "so it is"},
    ]
    verdict = {"task": "W2", "fingerprint": "", "plans": plans, "baseline": "baseline", "winner": "auto", "steps": 10}
    replied(verdict | {"machine": "", "versions": {}, "seconds": 1.0}, monkeypatch, race)
    assert bool(race.run("race-W2", on_cuda).wrong) is wrong


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        ({"phases": {"forward": 5.0, "backward": 4.0}}, "don't add up"),
        ({"ms": 3.0}, "differ from torch.profiler's"),
    ],
)
def test_a_profile_that_disagrees_is_wrong(
    monkeypatch: pytest.MonkeyPatch, on_cuda: Setting, changed: dict[str, Any], said: str
) -> None:
    operators = [{"name": "aten::mm", "ms": changed.get("ms", 4.0), "device": "cuda:0"}]
    document = {"phases": {"forward": 6.0, "backward": 4.0}, "step_ms": 10.0, "operators": operators}
    replied(document | {key: value for key, value in changed.items() if key == "phases"}, monkeypatch, profile)
    monkeypatch.setattr(profile, "operators_by_torch", lambda *given: {"aten::mm": 4.1})
    monkeypatch.setattr(profile, "steps_of_task", lambda *given: None)
    found = profile.run("task", on_cuda).wrong
    assert said in found and bool(said) == bool(found)


def test_what_is_planted_must_be_named_with_its_line(monkeypatch: pytest.MonkeyPatch, on_cuda: Setting) -> None:
    line = next(
        number for number, text in enumerate(profile.SCRIPT.read_text().splitlines(), 1) if "loss.item()" in text
    )
    remedy = {"cause": ".item() at each step", "where": f"/somewhere/{profile.SCRIPT.name}:{line}", "gain": 0.2}
    for remedies, is_right in (([remedy], True), ([remedy | {"where": "loop.py:1"}], False), ([], False)):
        replied({"remedies": remedies, "bound": "host"}, monkeypatch, profile)
        assert (profile.run("synchronisation", on_cuda).wrong == "") is is_right


def test_a_chip_without_a_rate_is_wrong(on_cuda: Setting) -> None:
    device = {"precisions": ["fp32", "tf32", "bf16"]}
    others = {"memory_bandwidth": 1e12, "launch_overhead": 4.0, "host_to_device": 1e10}
    good = {"fp32": 5e13, "tf32": 4e14, "bf16": 8e14}
    assert devices.wrong_with(device, good, others, on_cuda) == ""
    assert "bf16" in devices.wrong_with(device, {"fp32": 1.0, "tf32": 2.0}, others, on_cuda)
    assert "host_to_device" in devices.wrong_with(device, good, others | {"host_to_device": None}, on_cuda)
    assert "faster" in devices.wrong_with(device, good | {"tf32": 4e13}, others, on_cuda)


def test_axes_that_a_device_lacks_are_left_out(tmp_path: Path) -> None:
    asked = "residency=device graphs=32 compile=step rewrites=all"
    assert Setting("cuda", False, tmp_path).fitted(asked)["graphs"] == "32"
    assert set(Setting("cpu", True, tmp_path).fitted(asked)) == {"residency", "compile", "rewrites"}
    assert set(Setting("mps", False, tmp_path).fitted(asked)) == {"residency", "compile"}


def test_steps_that_need_more_memory_than_there_is_are_left_out(
    rehearsal: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotloop.core.hardware.machine.device_free_bytes", lambda device: 1000)
    found = steps.run("mlp-1e3", rehearsal)
    assert "GB are free" in found.wrong and found.figures["rows"] == []


def test_a_command_that_fails_is_an_error_with_its_words(rehearsal: Setting) -> None:
    with pytest.raises(CommandFailed, match="unknown axis 'nothing'"):
        print(commands.within("check", *rehearsal.task("W4"), "--set", "nothing=1", "--json", codes=(0, 1)).document)


@pytest.mark.more
def test_all_of_the_rehearsal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.gpu", "--rehearse", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
