"""Measures what a device achieves, within a few seconds each.

Other programs on the machine can only slow a measurement, so each figure is the best of many short windows.
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

METHOD = 2  # goes up when figures are measured differently, so that stored ones are no longer used

# Short windows slip in between the turns of other programs. On an accelerator they must be so long that
# waiting for it doesn't count.
CPU_WINDOW_S, ACCELERATOR_WINDOW_S = 0.0005, 0.01
BUDGET_S = 0.5  # for one figure
LONG_S = 0.005  # a matrix product of this time is large enough
BUSY_NOTE = (
    "cpu: one thread was faster than {threads}, so other programs kept it busy and its true speed is higher: "
    "measure with --refresh when the machine is quiet"
)


def is_of_busy_machine(note: str) -> bool:
    """Whether a note of `measure_speed` says that other programs used the CPU meanwhile."""
    return note.endswith(BUSY_NOTE.rpartition("}")[2])


DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}
BANDWIDTH, LAUNCH, LINK = "memory bandwidth", "launch overhead", "host to device"


def figure_names(device: Device) -> list[str]:
    """Names of the figures that `measure_speed` takes, in its order."""
    return [*device.precisions, BANDWIDTH, LAUNCH, *([LINK] if device.is_accelerator else [])]


def measure_speed(device: Device, threads: int, tick: Callable[[str], None]) -> tuple[Speed, list[str]]:
    """What the device achieves, and notes: on each figure that couldn't be taken, and on a busy CPU.

    Args:
        threads: of one operation on the CPU.
        tick: called with the name of each figure before it is taken.
    """
    bench = DeviceBenchmark(device, threads)
    figures: dict[str, Figure] = {}
    notes = []
    with _without_autograd(device.kind, threads):
        for name in figure_names(device):
            tick(name)
            try:
                figures[name] = bench.figure(name)
            except RuntimeError as error:  # torch's for out of memory and for what a device can't do
                reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                notes.append(f"{device.name}: {name} couldn't be measured: {reason}")
        if bench.busy:
            notes.append(BUSY_NOTE.format(threads=threads))
        if device.is_accelerator:
            torch.get_device_module(device.kind).empty_cache()
    matrix = {name: figures[name] for name in device.precisions if name in figures}
    return Speed(matrix, figures.get(BANDWIDTH), figures.get(LAUNCH), figures.get(LINK)), notes


def is_complete(device: Device, speed: Speed) -> bool:
    """Whether every figure could be taken."""
    rest = (speed.memory_bandwidth, speed.launch_overhead, *([speed.host_to_device] * device.is_accelerator))
    return set(speed.flop_per_s) == set(device.precisions) and None not in rest


@contextmanager
def _without_autograd(kind: str, threads: int) -> Iterator[None]:
    """No autograd, no autocast, the given number of threads; afterwards all is as it was."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad(), torch.autocast(kind, enabled=False):
            yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _float32_arithmetic(kind: str) -> Iterator[None]:
    """float32 matrix products in `ieee` arithmetic or in `tf32`, whatever the program has chosen."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = kind
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = "none"  # takes on what is chosen for all backends together
            if backend.fp32_precision != precision:
                backend.fp32_precision = precision


class BenchmarkClock:
    """Times work on one device, waiting for it where the device runs on its own."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.window_s = CPU_WINDOW_S if device.type == "cpu" else ACCELERATOR_WINDOW_S

    def seconds(self, work: Callable[[], object], calls: int = 1) -> float:
        """Seconds for that many calls in a row."""
        self._wait()
        start = perf_counter()
        for _ in range(calls):
            work()
        self._wait()
        return perf_counter() - start

    def best(self, work: Callable[[], object], budget_s: float = BUDGET_S) -> float:
        """Seconds per call, in the best of the windows that fit into the budget (at least three)."""
        self.seconds(work)  # loads libraries, chooses kernels, touches memory for the first time
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
    """The figures of one device."""

    def __init__(self, device: Device, threads: int) -> None:
        self.device = torch.device(device.name)
        # On a busy CPU one thread alone can be faster than several that wait for each other.
        self.teams = (threads, 1) if device.kind == "cpu" and threads > 1 else (threads,)
        self.busy = False
        self.clock = BenchmarkClock(self.device)
        # Room for the tests' tensors. Where the free memory isn't known, small enough for any device.
        self.room_bytes = device.memory_free.value / 8 if device.memory_free else 2.0**27

    def figure(self, name: str) -> Figure:
        if name == BANDWIDTH:
            return self.bandwidth()
        if name == LAUNCH:
            return self.launch()
        if name == LINK:
            return self.link()
        return self.matrix(name)

    def matrix(self, precision: str) -> Figure:
        """FLOP/s of the product of two square matrices, of the best among growing sizes and torch's libraries for it."""
        with _float32_arithmetic("tf32" if precision == "tf32" else "ieee"):
            rate, size, team, by = max(trial for team in self.teams for trial in self._products(precision, team))
        self.busy |= team != self.teams[0]
        threads = f", threads: {team}" if self.device.type == "cpu" else ""
        return _measured_figure(rate, "flop_per_s", f"product of two {size} x {size} matrices by {by}{threads}")

    def _products(self, precision: str, team: int) -> Iterator[tuple[float, int, int, str]]:
        """(FLOP/s, size, threads, library) of growing products, until the fastest takes long or the memory ends."""
        dtype = DTYPES[precision]
        largest = min(8192, math.isqrt(int(self.room_bytes / 3 / dtype.itemsize)))
        size, seconds = (256 if self.device.type == "cpu" else 2048), 0.0
        torch.set_num_threads(team)
        while seconds < LONG_S and (size <= largest or not seconds):
            each = {by: self.clock.best(work, BUDGET_S / 3) for by, work in self._product(size, dtype).items()}
            yield from ((2 * size**3 / took, size, team, by) for by, took in each.items())
            size, seconds = 2 * size, min(each.values())
        torch.set_num_threads(self.teams[0])

    def _product(self, size: int, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
        """By `torch.mm`, and in float32 on a CPU by oneDNN too: the library of `torch.mm` may leave a processor's widest
        instructions aside (see `lowering/rewrites/mm_by_onednn.py`)."""
        # Random numbers, since constant ones need less power and make some GPUs faster than they are; from a
        # generator of its own, since the user's random stream must not move.
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
        return _measured_figure(
            2 * source.nbytes / seconds, "bytes_per_s", f"copy of {_mebibytes(source)} MiB, read and written"
        )

    def _numbers(self, most_bytes: float) -> int:
        """How many float32 numbers to copy; if the memory has no room even for a few, the copy fails."""
        return max(2**20, int(min(most_bytes, self.room_bytes / 2)) // 4)

    def launch(self) -> Figure:
        """Microseconds per operation on a single number."""
        number = torch.zeros(1, dtype=torch.float32, device=self.device)
        seconds = self.clock.best(lambda: number.add_(1))
        return _measured_figure(seconds * 1e6, "us", "adding to a single number in place, many times in a row")

    def link(self) -> Figure:
        """bytes/s from the host's memory; pinned memory where the device has a link of its own."""
        pinned = self.device.type != "mps"  # shares the host's memory
        count = self._numbers(2.0**28)
        host = torch.ones(count, dtype=torch.float32, device="cpu", pin_memory=pinned)
        target = torch.empty(count, dtype=torch.float32, device=self.device)
        seconds = self.clock.best(lambda: target.copy_(host, non_blocking=pinned))
        kind = "pinned" if pinned else "ordinary"
        return _measured_figure(
            host.nbytes / seconds, "bytes_per_s", f"copy of {_mebibytes(host)} MiB from {kind} memory"
        )


def _mebibytes(tensor: Tensor) -> str:
    return f"{tensor.nbytes / 2**20:.0f}"


def _measured_figure(value: float, unit: Unit, how: str) -> Figure:
    return Figure(value, unit, "measured", current_time(), how)
