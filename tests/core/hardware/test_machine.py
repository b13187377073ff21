"""What the system and its drivers say of a machine: precisions, memory, limits, compiler.

Other chips, systems and containers are played by fakes of what torch and the system say.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hotloop.core.hardware import limits, machine


@pytest.mark.parametrize(
    ("vectors", "precisions"),
    [
        ((), ("fp32", "fp64")),
        (("avx2", "avx512_f", "avx512_vnni"), ("fp32", "fp64")),
        (("avx512_bf16",), ("fp32", "bf16", "fp64")),
        (("amx_tile", "amx_int8"), ("fp32", "fp64")),
        (("amx_bf16", "amx_fp16"), ("fp32", "bf16", "fp16", "fp64")),
        (("neon", "bf16", "fp16_arith"), ("fp32", "bf16", "fp16", "fp64")),
    ],
)
def test_a_cpu_has_a_precision_only_with_instructions_for_it(vectors, precisions) -> None:
    assert machine.cpu_precisions(vectors) == precisions


@pytest.mark.parametrize(
    ("capability", "amd", "precisions"),
    [
        ((7, 5), None, ("fp32", "fp16", "fp64")),
        ((8, 0), None, ("fp32", "tf32", "bf16", "fp16", "fp64")),
        ((12, 0), None, ("fp32", "tf32", "bf16", "fp16", "fp64")),
        ((9, 4), "gfx942:sramecc+", ("fp32", "tf32", "bf16", "fp16", "fp64")),
        ((11, 0), "gfx1100", ("fp32", "bf16", "fp16", "fp64")),
    ],
)
def test_precisions_of_a_gpu_follow_from_its_generation(capability, amd, precisions) -> None:
    assert machine.cuda_precisions(capability, amd) == precisions


def test_a_cuda_device_is_described_by_what_its_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = SimpleNamespace(name="NVIDIA Some GPU", major=9, minor=0)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: {1: facts}[index])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: {1: (3, 8)}[index])
    found = machine.describe_device("cuda:1", ())
    assert (found.kind, found.model, found.capability) == ("cuda", "NVIDIA Some GPU", "9.0")
    assert found.memory_total and found.memory_total.value == 8
    assert found.memory_free and found.memory_free.value == 3
    assert "tf32" in found.precisions


def test_an_xpu_device_whose_driver_tells_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(index: int) -> None:
        raise RuntimeError("not supported")

    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda index: SimpleNamespace(name="Arc", has_fp16=True))
    monkeypatch.setattr(torch.xpu, "mem_get_info", refuse)
    found = machine.describe_device("xpu:0", ())
    assert (found.model, found.precisions) == ("Arc", ("fp32", "fp16"))
    assert found.memory_total is found.memory_free is None


def test_an_mps_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 10)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 4)
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: (major, minor) <= (13, 9))
    monkeypatch.setattr(limits, "program_output", lambda *command: "Apple M9")
    found = machine.describe_device("mps", ())
    assert (found.model, found.precisions) == ("Apple M9", ("fp32", "fp16"))
    assert found.memory_free and found.memory_free.value == 6


# --- limits on this process


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_tightest_control_group_counts(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "self": "0::/job/step\n",
            "fs/cpu.max": "max 100000\n",
            "fs/job/cpu.max": "150000 100000\n",
            "fs/job/step/cpu.max": "400000 100000\n",
            "fs/job/memory.max": "1000\n",
            "fs/job/memory.current": "700\n",
            "fs/job/memory.stat": "anon 500\ninactive_file 150\n",
            "fs/job/step/memory.max": "max\n",
            "fs/job/step/memory.current": "600\n",
        },
    )
    found = limits.cgroup_limits(tmp_path / "fs", tmp_path / "self")
    assert found == limits.CgroupLimits(cores=1.5, memory_bytes=1000, free_bytes=450)


def test_control_groups_of_the_first_version(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "self": "4:cpu,cpuacct:/docker/x\n7:memory:/docker/x\n1:name=systemd:/\n",
            "fs/cpu,cpuacct/cpu.cfs_quota_us": "200000\n",
            "fs/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "fs/memory/memory.limit_in_bytes": "5000\n",
            "fs/memory/memory.usage_in_bytes": "6000\n",
            "fs/memory/memory.stat": "total_inactive_file 100\n",
        },
    )
    found = limits.cgroup_limits(tmp_path / "fs", tmp_path / "self")
    assert found == limits.CgroupLimits(cores=2.0, memory_bytes=5000, free_bytes=0)


def test_no_control_groups_no_limits(tmp_path: Path) -> None:
    assert limits.cgroup_limits(tmp_path / "none", tmp_path / "none") == limits.CgroupLimits()


def test_limits_bound_the_memory_that_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    found = limits.CgroupLimits(memory_bytes=5000, free_bytes=200)
    monkeypatch.setattr(limits, "cgroup_limits", lambda: found)
    cpu = machine.describe_device("cpu", ())
    assert cpu.memory_total and cpu.memory_total.value == 5000
    assert cpu.memory_free and cpu.memory_free.value == 200


@pytest.mark.parametrize(
    ("allowed", "physical", "quota", "threads"),
    [(16, 8, None, 8), (2, 8, None, 2), (16, 8, 3.9, 3), (16, 8, 0.5, 1), (4, None, None, 4), (1, 1, 8.0, 1)],
)
def test_a_sensible_number_of_threads(allowed: int, physical: int | None, quota: float | None, threads: int) -> None:
    assert limits.sensible_threads(allowed, physical, quota) == threads


def test_two_threads_of_one_core_are_one_physical_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.sys, "platform", "linux")
    for logical, core in enumerate((0, 1, 0, 1)):
        folder = f"cpu{logical}/topology"
        write(tmp_path, {f"{folder}/physical_package_id": "0\n", f"{folder}/core_id": f"{core}\n"})
    assert limits.physical_core_count([0, 1, 2, 3], tmp_path) == 2
    assert limits.physical_core_count([0, 2], tmp_path) == 1


def test_on_a_mac_the_fast_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits.sys, "platform", "darwin")
    monkeypatch.setattr(limits, "program_output", lambda *command: "6")
    assert limits.physical_core_count(list(range(10))) == 6


# --- the compiler


def test_the_compiler_is_the_one_torch_would_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.delenv("CXX", raising=False)
    for system, name in (("linux", "g++"), ("win32", "cl"), ("darwin", "clang++")):
        monkeypatch.setattr(machine.sys, "platform", system)
        assert machine.find_compiler() == f"/bin/{name}"
    monkeypatch.setenv("CXX", "clang++-18")
    assert machine.find_compiler() == "/bin/clang++-18"


def test_a_mac_without_developer_tools_has_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    monkeypatch.setattr(machine.shutil, "which", lambda name: "/usr/bin/clang++")
    monkeypatch.setattr(limits, "program_output", lambda *command: None)
    assert machine.find_compiler() is None


def test_a_program_that_is_missing_or_fails_tells_nothing() -> None:
    assert limits.program_output("no-such-program-anywhere") is None
