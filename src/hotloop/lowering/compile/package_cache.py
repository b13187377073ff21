"""Packages of compiled steps, kept in the user's cache folder: made once, and loaded in milliseconds.

Beside them are notes of steps that were seen to stay the same.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from hotloop import __version__
from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.files.user_folders import cache_folder
from hotloop.core.hardware import machine
from hotloop.core.reporter import Report
from hotloop.errors import HotloopError, describe_error
from hotloop.lowering.compile.capture import CapturedStep, StepCapture
from hotloop.lowering.compile.guards import constant_contents
from hotloop.lowering.compile.inductor_patches import INDUCTOR_PATCH_VERSION, inductor_patches
from hotloop.lowering.context import LoweringContext

_MAX_PACKAGES = 64
"""Packages, and notes that a step stays the same; those that were used longest ago go."""


def load_or_build_package(
    captured: CapturedStep, device: torch.device, options: dict[str, Any], say: Report
) -> Callable[[list[Tensor]], Any]:
    """The captured step as a program, out of a package.

    One that can't be kept serves this time alone, and one that can't be loaded is made anew; either is said.
    """
    path = package_folder() / f"{_package_key(captured, device, options)}.pt2"
    if _is_in_folder(path):
        try:
            return _load_package(path)
        except Exception as error:
            say(f"the kept package can't be loaded, and is made anew: {describe_error(error)}")
    content = _build_package(captured, device, options)
    try:
        write_atomic(path, content)
    except HotloopError as error:
        say(f"the package isn't kept for later runs: {error.given}")
        with TemporaryDirectory() as elsewhere:
            path = Path(elsewhere) / path.name
            path.write_bytes(content)
            return _load_package(path)
    _remove_oldest(path.parent, "*.pt2")
    return _load_package(path)


def capture_reproducibly(capture: StepCapture, batch: Any, parts: LoweringContext) -> CapturedStep:
    """A step's graph, captured twice to see that it stays the same; once where a run before this one saw just that.

    What it saw is known by the graph, and by the files of the classes and functions that it comes from.

    Raises:
        PlanError: it can't be captured, or is another each time.
    """
    first = capture.trace_once(batch)
    known = (
        first.graph.code,
        constant_contents(first.graph),
        _input_layouts(first),
        _source_files(parts),
        torch.__version__,
        __version__,
    )
    path = package_folder() / f"{hashlib.sha256(repr(known).encode()).hexdigest()}.twice"
    if _is_in_folder(path):
        return first
    second = capture.trace_again(first, batch)
    with suppress(HotloopError):  # nothing can be kept there: so it is captured twice the next time, too
        write_atomic(path, b"")
        _remove_oldest(path.parent, "*.twice")
    return second


def _source_files(parts: LoweringContext) -> list[tuple[str, int, int]]:
    """Where classes of the model and functions of the Task are written, and how these files were when they were last changed."""
    said = [parts.task.loss, parts.task.step, parts.task.optimizer]
    kinds = [*map(type, parts.model.modules()), *(one for one in said if one is not None)]
    modules = {getattr(kind, "__module__", "") for kind in kinds}
    paths = {getattr(sys.modules.get(name), "__file__", None) for name in modules}
    found = []
    for path in sorted(filter(None, paths)):
        with suppress(OSError):
            status = os.stat(path)
            found.append((path, status.st_mtime_ns, status.st_size))
    return found


def package_folder() -> Path:
    """Where this user's packages are kept."""
    return cache_folder() / "packages"


def _is_in_folder(path: Path) -> bool:
    """Also notes that it was used; False, too, where nobody may look."""
    if not os.path.isfile(path):
        return False
    with suppress(OSError):  # somebody else's folder
        os.utime(path)
    return True


def _load_package(path: Path) -> Callable[[list[Tensor]], Any]:
    """The program in a package, which holds all that it needs: torch's own `load_package` would import the compiler first."""
    return torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1).run


def _build_package(captured: CapturedStep, device: torch.device, options: dict[str, Any]) -> bytes:
    from torch._inductor.package import package_aoti

    with redirect_stdout(io.StringIO()), inductor_patches(device):
        files: Any = torch._inductor.aot_compile(
            captured.graph, tuple(captured.examples), options={**options, "aot_inductor.package": True}
        )
        archive = io.BytesIO()
        package_aoti(archive, files)
    return archive.getvalue()


def _remove_oldest(where: Path, which: str) -> None:
    used: dict[Path, float] = {}
    for path in where.glob(which):
        with suppress(FileNotFoundError):  # another process forgets them too
            used[path] = path.stat().st_mtime
    for path in sorted(used, key=used.__getitem__)[:-_MAX_PACKAGES]:
        with suppress(OSError):
            path.unlink()


def _package_key(captured: CapturedStep, device: torch.device, options: dict[str, Any]) -> str:
    """What a package depends on: the graph with its constants, its inputs, the compiler, the processor, the threads."""
    baked = constant_contents(captured.graph)
    processor = machine.read_processor()  # it is compiled for this very one, and a home may be shared by many
    threads, in_order = torch.get_num_threads(), torch.get_deterministic_debug_mode() > 0
    known = (
        *(
            captured.graph.code,
            baked,
            _input_layouts(captured),
            _output_layouts(captured),
            torch.backends.mkldnn.enabled,
        ),
        *(torch.__version__, __version__, INDUCTOR_PATCH_VERSION, sorted(options.items())),
        *(processor.model, processor.vectors, processor.kernels, threads, in_order, str(device)),
    )
    return hashlib.sha256(repr(known).encode()).hexdigest()


def _output_layouts(captured: CapturedStep) -> list[str]:
    """How what the graph computes lies in memory: of an equal graph, whether oneDNN is on decides that."""
    values = (node.meta.get("val") for node in captured.graph.graph.nodes)
    return [str(value.stride()) for value in values if isinstance(value, Tensor) and value.layout == torch.strided]


def _input_layouts(captured: CapturedStep) -> list[tuple[Any, ...]]:
    return [(tuple(value.shape), str(value.dtype), value.stride()) for value in captured.examples]
