"""Made-up facts of Tasks and machines, for tests of what can be run where."""

from __future__ import annotations

from typing import Any

from hotloop.core.records.hardware import Device, Figure, Hardware, Processor
from hotloop.core.records.training import TaskFacts

GIB = 2**30


def a_device(name: str = "cpu", precisions: tuple[str, ...] = ("fp32", "fp64"), free: float = 8 * GIB) -> Device:
    memory = Figure(free, "bytes", "os")
    return Device(name, name.partition(":")[0], precisions=precisions, memory_total=memory, memory_free=memory)


A_GPU = a_device("cuda:0", ("fp32", "tf32", "bf16", "fp16", "fp64"))
AN_OLD_GPU = a_device("cuda:0", ("fp32", "fp16", "fp64"))


def a_machine(
    *more: Device, cpu: Device | None = None, compiler: str | None = "/usr/bin/g++", allocator: str | None = None
) -> Hardware:
    """A machine with a CPU and `more` devices."""
    return Hardware(
        system="Linux 6.1",
        processor=Processor("a CPU", "x86_64", ("avx2",), "AVX2", 2, 2, 2, None, 2),
        devices=(cpu or a_device(), *more),
        versions={"torch": "2.13"},
        compiler=compiler,
        allocator=allocator,
    )


def facts(**changed: Any) -> TaskFacts:
    """Those of a small image classifier with Adam, whose data lies in memory."""
    known = {
        "parameters": 1000, "trainable": 1000, "samples": 6400, "batches": 100, "batch_size": 64,
        "inputs": [[1, 28, 28], []], "data": "Table", "exact": True, "fingerprint": "", "optimizer": "Adam",
        "implementations": ["forloop", "foreach", "fused"], "images": True, "data_bytes": GIB, "steps": 500,
    }  # fmt: skip
    return TaskFacts(**{**known, **changed})


LBFGS = {"optimizer": "LBFGS", "implementations": [], "closure": True}
