"""Packages of compiled steps in the user's cache folder: built once, and loaded in milliseconds.

The folder also records which steps gave the same graph twice.
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
from hotloop.core.files.package_use import PackageUse
from hotloop.core.files.user_folders import cache_folder, foreign_access, make_private_folder
from hotloop.core.hardware import machine
from hotloop.core.reporter import Say
from hotloop.errors import HotloopError, describe_error
from hotloop.lowering.compile.capture import CapturedStep, StepCapture
from hotloop.lowering.compile.guards import constant_contents
from hotloop.lowering.compile.inductor_patches import INDUCTOR_PATCH_VERSION, inductor_patches
from hotloop.lowering.context import LoweringContext

_MAX_PACKAGES = 64
"""Maximum number of packages, and of records of steps; the least recently used are deleted."""

_PACKAGE_OPTIONS = {"aot_inductor.package": True, "aot_inductor.precompile_headers": False}
"""Precompiling the headers of a package's two source files takes 10 s, and saves 2 s in each package (torch 2.13)."""

NOT_CACHED = "the package isn't cached for later runs"
"""Begin of the line about a package that can't be stored."""


def load_or_build_package(
    captured: CapturedStep, device: torch.device, options: dict[str, Any], say: Say, use: PackageUse
) -> Callable[[list[Tensor]], Any]:
    """Returns the captured step as a program from a package, cached or new.

    A package that can't be stored serves this call alone. A package that can't be loaded is built again, and so is one
    that another user may have written, since a package is machine code. `say` gets a line for each.

    Raises:
        PlanError: `use` expects another package.
    """
    path = package_folder() / f"{_package_key(captured, device, options)}.pt2"
    access = foreign_access(path)
    if access is None and _is_in_folder(path):
        use.record(path.read_bytes())
        try:
            return _load_package(path)
        except Exception as error:
            say(f"the cached package can't be loaded, and is compiled again: {describe_error(error)}")
    use.check_build()
    content = _build_package(captured, device, options, say)
    use.record(content)
    try:
        make_private_folder(path.parent)
        if access is None:
            write_atomic(path, content)
    except HotloopError as error:
        access = error.given
    if access is not None:
        say(f"{NOT_CACHED}: {access}")
        with TemporaryDirectory() as folder:
            path = Path(folder) / path.name
            path.write_bytes(content)
            return _load_package(path)
    _remove_oldest(path.parent, "*.pt2")
    return _load_package(path)


def capture_reproducibly(capture: StepCapture, batch: Any, parts: LoweringContext) -> CapturedStep:
    """Captures a step's graph twice to check that the graph is the same; once if an earlier run has recorded that.

    The record's key has the graph, and the source files of the classes and functions of the Task.

    Raises:
        PlanError: the step can't be captured, or two captures differ.
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
    with suppress(HotloopError):  # without the record the next run captures twice
        make_private_folder(path.parent)
        write_atomic(path, b"")
        _remove_oldest(path.parent, "*.twice")
    return second


def _source_files(parts: LoweringContext) -> list[tuple[str, int, int]]:
    """Returns path, modification time and size of the source files of the model's classes and the Task's functions."""
    task_parts = [part for part in (parts.task.loss, parts.task.step, parts.task.optimizer) if part is not None]
    modules = {getattr(part, "__module__", "") for part in (*map(type, parts.model.modules()), *task_parts)}
    paths = {getattr(sys.modules.get(name), "__file__", None) for name in modules}
    found = []
    for path in sorted(filter(None, paths)):
        with suppress(OSError):
            status = os.stat(path)
            found.append((path, status.st_mtime_ns, status.st_size))
    return found


def package_folder() -> Path:
    return cache_folder() / "packages"


def _is_in_folder(path: Path) -> bool:
    """Whether the file exists and is readable; updates its time of use."""
    if not os.path.isfile(path):
        return False
    with suppress(OSError):  # another user's folder
        os.utime(path)
    return True


def _load_package(path: Path) -> Callable[[list[Tensor]], Any]:
    """Loads the program; torch's own `load_package` would import the compiler."""
    return torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1).run


def _build_package(captured: CapturedStep, device: torch.device, options: dict[str, Any], say: Say) -> bytes:
    from torch._inductor.package import package_aoti

    with redirect_stdout(io.StringIO()), inductor_patches(device, say):
        files: Any = torch._inductor.aot_compile(
            captured.graph, tuple(captured.examples), options={**options, **_PACKAGE_OPTIONS}
        )
        archive = io.BytesIO()
        package_aoti(archive, files)
    return archive.getvalue()


def _remove_oldest(folder: Path, pattern: str) -> None:
    used: dict[Path, float] = {}
    for path in folder.glob(pattern):
        with suppress(FileNotFoundError):  # another process may have deleted the file
            used[path] = path.stat().st_mtime
    for path in sorted(used, key=used.__getitem__)[:-_MAX_PACKAGES]:
        with suppress(OSError):
            path.unlink()


def _package_key(captured: CapturedStep, device: torch.device, options: dict[str, Any]) -> str:
    """Hashes all that a package depends on: graph, constants, inputs, compiler, processor, threads."""
    graph, layouts = captured.graph, (_input_layouts(captured), _output_layouts(captured))
    processor = machine.read_processor()  # machines with different processors may share a home folder
    threads, in_order = torch.get_num_threads(), torch.get_deterministic_debug_mode() > 0
    known = (
        *(graph.code, constant_contents(graph), *layouts, torch.backends.mkldnn.enabled),
        *(torch.__version__, __version__, INDUCTOR_PATCH_VERSION, sorted(options.items())),
        *(processor.model, processor.vectors, processor.kernels, threads, in_order, str(device)),
    )
    return hashlib.sha256(repr(known).encode()).hexdigest()


def _output_layouts(captured: CapturedStep) -> list[str]:
    """Returns the strides of all results: oneDNN on or off decides them for an equal graph."""
    values = (node.meta.get("val") for node in captured.graph.graph.nodes)
    return [str(value.stride()) for value in values if isinstance(value, Tensor) and value.layout == torch.strided]


def _input_layouts(captured: CapturedStep) -> list[tuple[Any, ...]]:
    return [(tuple(value.shape), str(value.dtype), value.stride()) for value in captured.examples]
