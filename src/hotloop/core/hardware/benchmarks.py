"""Measures the speed of a device within a few seconds.

Other programs can only slow a measurement, so each figure is the best of many short windows; see `machine_load`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import torch
from torch import Tensor

from hotloop.core.hardware.machine import current_time
from hotloop.core.records.hardware import Device, Figure, Speed, Unit

METHOD = 3  # increases with changes of the measurement, which invalidate stored figures

# Short windows fit between other programs' time slices. On an accelerator the wait for the device must be negligible.
CPU_WINDOW_S, ACCELERATOR_WINDOW_S = 0.0005, 0.01
BUDGET_S = 0.5  # per figure
LONG_S = 0.005  # time of a sufficiently large matrix product
DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
BANDWIDTH, LAUNCH, LINK = "memory bandwidth", "launch overhead", "host to device"


def figure_names(device: Device) -> list[str]:
    return [*device.precisions, BANDWIDTH, LAUNCH, *([LINK] if device.is_accelerator else [])]


def measure_speed(device: Device, threads: int, tick: Callable[[str], None]) -> tuple[Speed, list[str]]:
    """Returns the device's speed, and notes on figures that couldn't be measured.

    Args:
        threads: of one operation on the CPU.
        tick: called with each figure's name before its measurement.
    """
    bench = DeviceBenchmark(device, threads)
    figures: dict[str, Figure] = {}
    notes = []
    with _without_autograd(device.kind, threads):
        for name in figure_names(device):
            tick(name)
            try:
                figures[name] = bench.figure(name)
            except RuntimeError as error:  # out of memory, or unsupported on the device
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                notes.append(f"{device.name}: {name} couldn't be measured: {reason}")
        if device.is_accelerator:
            torch.get_device_module(device.kind).empty_cache()
    matrix = {name: figures[name] for name in device.precisions if name in figures}
    return Speed(matrix, figures.get(BANDWIDTH), figures.get(LAUNCH), figures.get(LINK)), notes


def is_complete(device: Device, speed: Speed) -> bool:
    rest = (speed.memory_bandwidth, speed.launch_overhead, *([speed.host_to_device] * device.is_accelerator))
    return set(speed.flop_per_s) == set(device.precisions) and None not in rest


@contextmanager
def _without_autograd(kind: str, threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad(), torch.autocast(kind, enabled=False):
            yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _float32_arithmetic(kind: str) -> Iterator[None]:
    """Sets the arithmetic of float32 matrix products (`ieee` or `tf32`) within the context."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = kind
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = "none"  # "none" selects the value of the common switch
            if backend.fp32_precision != precision:
                backend.fp32_precision = precision


class BenchmarkClock:
    """Times work on one device, including the wait for an asynchronous device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.window_s = CPU_WINDOW_S if device.type == "cpu" else ACCELERATOR_WINDOW_S

    def seconds(self, work: Callable[[], object], calls: int = 1) -> float:
        self._wait()
        start = perf_counter()
        for _ in range(calls):
            work()
        self._wait()
        return perf_counter() - start

    def best(self, work: Callable[[], object], budget_s: float = BUDGET_S) -> float:
        """Returns the seconds per call in the best window within the budget (at least three windows)."""
        self.seconds(work)  # loads libraries, selects kernels, allocates memory
        calls = 1
        while (took := self.seconds(work, calls)) < self.window_s:
            calls *= 2
        windows = [took]
        while sum(windows) < budget_s or len(windows) < 3:
            windows.append(self.seconds(work, calls))
        return min(windows) / calls

    def _wait(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


class DeviceBenchmark:
    def __init__(self, device: Device, threads: int) -> None:
        self.device = torch.device(device.name)
        # On a busy CPU one thread can be faster than several that wait for each other.
        self.teams = (threads, 1) if device.kind == "cpu" and threads > 1 else (threads,)
        self.clock = BenchmarkClock(self.device)
        self.tensor_bytes = device.memory_free.value / 8 if device.memory_free else 2.0**27

    def figure(self, name: str) -> Figure:
        if name == BANDWIDTH:
            return self.bandwidth()
        if name == LAUNCH:
            return self.launch()
        if name == LINK:
            return self.link()
        return self.matrix(name)

    def matrix(self, precision: str) -> Figure:
        """FLOP/s of a product of square matrices: the best of growing sizes and of torch's libraries."""
        with _float32_arithmetic("tf32" if precision == "tf32" else "ieee"):
            rate, size, team, by = max(trial for team in self.teams for trial in self._products(precision, team))
        threads = f", threads: {team}" if self.device.type == "cpu" else ""
        return _measured_figure(rate, "flop_per_s", f"product of two {size} x {size} matrices by {by}{threads}")

    def _products(self, precision: str, team: int) -> Iterator[tuple[float, int, int, str]]:
        """Yields (FLOP/s, size, threads, library) of growing products, until one takes `LONG_S` or memory ends."""
        dtype = DTYPES[precision]
        largest = min(8192, math.isqrt(int(self.tensor_bytes / 3 / dtype.itemsize)))
        size, seconds = (256 if self.device.type == "cpu" else 2048), 0.0
        torch.set_num_threads(team)
        while seconds < LONG_S and (size <= largest or not seconds):
            times = {by: self.clock.best(work, BUDGET_S / 3) for by, work in self._product(size, dtype).items()}
            yield from ((2 * size**3 / took, size, team, by) for by, took in times.items())
            size, seconds = 2 * size, min(times.values())
        torch.set_num_threads(self.teams[0])

    def _product(self, size: int, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
        """Returns the product by `torch.mm`, and in float32 on a CPU by oneDNN: `torch.mm`'s library may not use a
        processor's widest instructions (see `lowering/rewrites/mm_by_onednn.py`).
        """
        # Random numbers, since constants need less power and make some GPUs faster; a separate generator leaves the
        # user's random stream unchanged.
        generator = torch.Generator(self.device).manual_seed(0)
        shape = (size, size)
        a, b = (torch.randn(shape, generator=generator, dtype=torch.float32, device=self.device) for _ in range(2))
        a, b = a.to(dtype), b.to(dtype)
        out = torch.empty_like(a)
        products: dict[str, Callable[[], Tensor]] = {"torch.mm": lambda: torch.mm(a, b, out=out)}
        if self.device.type == "cpu" and dtype == torch.float32 and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            products["oneDNN"] = lambda: torch.ops.mkldnn._linear_pointwise(a, b.t(), None, "none", [], "")
        return products

    def bandwidth(self) -> Figure:
        """bytes/s of a copy much larger than any cache."""
        count = self._numbers(2.0**28 if self.device.type == "cpu" else 2.0**30)
        source = torch.ones(count, dtype=torch.float32, device=self.device)
        target = torch.empty_like(source)
        seconds = self.clock.best(lambda: target.copy_(source))
        how = f"copy of {source.nbytes / 2**20:.0f} MiB, read and written"
        return _measured_figure(2 * source.nbytes / seconds, "bytes_per_s", how)

    def _numbers(self, most_bytes: float) -> int:
        """Returns the number of float32 numbers to copy, at least 2**20: without memory for them the copy fails."""
        return max(2**20, int(min(most_bytes, self.tensor_bytes / 2)) // 4)

    def launch(self) -> Figure:
        """Microseconds per operation on a single number."""
        number = torch.zeros(1, dtype=torch.float32, device=self.device)
        seconds = self.clock.best(lambda: number.add_(1))
        return _measured_figure(seconds * 1e6, "us", "adding to a single number in place, many times in a row")

    def link(self) -> Figure:
        """bytes/s from host memory, pinned except for devices that share the host's memory."""
        pinned = self.device.type != "mps"  # shares the host's memory
        count = self._numbers(2.0**28)
        host = torch.ones(count, dtype=torch.float32, device="cpu", pin_memory=pinned)
        target = torch.empty(count, dtype=torch.float32, device=self.device)
        seconds = self.clock.best(lambda: target.copy_(host, non_blocking=pinned))
        how = f"copy of {host.nbytes / 2**20:.0f} MiB from {'pinned' if pinned else 'ordinary'} memory"
        return _measured_figure(host.nbytes / seconds, "bytes_per_s", how)


def _measured_figure(value: float, unit: Unit, how: str) -> Figure:
    return Figure(value, unit, "measured", current_time(), how)
