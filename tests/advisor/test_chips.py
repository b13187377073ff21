"""Each fact of the table has a unit, a plausible value and a source; names match as users write them."""

from __future__ import annotations

import csv
import re

import pytest

from hotloop.advisor.chips import FACTS, PRECISIONS, chips, cpu_chip, find_chip, nearest_names, sources
from hotloop.errors import HotloopError

RANGES = {
    "year": (2016, 2026),
    "units": (4, 400),
    "clock_hz": (1e9, 5e9),
    "vector_flop_per_s": (0.5e12, 200e12),
    "memory_bytes": (6e9, 600e9),
    "bandwidth_bytes_per_s": (50e9, 8.2e12),
    "l2_bytes": (1e6, 600e6),
    "link_bytes_per_s": (20e9, 1e12),
    "pcie_bytes_per_s": (7e9, 500e9),
    "board_w": (40, 1500),
}


@pytest.mark.parametrize("chip", chips(), ids=lambda chip: chip.name)
def test_facts_have_plausible_values_and_sources(chip):
    for fact, (low, high) in RANGES.items():
        value = getattr(chip, fact)
        assert value is None or low <= value <= high, f"{fact} of {value}"
    for source in (chip.source, chip.details):
        assert re.search(r"\(20[12]\d-\d\d\)$", source), f"{source} has no date"
    assert chip.kind in ("gpu", "integrated", "cpu")
    assert set(chip.flop_per_s) <= set(PRECISIONS)
    assert all(0.05e12 <= rate <= 6e15 for rate in chip.flop_per_s.values())
    assert chip.year is not None and chip.units is not None


@pytest.mark.parametrize("chip", chips(), ids=lambda chip: chip.name)
def test_rates_agree_with_each_other(chip):
    """A rate in the wrong unit or with sparsity counted doesn't fit to the chip's other rates."""
    lanes = chip.vector_flop_per_s / (chip.units * (chip.clock_hz or 1.6e9))
    assert 8 <= lanes <= 530, f"{lanes:.0f} operations per unit and cycle"
    if chip.kind != "cpu":
        assert 3 <= chip.vector_flop_per_s / chip.bandwidth_bytes_per_s <= 120
    tensor = chip.flop_per_s.get("bf16")
    if tensor and chip.kind != "cpu":
        assert 1.9 <= tensor / chip.vector_flop_per_s <= 34
    if "fp8" in chip.flop_per_s:
        assert chip.flop_per_s["fp8"] == pytest.approx(2 * chip.flop_per_s["fp16"], rel=0.02)
    if chip.maker == "NVIDIA" and "tf32" in chip.flop_per_s and "bf16" in chip.flop_per_s:
        assert chip.flop_per_s["bf16"] == pytest.approx(2 * chip.flop_per_s["tf32"], rel=0.03)


def test_the_table_has_the_chips_it_promises():
    names = {chip.name for chip in chips()}
    assert len(names) == len(chips()) >= 40
    for name in ("GTX 1080 Ti", "B200", "MI100", "MI355X", "M1", "M4", "T4", "L4", "L40S", "RTX 5090", "Xeon 8380"):
        assert find_chip(name).name in names


def test_each_source_is_used_and_dated():
    used = {chip.source for chip in chips()} | {chip.details for chip in chips()}
    others = {text for text in sources().values() if text not in used}
    assert not others
    assert "," in (FACTS / "chips.csv").read_text(encoding="utf-8")


COMMON = (
    *(
        "GTX 1080 Ti",
        "RTX 2080 Ti",
        "RTX 3060",
        "RTX 3080",
        "RTX 3090",
        "RTX 4060",
        "RTX 4070",
        "RTX 4080",
        "RTX 4090",
        "RTX 5090",
    ),
    *(
        "T4",
        "V100",
        "P100",
        "L4",
        "L40S",
        "A10",
        "A10G",
        "A100 PCIe 40GB",
        "A100 PCIe 80GB",
        "A100 SXM 40GB",
        "A100 SXM 80GB",
    ),
    *(
        "H100 PCIe",
        "H100 SXM",
        "H200",
        "B200",
        "MI100",
        "MI210",
        "MI250X",
        "MI300X",
        "MI325X",
        "MI355X",
        "M1",
        "M2",
        "M3",
        "M4",
    ),
)


def test_facts_of_common_chips_were_compared_with_another_public_source():
    with (FACTS / "comparisons.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    compared = {name for row in rows for name in row["chips"].split("|")}
    assert compared <= {chip.name for chip in chips()}
    assert {find_chip(name).name for name in COMMON} <= compared
    for row in rows:
        assert row["source"] and row["facts"] and row["where"].startswith("https://")


@pytest.mark.parametrize("chip", [one for one in chips() if one.name.startswith("RTX ") and "bf16" in one.flop_per_s])
def test_geforce_tensor_rates_with_fp32_accumulation_are_twice_the_fp32_rate(chip):
    """GeForce cards halve this rate; NVIDIA's professional cards and white papers of data centre chips don't."""
    ratio = chip.flop_per_s["bf16"] / chip.vector_flop_per_s
    assert ratio == pytest.approx(4 if chip.name.startswith(("RTX A", "RTX 6000", "RTX PRO")) else 2, rel=0.02)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("Tesla T4", "Tesla T4"),
        ("t4", "Tesla T4"),
        ("A100 SXM 40GB", "A100 SXM4 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 SXM4 80GB"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40GB"),
        ("a100", "A100 SXM4 80GB"),
        ("a100-40gb", "A100 SXM4 40GB"),
        ("h100-sxm", "H100 SXM5 80GB"),
        ("H100", "H100 SXM5 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM5 80GB"),
        ("NVIDIA H200", "H200 SXM 141GB"),
        ("rtx4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 2080 Ti", "RTX 2080 Ti"),
        ("geforce_gtx-1080ti", "GTX 1080 Ti"),
        ("GTX 1080", "GTX 1080"),
        ("V100", "V100 SXM2 32GB"),
        ("Tesla V100-PCIE-32GB", "V100 PCIe 32GB"),
        ("Tesla P100-PCIE-16GB", "Tesla P100 PCIe 16GB"),
        ("AMD Instinct MI210", "MI210"),
        ("AMD Instinct MI300X", "MI300X"),
        ("Apple M1", "M1"),
        ("m2 max", "M2 Max"),
        ("A10", "A10"),
        ("A10G", "A10G"),
        ("L40", "L40"),
        ("3060", "RTX 3060 12GB"),
        ("RTX 3060", "RTX 3060 12GB"),
        ("TITAN Xp", "TITAN Xp"),
        ("NVIDIA B200", "B200 SXM 180GB"),
    ],
)
def test_names_match_without_case_vendor_and_hyphens(given, name):
    assert find_chip(given).name == name


@pytest.mark.parametrize("name", ["H100X", "RTX 9999", "", "A", "4090 Laptop", "banana", "MI", "M10", "A1000"])
def test_an_unknown_chip_is_an_error_of_one_line(name):
    with pytest.raises(HotloopError, match="unknown chip") as caught:
        find_chip(name)
    assert "\n" not in str(caught.value)


def test_an_unknown_chip_names_the_nearest():
    assert "RTX 4090" in nearest_names("rtx 4091")
    with pytest.raises(HotloopError, match="RTX 2080"):
        find_chip("RTX 2081 Ti")


def test_missing_rates_are_missing_and_slow_fp16_runs_as_fp32():
    assert "tf32" not in find_chip("V100").flop_per_s
    assert find_chip("M1").board_w is None
    assert find_chip("GTX 1080 Ti").peak("fp16") == find_chip("GTX 1080 Ti").peak("fp32")
    with pytest.raises(HotloopError, match="precision 'int3'"):
        find_chip("T4").peak("int3")


def test_a_cpu_is_described_by_cores_vectors_and_clock():
    assert find_chip("cpu 16 cores avx512 2.5 GHz").peak("fp32") == pytest.approx(16 * 2.5e9 * 64)
    assert find_chip("CPU 8 cores").peak("fp32") == cpu_chip(8, 256, 2.5e9).peak("fp32")
    for wrong in ("cpu", "cpu 0 cores", "cpu 4 cores 900 GHz"):
        with pytest.raises(HotloopError, match="cores, vector width and clock"):
            find_chip(wrong)
    with pytest.raises(HotloopError, match="width of 100 bits"):
        cpu_chip(4, 100, 1e9)
