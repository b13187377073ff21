"""Probing this machine: a real measurement of its CPU, how figures are taken, and how they are stored."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hotloop.core.hardware import benchmarks, limits, machine, probe
from hotloop.core.hardware.probe import measure_hardware
from hotloop.core.records.hardware import Device, Figure, Hardware, Speed

Measure = Callable[..., tuple[Speed, list[str]]]

CPU = Device("cpu", "cpu", "Some chip", None, ("fp32", "fp64"), None, Figure(2.0**31, "bytes", "os"))


@pytest.fixture(autouse=True)
def only_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test sees the CPU alone, on a machine with accelerators too."""
    monkeypatch.setattr(probe, "device_names", lambda: ["cpu"])


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Each test has a cache folder of its own."""
    monkeypatch.setattr(probe, "speed_folder", lambda: tmp_path / "devices")
    return tmp_path / "devices"


def planted(value: float = 1e9, **changes: object) -> Speed:
    """A complete speed of the CPU, as nobody measured it."""
    rate = Figure(value, "flop_per_s", "measured", "2026-01-31T12:00:00+00:00")
    figures: dict[str, object] = {
        "flop_per_s": dict.fromkeys(machine.cpu_precisions(machine.read_processor().vectors), rate),
        "memory_bandwidth": Figure(1e9, "bytes_per_s", "measured"),
        "launch_overhead": Figure(1.0, "us", "measured"),
    }
    return Speed(**{**figures, **changes})  # type: ignore[arg-type]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Plants `planted()` in place of measuring, and lists the devices that would have been measured."""
    calls: list[str] = []

    def measure(device: Device, threads: int, tick: Callable[[str], None]) -> tuple[Speed, list[str]]:
        calls.append(device.name)
        for name in benchmarks.figure_names(device):
            tick(name)
        return planted(), []

    monkeypatch.setattr(benchmarks, "measure_speed", measure)
    return calls


# --- this machine, really measured


@pytest.mark.more
def test_the_cpu_is_measured_once_and_nothing_else_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    really: Measure = benchmarks.measure_speed

    def counted(device: Device, threads: int, tick: Callable[[str], None]) -> tuple[Speed, list[str]]:
        calls.append(device.name)
        return really(device, threads, tick)

    monkeypatch.setattr(benchmarks, "measure_speed", counted)
    random, threads = torch.get_rng_state(), torch.get_num_threads()
    first = measure_hardware()
    assert calls == ["cpu"]
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.get_num_threads() == threads

    (cpu,) = first.devices
    assert set(cpu.speed.flop_per_s) == set(cpu.precisions) >= {"fp32", "fp64"}
    figures = [*cpu.speed.flop_per_s.values(), cpu.speed.memory_bandwidth, cpu.speed.launch_overhead]
    assert all(figure and figure.value > 0 and figure.source == "measured" and figure.when for figure in figures)
    assert cpu.speed.host_to_device is None

    second = measure_hardware()
    assert calls == ["cpu"], "the second call measures nothing"
    assert second.devices[0].speed == cpu.speed
    assert second.notes == first.notes


def test_what_is_known_of_this_machine(measured: list[str]) -> None:
    found = measure_hardware()
    (cpu,), core = found.devices, found.processor
    assert cpu.memory_total and cpu.memory_free
    assert 0 < cpu.memory_free.value <= cpu.memory_total.value
    assert 1 <= core.threads <= core.allowed_cores
    assert core.allowed_cores <= (core.logical_cores or core.allowed_cores)
    assert found.versions["torch"] == torch.__version__
    assert found.versions["python"] and found.versions["hotloop"]
    assert found.compiler is None or Path(found.compiler).exists()
    assert Hardware.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_nvidia_gpus_without_a_torch_that_uses_them(monkeypatch: pytest.MonkeyPatch, measured: list[str]) -> None:
    rows = "NVIDIA A, rev 2, 580.1\nNVIDIA B, 580.1"
    monkeypatch.setattr(limits, "program_output", lambda *command: rows if command[0] == "nvidia-smi" else None)
    found = measure_hardware()
    assert found.unused_gpus == ("NVIDIA A, rev 2", "NVIDIA B")
    assert found.versions["nvidia_driver"] == "580.1"


# --- storing


def test_progress_counts_every_figure_and_is_silent_when_all_are_stored(measured: list[str]) -> None:
    heard: list[tuple[str, int, int]] = []
    found = measure_hardware(progress=lambda *what: heard.append(what))
    total = len(benchmarks.figure_names(found.devices[0]))
    assert [done for _, done, _ in heard] == list(range(total + 1))
    assert {all_ for *_, all_ in heard} == {total}
    assert heard[0][0] == "cpu: fp32"
    heard.clear()
    measure_hardware(progress=lambda *what: heard.append(what))
    assert heard == []


def test_refresh_measures_anew(measured: list[str]) -> None:
    measure_hardware()
    measure_hardware()
    assert len(measured) == 1
    measure_hardware(refresh=True)
    assert len(measured) == 2


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut off": lambda content: content[: len(content) // 2],
    "not text": lambda content: b"\xff\xfe\x00",
    "other JSON": lambda content: b"[1, 2]",
    "of another machine": lambda content: content.replace(b'"host": "', b'"host": "x'),
    "a field missing": lambda content: content.replace(b'"unit"', b'"unity"'),
    "not a number": lambda content: content.replace(b"1000000000.0", b"NaN"),
    "text for a number": lambda content: content.replace(b"1000000000.0", b'"fast"'),
    "no speed": lambda content: content.replace(b'"speed"', b'"spead"'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_figures_are_measured_anew_with_a_note(damage: str, measured: list[str], folder: Path) -> None:
    assert measure_hardware().notes == ()
    (stored,) = folder.iterdir()
    whole = stored.read_bytes()
    assert DAMAGE[damage](whole) != whole
    stored.write_bytes(DAMAGE[damage](whole))

    found = measure_hardware()
    assert len(measured) == 2
    assert found.devices[0].speed == planted()
    assert "measured anew" in found.notes[0]
    assert str(stored) in found.notes[0]

    assert measure_hardware().notes == (), "the damaged file was replaced"
    assert len(measured) == 2


@pytest.mark.parametrize("change", ["torch", "threads", "host", "model"])
def test_figures_of_another_setting_are_not_taken(
    change: str, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_hardware()
    if change == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9.9")
    elif change == "threads":
        monkeypatch.setattr(limits, "sensible_threads", lambda *_: 77)
    elif change == "host":
        monkeypatch.setattr(probe.platform, "node", lambda: "another-host")
    else:
        monkeypatch.setattr(machine, "_cpu_model", lambda: "another chip")
    assert measure_hardware().notes == ()
    assert len(measured) == 2


def test_a_cache_that_cannot_be_written_costs_a_note_only(
    measured: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_text("a file where the folder should be")
    found = measure_hardware()
    assert found.devices[0].speed == planted()
    assert any("couldn't be stored" in note for note in found.notes)


def test_a_figure_that_could_not_be_taken_is_noted_left_unknown_and_not_remembered(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    def figure(self: benchmarks.DeviceBenchmark, name: str) -> Figure:
        if name == "fp64":
            raise torch.OutOfMemoryError("out of memory\nand much more")
        return Figure(1.0, "us", "measured")

    monkeypatch.setattr(benchmarks.DeviceBenchmark, "figure", figure)
    found = measure_hardware()
    assert "fp32" in found.devices[0].speed.flop_per_s
    assert "fp64" not in found.devices[0].speed.flop_per_s
    assert found.notes == ("cpu: fp64 couldn't be measured: out of memory",)
    assert not folder.exists()


# --- how it is measured


def test_figures_follow_from_the_time_and_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that says half a second for anything, the figures are arithmetic."""
    monkeypatch.setattr(benchmarks.BenchmarkClock, "best", lambda self, work, budget_s=0.0: work() is None or 0.5)
    bench = benchmarks.DeviceBenchmark(CPU, threads=1)
    product = bench.figure("fp32")
    assert product.value == 2 * 256**3 / 0.5
    assert "256 x 256" in product.how
    copy = bench.figure(benchmarks.BANDWIDTH)
    assert copy.value == 2 * min(2**28, 2**31 // 8 // 2) / 0.5
    assert bench.figure(benchmarks.LAUNCH).value == 0.5e6


def test_products_grow_until_they_take_long_or_the_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def sizes(seconds_of: Callable[[int], float], free_bytes: float) -> list[int]:
        tried: list[int] = []
        monkeypatch.setattr(
            benchmarks.DeviceBenchmark, "_product", lambda self, size, dtype: tried.append(size) or {"mm": None}
        )
        monkeypatch.setattr(benchmarks.BenchmarkClock, "best", lambda self, work, budget_s: seconds_of(tried[-1]))
        device = Device("cpu", "cpu", memory_free=Figure(free_bytes, "bytes", "os"))
        benchmarks.DeviceBenchmark(device, threads=1).matrix("fp32")
        return tried

    slow, fast = (lambda size: size**3 / 1e9), (lambda size: 1e-9)
    assert sizes(slow, 2.0**40) == [256]
    assert sizes(lambda size: size**3 / 1e11, 2.0**40) == [256, 512, 1024]
    assert sizes(fast, 2.0**40) == [256, 512, 1024, 2048, 4096, 8192]
    assert sizes(fast, 8 * 3 * 4 * 1024.0**2) == [256, 512, 1024]


def test_the_library_counts_that_multiplies_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is, it's the same product."""
    bench = benchmarks.DeviceBenchmark(CPU, threads=1)
    products = bench._product(256, torch.float32)
    if "oneDNN" not in products:
        pytest.skip("this torch was built without oneDNN")
    assert torch.allclose(products["torch.mm"](), products["oneDNN"](), atol=1e-3)
    assert list(bench._product(256, torch.float64)) == ["torch.mm"]
    monkeypatch.setattr(benchmarks.DeviceBenchmark, "_product", lambda self, size, dtype: products)
    for fast in products:
        seconds = {products[by]: 0.25 if by == fast else 0.5 for by in products}
        monkeypatch.setattr(
            benchmarks.BenchmarkClock, "best", lambda self, work, budget_s, seconds=seconds: seconds[work]
        )
        found = bench.matrix("fp32")
        assert found.value == 2 * 256**3 / 0.25 and f"matrices by {fast}" in found.how


def test_one_thread_counts_where_several_are_kept_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()

    def alone() -> bool:
        return torch.get_num_threads() == 1

    monkeypatch.setattr(benchmarks.BenchmarkClock, "best", lambda self, work, budget_s=0.0: 0.25 if alone() else 0.5)
    found, notes = benchmarks.measure_speed(CPU, 2, lambda name: None)
    assert found.flop_per_s["fp32"].value == 2 * 256**3 / 0.25
    assert "threads: 1" in found.flop_per_s["fp32"].how
    assert notes == []
    assert torch.get_num_threads() == before

    monkeypatch.setattr(benchmarks.BenchmarkClock, "best", lambda self, work, budget_s=0.0: 0.5 if alone() else 0.25)
    found, notes = benchmarks.measure_speed(CPU, 2, lambda name: None)
    assert "threads: 2" in found.flop_per_s["fp32"].how
    assert notes == []


def test_a_clock_takes_the_best_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call warms up, then windows grow until they are long enough; a disturbed one does no harm."""
    windows = iter([9.0, 0.1 * benchmarks.CPU_WINDOW_S, 0.2 * benchmarks.CPU_WINDOW_S, 0.4, 5.0, 0.8, 99.0])
    calls: list[int] = []

    def seconds(self: benchmarks.BenchmarkClock, work: object, count: int = 1) -> float:
        calls.append(count)
        return next(windows)

    monkeypatch.setattr(benchmarks.BenchmarkClock, "seconds", seconds)
    assert benchmarks.BenchmarkClock(torch.device("cpu")).best(lambda: None, 0.5) == 0.4 / 4
    assert calls == [1, 1, 2, 4, 4, 4]


@pytest.mark.parametrize("choice", ["highest", "high", "medium"])
def test_measuring_keeps_the_arithmetic_that_the_program_chose(choice: str) -> None:
    matmul = torch.backends.cuda.matmul
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(choice)
    try:
        chosen = matmul.fp32_precision
        with benchmarks._float32_arithmetic("ieee"):
            assert matmul.fp32_precision == "ieee"
        with benchmarks._float32_arithmetic("tf32"):
            assert matmul.fp32_precision == "tf32"
        assert matmul.fp32_precision == chosen
        assert torch.get_float32_matmul_precision() == choice
    finally:
        torch.set_float32_matmul_precision(before)


def test_measuring_is_not_changed_by_autocast_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(
        benchmarks.DeviceBenchmark, "figure", lambda self, name: seen.append(torch.is_autocast_enabled("cpu"))
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        benchmarks.measure_speed(CPU, 1, lambda name: None)
    assert seen
    assert not any(seen)


def test_accelerators_are_measured_with_their_link(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Device("cuda:0", "cuda", precisions=("fp32", "tf32"))
    assert benchmarks.figure_names(gpu) == ["fp32", "tf32", benchmarks.BANDWIDTH, benchmarks.LAUNCH, benchmarks.LINK]
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    clock = benchmarks.BenchmarkClock(torch.device("cuda", 0))
    clock.seconds(lambda: waited.append(torch.device("cpu")), 2)
    gpu_, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert waited == [gpu_, cpu, cpu, gpu_], "waits before it starts the clock, and before it stops it"
