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
from hotloop.core.hardware.system_use import SystemSampler
from hotloop.core.records.model_summary import ModelLayers
from hotloop.core.records.training import EpochRecord
from hotloop.errors import HotloopError
from hotloop.lowering.program import Program
from hotloop.lowering.training_accuracy import training_accuracy_of
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
