"""Measured rates of the chip, by `hotloop devices`."""

from __future__ import annotations

from typing import Any

from bench.gpu.commands import within
from bench.gpu.setting import Result, Setting

NEEDED = ("memory_bandwidth", "launch_overhead", "host_to_device")


def run(part: str, setting: Setting) -> Result:
    document = within("devices", "--device", setting.device, "--refresh", "--json").document
    device = document["devices"][0]
    rates = {name: figure["value"] for name, figure in device["speed"]["flop_per_s"].items()}
    others = {name: (device["speed"].get(name) or {}).get("value") for name in NEEDED}
    return Result(figure_of(rates, others), {"device": device}, wrong_with(device, rates, others, setting))


def figure_of(rates: dict[str, float], others: dict[str, float | None]) -> str:
    parts = [f"{name} {rate / 1e12:.3g}" for name, rate in rates.items()]
    told = f"{', '.join(parts)} TFLOP/s"
    if others["memory_bandwidth"]:
        told += f"; memory {others['memory_bandwidth'] / 1e9:.3g} GB/s"
    if others["launch_overhead"]:
        told += f"; launch {others['launch_overhead']:.3g} us"
    if others["host_to_device"]:
        told += f"; copy to it {others['host_to_device'] / 1e9:.3g} GB/s"
    return told


def wrong_with(
    device: dict[str, Any], rates: dict[str, float], others: dict[str, float | None], setting: Setting
) -> str:
    """What is missing or contradicts itself; empty if nothing is."""
    if absent := [name for name in device["precisions"] if name not in rates]:
        return f"no rate was measured for {', '.join(absent)}"
    if setting.device != "cuda":
        return ""
    if absent := [name for name, value in others.items() if not value]:
        return f"{', '.join(absent)} was not measured"
    if "tf32" in rates and setting.judges_times and not rates["fp32"] < rates["tf32"] < rates["bf16"]:
        return "fp32, TF32 and bf16 aren't each faster than the one before"
    return ""
