"""Records what a training does while it goes on, for reports and live pages.

status.json      the present state, replaced about once a second
progress.jsonl   loss, learning rate, gradient norm, speed and training accuracy; some 10,000 lines at most
system.jsonl     use of processor, memory, disk, network and GPUs; a line every few seconds
layers.json      the model's layers with parameters and FLOPs
"""

from __future__ import annotations

import json
import math
import os
import random
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from hotloop.core.callback import View
from hotloop.core.records.model_summary import ModelLayers
from hotloop.core.records.training import EpochRecord
from hotloop.data.sources import Table
from hotloop.errors import HotloopError
from hotloop.lowering.evaluation import evaluate
from hotloop.lowering.program import Program
from hotloop.profiler.model_summary import model_layers

STATUS_INTERVAL_S = 1.0

SYSTEM_INTERVAL_S = 5.0

_ROWS_PER_DECADE = 2000
"""Intervals grow with the time of training, so that a training of days has no more than some 10,000 rows."""


class RunMonitor:
    """A callback that writes the files, with a thread for the system's figures.

    A file that can't be written never ends the training: `say` reports the first failure, and later rows are tried again.

    Args:
        layers: returns the model's layers; called once, after the first step.
        gradient_norm: returns the norm of the last step's gradients; None where they aren't stored.
        training_accuracy: returns the accuracy on a sample of the training data after an epoch; None if not measured.
    """

    def __init__(
        self,
        layers: Callable[[], ModelLayers | None],
        gradient_norm: Callable[[], float | None],
        training_accuracy: Callable[[EpochRecord], float | None],
        say: Callable[[str], None],
    ) -> None:
        self._layers: Callable[[], ModelLayers | None] | None = layers
        self._gradient_norm, self._say = gradient_norm, say
        self._training_accuracy: Callable[[EpochRecord], float | None] | None = training_accuracy
        self._has_failed = False
        self._began = self._status_at = self._row_at = time.monotonic()
        self._losses: list[float] = []
        self._row_step = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, program: Program) -> None:
        """Measures on another Program of the same training from now on."""
        self._gradient_norm = gradient_norm_of(program)
        if self._training_accuracy is not None:
            self._training_accuracy = training_accuracy_of(program)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Ends the thread with the context."""
        try:
            yield
        finally:
            self._stop.set()
            if self._thread is not None:
                self._thread.join()

    def __call__(self, view: View) -> None:
        if view.event == "start":
            self._start(view)
        if self._layers is not None and view.step:
            self._write_layers(view, self._layers)
        if view.loss is not None and view.event in ("progress", "epoch"):
            self._losses.append(view.loss)
        now = time.monotonic()
        if view.event in ("start", "stop", "final") or now - self._status_at >= STATUS_INTERVAL_S:
            self._status_at = now
            self._try(lambda: self._write_status(view))
        interval_s = max(STATUS_INTERVAL_S, (now - self._began) / _ROWS_PER_DECADE)
        measured = self._measure_epoch(view)
        if view.event == "final" or view.step <= self._row_step:
            return
        if measured or view.event == "stop" or now - self._row_at >= interval_s:
            self._row_at, self._row_step = now, view.step
            self._try(lambda: self._add_progress(view, measured))

    def _measure_epoch(self, view: View) -> dict[str, float]:
        if view.event != "epoch" or self._training_accuracy is None:
            return {}
        try:
            accuracy = self._training_accuracy(view.history[-1])
        except (RuntimeError, MemoryError, HotloopError) as error:
            self._training_accuracy = None
            self._say(f"the accuracy on training data can't be measured ({error}); training goes on without it")
            return {}
        return {} if accuracy is None else {"train_accuracy": accuracy}

    def _start(self, view: View) -> None:
        self._process = {
            "pid": os.getpid(),
            "process_created": psutil.Process().create_time(),
            "host": socket.gethostname(),
        }
        path = view.run / "layers.json"
        if path.is_file():
            self._layers = None
        self._thread = threading.Thread(
            target=self._sample_system, args=(view.run / "system.jsonl",), name="hotloop-monitor", daemon=True
        )
        self._thread.start()

    def _sample_system(self, path: Path) -> None:
        sampler, began = SystemSampler(), time.monotonic()  # psutil counts the use since the thread's last call
        wait_s = STATUS_INTERVAL_S
        while not self._stop.wait(wait_s):
            self._try(lambda: _append(path, sampler.sample()))
            wait_s = max(SYSTEM_INTERVAL_S, (time.monotonic() - began) / _ROWS_PER_DECADE)

    def _write_layers(self, view: View, layers: Callable[[], ModelLayers | None]) -> None:
        self._layers = None
        found = layers()
        if found is not None:
            self._try(lambda: _replace(view.run / "layers.json", found.model_dump_json()))

    def _write_status(self, view: View) -> None:
        row = {"event": view.event, **_position(view), **self._process, "reason": view.reason}
        _replace(view.run / "status.json", json.dumps(_finite(row)))

    def _add_progress(self, view: View, measured: dict[str, float]) -> None:
        losses, self._losses = self._losses, []
        row = _position(view) | {"gradient_norm": self._gradient_norm()} | measured
        if losses:
            row["loss"] = sum(losses) / len(losses)
        _append(view.run / "progress.jsonl", row)

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, HotloopError, psutil.Error) as error:
            if not self._has_failed:
                self._has_failed = True
                self._say(
                    f"figures for reports can't be recorded ({error}); training goes on, and they are tried again"
                )


def monitor_of(program: Program, say: Callable[[str], None]) -> RunMonitor:
    """Returns the monitor of a training; layers are None for several ranks, whose model can't run on a single rank."""

    def layers() -> ModelLayers | None:
        return model_layers(program.parts.task, program.model) if program.parts.world.is_single else None

    return RunMonitor(layers, gradient_norm_of(program), training_accuracy_of(program), say)


def _position(view: View) -> dict[str, Any]:
    speed = view.samples_per_s or (view.history[-1].samples_per_s if view.history else 0.0)  # 0 as an epoch begins
    return {
        "time": round(time.time(), 3),
        "step": view.step,
        "epoch": view.epoch,
        "epochs": view.epochs,
        "batch": view.batch,
        "batches": view.batches,
        "loss": view.loss,
        "learning_rate": view.learning_rate,
        "samples_per_s": round(speed, 3),
        "remaining_s": view.remaining_s,
    }


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}


def _append(path: Path, row: dict[str, Any]) -> None:
    """Appends a line without waiting for the disk: a lost row costs a point of a picture."""
    content = (json.dumps(_finite(row)) + "\n").encode()
    with path.open("ab+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            content = content if file.read(1) == b"\n" else b"\n" + content
        file.write(content)


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def gradient_norm_of(program: Program) -> Callable[[], float | None]:
    """Returns a function that computes the 2-norm of the stored gradients, after clipping.

    With parallel=data each rank stores the gradient of the whole batch. The norm is None for plans that store no
    gradients, as compile=step, and for other ranks, whose norm would be a collective operation. The function doesn't
    prolong the model's life.
    """
    plan = program.parts.plan
    if plan.parallel not in ("none", "data") or plan.compile in ("step", "package"):
        return lambda: None
    model = weakref.ref(program.model)

    def norm() -> float | None:
        found = model()
        gradients = [] if found is None else [value.grad for value in found.parameters() if value.grad is not None]
        gradients = [value for value in gradients if value.layout == torch.strided and not value.is_complex()]
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else None

    return norm


class SystemSampler:
    """Reads the counters of the system; a sample says what changed since the sample before.

    GPU figures need the package nvidia-ml-py, and are left out without it.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._gpus = _open_gpus()
        self._before = self._counters()
        psutil.cpu_percent()  # the first call only starts the interval

    def sample(self) -> dict[str, Any]:
        """Returns one row: percent of all cores, bytes, and bytes per second."""
        counters, before = self._counters(), self._before
        self._before = counters
        seconds = max(1e-6, counters["time"] - before["time"])
        rates = {
            f"{name}_per_s": round(max(0.0, counters[name] - before[name]) / seconds, 1)
            for name in counters.keys() & before.keys() - {"time"}
        }
        memory = psutil.virtual_memory()
        return {
            "time": round(time.time(), 3),
            "cpu_percent": psutil.cpu_percent(),
            "memory_bytes": self._resident_bytes(),
            "machine_memory_bytes": memory.total - memory.available,
            **rates,
            **self._gpu_figures(),
        }

    def _counters(self) -> dict[str, float]:
        found: dict[str, float] = {"time": time.monotonic()}
        with suppress(Exception):  # a container may hide the counters
            disk = psutil.disk_io_counters()
            if disk is not None:
                found |= {"disk_read_bytes": disk.read_bytes, "disk_written_bytes": disk.write_bytes}
        with suppress(Exception):
            net = psutil.net_io_counters()
            if net is not None:
                found |= {"net_received_bytes": net.bytes_recv, "net_sent_bytes": net.bytes_sent}
        return found

    def _resident_bytes(self) -> int:
        total = self._process.memory_info().rss
        for child in self._process.children(recursive=True):
            with suppress(psutil.Error):
                total += child.memory_info().rss
        return int(total)

    def _gpu_figures(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        for number, (nvml, handle) in enumerate(self._gpus):
            with suppress(nvml.NVMLError):
                figures[f"gpu{number}_percent"] = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
                figures[f"gpu{number}_memory_bytes"] = nvml.nvmlDeviceGetMemoryInfo(handle).used
        return figures


def _open_gpus() -> list[tuple[Any, Any]]:
    """Returns NVML's module and a handle for each GPU; empty without the package, the driver or a GPU."""
    try:
        import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        return [(pynvml, pynvml.nvmlDeviceGetHandleByIndex(number)) for number in range(count)]
    except Exception:  # NVML fails in many ways, and training needs no figures of it
        return []


_MIN_SAMPLES, _MAX_SAMPLES = 200, 2000

_MAX_BYTES = 1 << 27
"""Largest copy of samples."""

_SHARE = 0.01
"""Evaluated samples for each trained sample: a forward pass is about a third of a step, so the cost is about 0.3 %."""


def training_accuracy_of(program: Program) -> Callable[[EpochRecord], float | None]:
    """Returns a function that evaluates the model on the sample after an epoch; None after the other epochs.

    The first and the last epoch have an accuracy, and every n-th: n follows from the sizes alone, so that a repeated
    training does the same. The accuracy is without augmentation, as that of validation data. It is None without a
    validation accuracy, for Tasks with metrics of their own, for several ranks, and for data that isn't in memory as
    arrays. The function doesn't prolong the program's life.
    """
    task, splits, plan = program.parts.task, program.parts.splits, program.parts.plan
    source = splits.train
    is_measured = task.metrics is None and splits.validation is not None and plan.parallel == "none"
    if not (is_measured and isinstance(source, Table)):
        return lambda record: None
    share = len(source) * _SHARE
    count = min(len(source), max(_MIN_SAMPLES, min(_MAX_SAMPLES, int(share))))
    count = max(1, min(count, _MAX_BYTES * len(source) // max(1, source.nbytes())))
    index = torch.tensor(sorted(random.Random(0).sample(range(len(source)), count)))
    interval, last, owner = math.ceil(count / share), task.epochs, weakref.ref(program)

    def accuracy(record: EpochRecord) -> float | None:
        found, is_due = owner(), record.epoch in (1, last) or record.epoch % interval == 0
        if found is None or not is_due or "accuracy" in record.train or "accuracy" not in record.validation:
            return None
        return evaluate(found, source.subset(index)).values.get("accuracy")

    return accuracy
