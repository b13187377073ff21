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
from hotloop.core.reporter import Say
from hotloop.errors import HotloopError, blame
from hotloop.lowering.compile.capture import Capture, Captured
from hotloop.lowering.compile.guards import contents_of
from hotloop.lowering.compile.inductor_patches import MENDED, ready_to_compile
from hotloop.lowering.context import Ingredients

_KEPT = 64
"""Packages, and notes that a step stays the same; those that were used longest ago go."""


def packaged(
    captured: Captured, device: torch.device, options: dict[str, Any], say: Say
) -> Callable[[list[Tensor]], Any]:
    """The captured step as a program, out of a package.

    One that can't be kept serves this time alone, and one that can't be loaded is made anew; either is said.
    """
    path = folder() / f"{_key(captured, device, options)}.pt2"
    if _is_kept(path):
        try:
            return _loaded(path)
        except Exception as error:
            say(f"the kept package can't be loaded, and is made anew: {blame(error)}")
    content = _made(captured, device, options)
    try:
        write_atomic(path, content)
    except HotloopError as error:
        say(f"the package isn't kept for later runs: {error.given}")
        with TemporaryDirectory() as elsewhere:
            path = Path(elsewhere) / path.name
            path.write_bytes(content)
            return _loaded(path)
    _forget_oldest(path.parent, "*.pt2")
    return _loaded(path)


def captured_surely(capture: Capture, batch: Any, parts: Ingredients) -> Captured:
    """A step's graph, captured twice to see that it stays the same; once where a run before this one saw just that.

    What it saw is known by the graph, and by the files of the classes and functions that it comes from.

    Raises:
        PlanError: it can't be captured, or is another each time.
    """
    first = capture.once(batch)
    known = first.graph.code, contents_of(first.graph), _inputs(first), _files(parts), torch.__version__, __version__
    path = folder() / f"{hashlib.sha256(repr(known).encode()).hexdigest()}.twice"
    if _is_kept(path):
        return first
    second = capture.again(first, batch)
    with suppress(HotloopError):  # nothing can be kept there: so it is captured twice the next time, too
        write_atomic(path, b"")
        _forget_oldest(path.parent, "*.twice")
    return second


def _files(parts: Ingredients) -> list[tuple[str, int, int]]:
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


def folder() -> Path:
    """Where this user's packages are kept."""
    return cache_folder() / "packages"


def _is_kept(path: Path) -> bool:
    """Also notes that it was used; False, too, where nobody may look."""
    if not os.path.isfile(path):
        return False
    with suppress(OSError):  # somebody else's folder
        os.utime(path)
    return True


def _loaded(path: Path) -> Callable[[list[Tensor]], Any]:
    """The program in a package, which holds all that it needs: torch's own `load_package` would import the compiler first."""
    return torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, -1).run


def _made(captured: Captured, device: torch.device, options: dict[str, Any]) -> bytes:
    from torch._inductor.package import package_aoti

    with redirect_stdout(io.StringIO()), ready_to_compile(device):
        files: Any = torch._inductor.aot_compile(
            captured.graph, tuple(captured.examples), options={**options, "aot_inductor.package": True}
        )
        archive = io.BytesIO()
        package_aoti(archive, files)
    return archive.getvalue()


def _forget_oldest(where: Path, which: str) -> None:
    used: dict[Path, float] = {}
    for path in where.glob(which):
        with suppress(FileNotFoundError):  # another process forgets them too
            used[path] = path.stat().st_mtime
    for path in sorted(used, key=used.__getitem__)[:-_KEPT]:
        with suppress(OSError):
            path.unlink()


def _key(captured: Captured, device: torch.device, options: dict[str, Any]) -> str:
    """What a package depends on: the graph with its constants, its inputs, the compiler, the processor, the threads."""
    baked = contents_of(captured.graph)
    processor = machine.processor()  # it is compiled for this very one, and a home may be shared by many
    threads, in_order = torch.get_num_threads(), torch.get_deterministic_debug_mode() > 0
    known = (
        *(captured.graph.code, baked, _inputs(captured), _laid(captured), torch.backends.mkldnn.enabled),
        *(torch.__version__, __version__, MENDED, sorted(options.items())),
        *(processor.model, processor.vectors, processor.kernels, threads, in_order, str(device)),
    )
    return hashlib.sha256(repr(known).encode()).hexdigest()


def _laid(captured: Captured) -> list[str]:
    """How what the graph computes lies in memory: of an equal graph, whether oneDNN is on decides that."""
    values = (node.meta.get("val") for node in captured.graph.graph.nodes)
    return [str(value.stride()) for value in values if isinstance(value, Tensor) and value.layout == torch.strided]


def _inputs(captured: Captured) -> list[tuple[Any, ...]]:
    return [(tuple(value.shape), str(value.dtype), value.stride()) for value in captured.examples]
