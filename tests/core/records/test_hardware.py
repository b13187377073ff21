"""Hardware records: what they refuse, that JSON loses nothing of them, and what is said of them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace

import pytest
from rich.console import Console

from hotloop.core.records.hardware import Device, Figure, Hardware, Processor, Speed
from hotloop.errors import HotloopError
from hotloop.report.hardware import advice, format_figure, hardware_page

WHEN = "2026-01-31T12:00:00+00:00"


def flops(value: float) -> Figure:
    return Figure(value, "flop_per_s", "measured", WHEN, "product of two 512 x 512 matrices")


def device(name: str = "cpu", fp32: float | None = 1e11) -> Device:
    speed = Speed(
        flop_per_s={} if fp32 is None else {"fp32": flops(fp32)},
        memory_bandwidth=Figure(2.5e10, "bytes_per_s", "measured", WHEN),
        launch_overhead=Figure(1.5, "us", "measured", WHEN),
    )
    total = Figure(2.0**35, "bytes", "os", WHEN)
    return Device(name, name.partition(":")[0], "Some chip [rev 2]", None, ("fp32", "fp64"), total, None, speed)


def hardware(*devices: Device, **changes: object) -> Hardware:
    machine = Hardware(
        system="Linux 6.1",
        processor=Processor("Some chip", "x86_64", ("avx", "avx2"), "AVX2", 4, 8, 6, 2.5, 2),
        devices=devices or (device(),),
        versions={"python": "3.12.1", "torch": "2.13.0+cpu", "hotloop": "0.1.0", "cuda": None},
        compiler="/usr/bin/g++",
        notes=("one thing",),
    )
    return replace(machine, **changes)  # type: ignore[arg-type]


def test_nothing_is_lost_through_json() -> None:
    before = hardware(device(), device("cuda:0", 3.3e13), unused_gpus=("A GPU",))
    assert Hardware.from_dict(json.loads(json.dumps(before.to_dict()))) == before


def test_a_record_names_its_format_and_version() -> None:
    written = hardware().to_dict()
    assert (written["format"], written["version"]) == ("hotloop.hardware", 1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(version=2), "version 2"),
        (lambda d: d.pop("format"), "format None"),
        (lambda d: d.pop("processor"), "processor"),
        (lambda d: d.update(colour="red"), "colour"),
        (lambda d: d["devices"][0].update(colour="red"), "devices.0.colour"),
        (lambda d: d["devices"][0]["speed"]["flop_per_s"]["fp32"].update(value="fast"), "fp32.value"),
        (lambda d: d["devices"][0]["speed"]["flop_per_s"]["fp32"].update(value=float("nan")), "nan"),
        (
            lambda d: d["devices"][0]["speed"]["launch_overhead"].update(unit="fortnights"),
            "launch_overhead.unit",
        ),
    ],
)
def test_a_wrong_record_is_refused_by_the_name_of_what_is_wrong(change, says: str) -> None:
    written = json.loads(json.dumps(hardware().to_dict()))
    change(written)
    with pytest.raises(HotloopError, match=says):
        Hardware.from_dict(written)


@pytest.mark.parametrize("data", [None, [], "text", {}])
def test_what_is_no_record_at_all_is_refused(data: object) -> None:
    with pytest.raises(HotloopError, match="format None"):
        Hardware.from_dict(data)
    with pytest.raises(HotloopError):
        Speed.from_dict([data])


@pytest.mark.parametrize(
    ("value", "unit", "source"),
    [
        (float("nan"), "us", "measured"),
        (float("inf"), "us", "measured"),
        (-1.0, "us", "measured"),
        (1.0, "hours", "measured"),
        (1.0, "us", "hearsay"),
    ],
)
def test_a_figure_needs_a_number_a_unit_and_a_source(value: float, unit, source) -> None:
    with pytest.raises(HotloopError):
        Figure(value, unit, source)


def test_records_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        device().model = "another"  # type: ignore[misc]


def test_a_device_is_found_by_its_name_and_no_other_in_its_place() -> None:
    machine = hardware(device(), device("cuda:0"))
    assert machine.device("cuda:0") is machine.devices[1]
    assert machine.device("cuda:1") is None


def test_records_need_neither_torch_nor_pydantic_to_be_made() -> None:
    code = (
        "import sys, hotloop.core.records.hardware as h; h.Hardware('x', None, (), {}).to_dict()\n"
        "sys.exit(', '.join({'torch', 'pydantic'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("figure", "text"),
    [
        (Figure(1.234e12, "flop_per_s", "measured"), "1.23 TFLOP/s"),
        (Figure(9.87e14, "flop_per_s", "measured"), "987 TFLOP/s"),
        (Figure(4.5e7, "flop_per_s", "measured"), "45 MFLOP/s"),
        (Figure(2.04e10, "bytes_per_s", "measured"), "20.4 GB/s"),
        (Figure(2.0**34, "bytes", "os"), "16 GiB"),
        (Figure(3.0 * 2**18, "bytes", "os"), "0.75 MiB"),
        (Figure(0.0, "bytes", "os"), "0 MiB"),
        (Figure(4.25, "us", "measured"), "4.25 us"),
        (Figure(2500.0, "us", "measured"), "2.5 ms"),
        (None, "unknown"),
    ],
)
def test_figures_are_shown_with_three_digits_and_a_fitting_unit(figure: Figure | None, text: str) -> None:
    assert format_figure(figure) == text


def shown(machine: Hardware, width: int = 120) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(hardware_page(machine))
    return captured.get()


def test_the_table_shows_every_device_and_leaves_square_brackets_alone() -> None:
    text = shown(hardware(*(device(name) for name in ("cpu", *(f"cuda:{n}" for n in range(8))))))
    assert all(f"cuda:{n}" in text for n in range(8))
    assert "Some chip [rev 2]" in text
    assert "2.5 cores' time" in text
    assert "Note: one thing" in text


def test_the_table_tells_what_is_unknown_from_what_cannot_be() -> None:
    text = shown(hardware(device()))
    row = {line.split()[1]: line for line in text.splitlines() if "products" in line}
    assert set(row) == {"fp32", "fp64"}, "precisions that no device has are left out"
    assert "100 GFLOP/s" in row["fp32"]
    assert "unknown" in row["fp64"], "it has fp64, but wasn't measured"


def test_advice_without_an_accelerator() -> None:
    assert "No accelerator" in advice(hardware())


def test_advice_with_a_gpu_that_this_build_of_torch_cannot_use() -> None:
    text = advice(hardware(unused_gpus=("NVIDIA RTX 9",)))
    assert "NVIDIA RTX 9" in text
    assert "2.13.0+cpu" in text
    assert "CUDA build" in text


def test_advice_with_a_gpu_that_a_cuda_build_cannot_reach() -> None:
    text = advice(hardware(unused_gpus=("NVIDIA RTX 9",), versions={"torch": "2.13.0+cu130", "cuda": "13.0"}))
    assert "driver" in text
    assert "CUDA build" not in text


def test_advice_compares_what_was_measured() -> None:
    assert "25 times" in advice(hardware(device("cpu", 2e12), device("cuda:0", 5e13)))
    assert "--device cpu" in advice(hardware(device("cpu", 2e12), device("mps", 1e12)))
    assert "--device cuda:1" in advice(hardware(device(), device("cuda:0", 5e12), device("cuda:1", 5e13)))


def test_advice_claims_nothing_that_was_not_measured() -> None:
    assert "times" not in advice(hardware(device(), device("cuda:0", None)))
    assert "times" not in advice(hardware(device("cuda:0")))


@pytest.mark.parametrize(
    ("system", "remedy"),
    [("Linux 6.1", "g++"), ("Darwin 24.1", "xcode-select"), ("Windows 11", "Visual Studio")],
)
def test_advice_on_a_missing_compiler_fits_the_system(system: str, remedy: str) -> None:
    assert remedy in advice(hardware(system=system, compiler=None))
    assert remedy not in advice(hardware(system=system))


def test_advice_is_one_line() -> None:
    machines = (hardware(), hardware(unused_gpus=("A",), compiler=None), hardware(device(), device("mps")))
    assert not any("\n" in advice(machine) for machine in machines)
