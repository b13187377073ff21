"""Imports a run's copies of a Task's source files, from content that was checked."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from hotloop.core.files.source_files import is_taken


class _CopyLoader(SourceFileLoader):
    """Loads the checked content of a copy with the original's `__file__`: the Task's data lies beside the original."""

    def __init__(self, name: str, path: Path, original: Path, content: bytes) -> None:
        super().__init__(name, str(path))
        self.original, self.content = original, content

    def get_code(self, fullname: str) -> CodeType:
        """Compiles the content: neither the file, which may have changed meanwhile, nor bytecode is read."""
        return self.source_to_code(self.content, self.get_filename(fullname))

    def exec_module(self, module: ModuleType) -> None:
        if self.original.parent.is_dir():
            module.__file__ = str(self.original)
        super().exec_module(module)


@dataclass(frozen=True, eq=False)
class SourceCopies(MetaPathFinder):
    """Imports a run's copies before modules of the same names elsewhere; nothing else in their folder can be imported.

    Attributes:
        folder: of the copies, which is not in `sys.path`.
        origin: the original folder.
        files: content by path relative to both, whose digest was checked.
    """

    folder: Path
    origin: Path
    files: Mapping[str, bytes]

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        stem = fullname.replace(".", "/")
        for file in (f"{stem}/__init__.py", f"{stem}.py"):
            if file in self.files:
                return self.spec(fullname, file)
        is_below = any(Path(entry).is_relative_to(self.folder) for entry in path or ())
        is_package = any(name.startswith(f"{stem}/") for name in self.files)
        if is_package and (is_below or PathFinder.find_spec(fullname, path) is None):
            return self.spec(fullname, f"{stem}/__init__.py")
        if is_below:  # the other finders would import what is in the folder
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None

    def spec(self, name: str, file: str) -> ModuleSpec:
        """Returns the spec of a file; a package without `__init__.py` is imported as if that were empty."""
        loader = _CopyLoader(name, self.folder / file, self.origin / file, self.files.get(file, b""))
        spec = importlib.util.spec_from_file_location(name, self.folder / file, loader=loader)
        assert spec is not None
        return spec

    def install(self) -> None:
        """Activates these copies, here and in processes that inherit `sys.path`; unloads modules of their names."""
        forget_copies()
        for file in self.files:
            name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            if not is_taken(name.partition(".")[0]):
                sys.modules.pop(name, None)
        sys.meta_path.insert(0, self)
        sys.path.append(_CopiesEntry(self))


class _CopiesEntry(str):
    """An entry of `sys.path` without files: a process that receives the entry by pickle installs the copies too.

    Worker processes of `spawn` and `forkserver` receive `sys.path` before they unpickle the Task's data set.
    """

    copies: SourceCopies

    def __new__(cls, copies: SourceCopies) -> _CopiesEntry:
        entry = super().__new__(cls, "<copies of a run>")
        entry.copies = copies
        return entry

    def __reduce__(self) -> Any:
        return _install_copies, (self.copies.folder, self.copies.origin, dict(self.copies.files))


def _install_copies(folder: Path, origin: Path, files: dict[str, bytes]) -> _CopiesEntry:
    SourceCopies(folder, origin, files).install()
    entry: _CopiesEntry = sys.path[-1]  # type: ignore[assignment]
    return entry


def forget_copies() -> None:
    """Reverts `SourceCopies.install`, so that originals can be imported again."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, SourceCopies)]
    sys.path[:] = [entry for entry in sys.path if not isinstance(entry, _CopiesEntry)]
    for name, module in list(sys.modules.items()):
        if isinstance(getattr(getattr(module, "__spec__", None), "loader", None), _CopyLoader):
            del sys.modules[name]
