"""The files that a Task is made of: which they are, and how a run's copies of them are imported."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from hotloop.errors import TaskError

_VERSION_PATTERN = ("hotloop", "torch", *sys.stdlib_module_names)
"""Packages that count by their versions, wherever they lie."""


def split_reference(reference: str) -> tuple[str, str]:
    """`(file or module, name)` of what a user typed; the colon of `C:\\task.py` belongs to the file."""
    where, colon, attribute = reference.rpartition(":")
    if not colon or "/" in attribute or "\\" in attribute or attribute.endswith(".py"):
        return reference, "task"
    return where, attribute or "task"


def file_of_reference(where: str) -> Path | None:
    """The file that a reference names; None if it names a module.

    Raises:
        TaskError: there is no such file, or it holds no Python.
    """
    path = Path(where)
    if not where.endswith(".py") and not path.is_file():
        return None
    if not path.is_file():
        raise TaskError(f"no file {path}", expected="a Python file that holds a Task", fix="check the path")
    if path.suffix != ".py":
        raise TaskError(f"{path} is not a Python file", expected="file.py, or file.py:name", fix="check the path")
    return path


def defines_task(path: Path, name: str) -> bool:
    """Whether a file defines a Task of that name, as far as its text tells; it isn't run.

    A file that hotloop reads Tasks from imports hotloop, and has at its top level a function or a call's result of that
    name, or imports it; or it imports it from a local file that does.

    Raises:
        TaskError: it can't be read.
    """
    return _defines_task(path, name, set())


def _defines_task(path: Path, name: str, seen: set[tuple[Path, str]]) -> bool:
    if (path, name) in seen:
        return False
    seen.add((path, name))
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return False  # whoever runs it says what is wrong with it
    except OSError as error:
        raise TaskError(f"{path} can't be read ({error.strerror})", fix="check the path") from error
    ours = any(name.partition(".")[0] == "hotloop" for name in _imported_modules(tree, ""))
    for statement in _top_level_statements(tree.body):
        if isinstance(statement, ast.ImportFrom):
            names = [alias.name for alias in statement.names if (alias.asname or alias.name) == name]
            if names and (
                ours or any(_defines_task(file, names[0], seen) for file in _candidate_files(statement, path))
            ):
                return True
        elif ours and _defines_name(statement, name):
            return True
    return False


def _candidate_files(statement: ast.ImportFrom, path: Path) -> list[Path]:
    """The files beside a file, or below the working directory, that it may import from."""
    start = path.absolute().parents[max(0, statement.level - 1)]
    stem = (statement.module or "").replace(".", "/")
    files = [base / stem / "__init__.py" for base in (start, Path.cwd())]
    files += [base / f"{stem}.py" for base in (start, Path.cwd())]
    return [file for file in files if file.is_file()]


def _top_level_statements(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """What runs when a file is imported; not what stands under `if __name__ == "__main__"`."""
    for statement in statements:
        yield statement
        if (isinstance(statement, ast.If) and "__main__" not in ast.dump(statement.test)) or isinstance(
            statement, ast.Try
        ):
            yield from _top_level_statements([*statement.body, *statement.orelse])


def _defines_name(statement: ast.stmt, name: str) -> bool:
    if isinstance(statement, ast.FunctionDef):
        return statement.name == name
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        made = isinstance(statement.value, ast.Call | ast.Name | ast.IfExp)
        return made and any(isinstance(target, ast.Name) and target.id == name for target in targets)
    return False


def source_digest(files: Mapping[str, bytes]) -> str:
    """SHA-256 over names and contents."""
    total = hashlib.sha256()
    for name in sorted(files):
        total.update(f"{name}\0{len(files[name])}\0".encode() + files[name])
    return total.hexdigest()


def imported_packages(files: Mapping[str, bytes]) -> set[str]:
    """Names of the packages and modules, local ones too, that a Task's files may import."""
    return {name.partition(".")[0] for content in files.values() for name in _imports_of_file(content, "")} - {""}


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of those that are installed and say one; Python's own and local ones say none."""
    return {name: said for name in sorted(packages) if (said := _installed_version(name)) is not None}


def _installed_version(package: str) -> str | None:
    if package in sys.stdlib_module_names:
        return None
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # it goes by another name there
        said = getattr(sys.modules.get(package), "__version__", None)
        return said if isinstance(said, str) else None


def module_name(path: Path) -> str:
    """The name under which a file is imported: its own, unless an installed module has that one."""
    return f"_{path.stem}_task" if is_taken(path.stem) else path.stem


def enclosing_package(path: Path) -> str:
    """The dotted package of a file that imports relatively, as `from .net import build` does; empty for other files.

    The package is made of the folders above the file with an `__init__.py`, and of as many as its imports go up.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return ""  # running the file says what is wrong with it
    levels = [node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    if not any(levels):
        return ""
    above = itertools.takewhile(lambda folder: (folder / "__init__.py").is_file(), path.parents)
    folders = path.parents[: max(len(list(above)), *levels)]
    return ".".join(folder.name for folder in reversed(folders))


def is_taken(name: str) -> bool:
    if name in sys.stdlib_module_names or name in ("__main__", "hotloop"):
        return True
    return PathFinder.find_spec(name, [entry for entry in sys.path if is_installed(entry)]) is not None


def is_installed(path: str) -> bool:
    """Whether a file or folder is that of an installed package."""
    return "site-packages" in path or "dist-packages" in path


def make_importable(folder: Path) -> None:
    """Puts `folder` before the installed packages, but after Python's own modules, which all else relies on."""
    if str(folder) not in sys.path:
        installed = (place for place, entry in enumerate(sys.path) if is_installed(entry))
        sys.path.insert(next(installed, len(sys.path)), str(folder))


def local_sources(module: ModuleType, root: Path) -> dict[str, bytes]:
    """The module's file and those below `root` that it imports, now or later, directly or not."""
    files: dict[str, bytes] = {}
    waiting = [(module.__name__, Path(str(module.__file__)).resolve())]
    while waiting:
        name, path = waiting.pop()
        relative = path.relative_to(root).as_posix()
        if relative in files:
            continue
        files[relative] = path.read_bytes()
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        others = _imports_of_file(files[relative], package) | _package_prefixes(name)
        waiting += [(other, found) for other in others if (found := _file_below(other, root)) is not None]
    return files


_MAX_FILES = 300
"""Files of code that isn't installed."""


def external_sources(files: Mapping[str, bytes], also: Iterable[str] = ()) -> dict[str, bytes]:
    """Module -> content of what `files` import, now or later, directly or not, that is neither among them nor installed.

    So it is with a package installed to be edited, or found by PYTHONPATH: its code changes and its version doesn't. Of many
    files, what functions import is followed no further: it may lead to thousands.

    Args:
        files: of a Task, by their paths.
        also: names of modules to begin with beside them.
    """
    found: dict[str, bytes] = {}
    seen = {path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in files}
    waiting = [prefix for name in sorted(also) for prefix in sorted(_package_prefixes(name))]
    for path, content in sorted(files.items()):
        waiting += sorted(_imports_of_file(content, ".".join(path.split("/")[:-1])))
    while waiting:
        name = waiting.pop()
        spec = None if name in seen else _find_spec(name)
        seen.add(name)
        if spec is None or not spec.has_location or spec.origin is None or is_installed(spec.origin):
            continue
        if (text := _module_content(spec)) is None:
            continue
        found[name] = text
        package = name.rpartition(".")[0] if spec.submodule_search_locations is None else name
        if spec.origin.endswith(".py"):
            waiting += sorted(_imports_of_file(text, package, late=len(found) < _MAX_FILES))
    return found


def _module_content(spec: ModuleSpec) -> bytes | None:
    """Of a module's file, which may lie in an archive; None where it can't be read."""
    try:
        with suppress(AttributeError):
            return spec.loader.get_data(str(spec.origin))  # type: ignore[union-attr]
        return Path(str(spec.origin)).read_bytes()
    except OSError:
        return None


def _find_spec(name: str) -> ModuleSpec | None:
    """What importing a module would take, without importing it or its parents."""
    parent = name.rpartition(".")[0]
    if name.partition(".")[0] in _VERSION_PATTERN:
        return None
    try:
        if not parent:
            return importlib.util.find_spec(name)
        above = _find_spec(parent)
        folders = None if above is None else above.submodule_search_locations
        return None if folders is None else PathFinder.find_spec(name, folders)
    except Exception:  # other people's finders may raise anything; a module put together by hand has no spec
        return None


@cache  # by content: a Task is looked at several times in one run
def _imports_of_file(content: bytes, package: str, late: bool = True) -> frozenset[str]:
    """`_imported_modules` of a file's text; nothing where Python met an error in it and went on without it, or never will."""
    try:
        return frozenset(_imported_modules(ast.parse(content), package, late))
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()


def _ast_nodes(tree: ast.AST, late: bool) -> Iterator[ast.AST]:
    """All nodes, or those that run when the file is imported."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if late or not (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or _is_type_checking(node)
        ):
            waiting += ast.iter_child_nodes(node)


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in (
        getattr(node.test, "id", ""),
        getattr(node.test, "attr", ""),
    )


def _imported_modules(tree: ast.Module, package: str, late: bool = True) -> set[str]:
    """Names of the modules that a file of `package` may import."""
    names: set[str] = set()
    for node in _ast_nodes(tree, late):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".") if package else []
            base = parents[: len(parents) - node.level + 1] if node.level else []
            start = ".".join([*base, node.module] if node.module else base)
            names |= {start} | {f"{start}.{alias.name}" for alias in node.names}
    return {prefix for name in names for prefix in _package_prefixes(name)}


def _package_prefixes(name: str) -> set[str]:
    """`a`, `a.b` and `a.b.c` of `a.b.c`."""
    parts = name.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts) + 1)}


def _file_below(name: str, root: Path) -> Path | None:
    """The file below `root` of a module that is loaded, or that would be if it were imported now."""
    module = sys.modules.get(name)
    if module is not None:
        return _code_file(module) if _is_below(module, root) else None
    stem = root / name.replace(".", "/")
    return next((path for path in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")) if path.is_file()), None)


def _code_file(module: ModuleType) -> Path | None:
    """Where a module's code lies, whatever its `__file__` says."""
    spec = getattr(module, "__spec__", None)
    file = getattr(spec, "origin", None) or getattr(module, "__file__", None)
    return Path(file).resolve() if file and file.endswith(".py") else None


def _is_below(module: ModuleType, root: Path) -> bool:
    path = _code_file(module)
    if path is None or is_installed(str(path)) or path.is_relative_to(Path(__file__).resolve().parents[2]):
        return False
    return path.is_relative_to(root)


class _CopyLoader(SourceFileLoader):
    """Loads a copy of a file; while it runs and after, its `__file__` is the original's, beside which its data lies."""

    def __init__(self, name: str, path: Path, original: Path) -> None:
        super().__init__(name, str(path))
        self.original = original

    def get_code(self, fullname: str) -> CodeType:
        """Compiled anew each time: bytecode has no place in a run folder, and a full disk tears it."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def exec_module(self, module: ModuleType) -> None:
        if self.original.parent.is_dir():
            module.__file__ = str(self.original)
        super().exec_module(module)


@dataclass(frozen=True, eq=False)
class SourceCopies(MetaPathFinder):
    """Finds modules among a run's copies, before any of the same names elsewhere.

    Attributes:
        folder: of the copies.
        origin: the folder that they were taken from.
        files: their paths, relative to both.
    """

    folder: Path
    origin: Path
    files: frozenset[str]

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        stem = fullname.replace(".", "/")
        return next((self.spec(fullname, f) for f in (f"{stem}/__init__.py", f"{stem}.py") if f in self.files), None)

    def spec(self, name: str, file: str) -> ModuleSpec:
        """What importing `file` as module `name` takes."""
        loader = _CopyLoader(name, self.folder / file, self.origin / file)
        spec = importlib.util.spec_from_file_location(name, self.folder / file, loader=loader)
        assert spec is not None
        return spec

    def install(self) -> None:
        """Makes these the copies in use, and drops modules of their names that were loaded from elsewhere."""
        forget_copies()
        for file in self.files:
            name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            if not is_taken(name.partition(".")[0]):
                sys.modules.pop(name, None)
        sys.meta_path.insert(0, self)
        make_importable(self.folder)


def forget_copies() -> None:
    """Undoes `SourceCopies.install`, so that originals can be imported again."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, SourceCopies)]
    for name, module in list(sys.modules.items()):
        if isinstance(getattr(getattr(module, "__spec__", None), "loader", None), _CopyLoader):
            del sys.modules[name]
