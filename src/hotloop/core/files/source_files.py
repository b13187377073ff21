"""Finds the source files of a Task, in the user's folders and in a run's, and imports a run's copies from checked content."""

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

from hotloop.core.files.atomic_files import open_regular, read_regular
from hotloop.core.installed_code import is_package_path
from hotloop.errors import RunError, TaskError

_VERSIONED_PACKAGES = ("hotloop", "torch", *sys.stdlib_module_names)
"""Packages that are identified by their versions, whatever their path."""


def split_reference(reference: str) -> tuple[str, str]:
    r"""Returns `(file or module, name)` of a reference; the colon of `C:\task.py` belongs to the file."""
    where, colon, attribute = reference.rpartition(":")
    if not colon or "/" in attribute or "\\" in attribute or attribute.endswith(".py"):
        return reference, "task"
    return where, attribute or "task"


def file_of_reference(where: str) -> Path | None:
    """Returns the file of a reference; None for a module.

    Raises:
        TaskError: the file is missing, or is no Python file.
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
    """Returns whether a file's text defines a Task of that name; the file isn't executed.

    Such a file imports hotloop, and has at its top level a function, an assigned call or an import of that name; or it
    imports the name from a local file that does.

    Raises:
        TaskError: the file can't be read.
    """
    return _defines_task(path, name, set())


def _defines_task(path: Path, name: str, seen: set[tuple[Path, str]]) -> bool:
    if (path, name) in seen:
        return False
    seen.add((path, name))
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return False  # running the file reports the error
    except OSError as error:
        raise TaskError(f"{path} can't be read ({error.strerror})", fix="check the path") from error
    imports_hotloop = any(name.partition(".")[0] == "hotloop" for name in _imported_modules(tree, ""))
    for statement in _top_level_statements(tree.body):
        if isinstance(statement, ast.ImportFrom):
            names = [alias.name for alias in statement.names if (alias.asname or alias.name) == name]
            files = _candidate_files(statement, path) if names else []
            if (names and imports_hotloop) or any(_defines_task(file, names[0], seen) for file in files):
                return True
        elif imports_hotloop and _defines_name(statement, name):
            return True
    return False


def _candidate_files(statement: ast.ImportFrom, path: Path) -> list[Path]:
    start = path.absolute().parents[max(0, statement.level - 1)]
    stem = (statement.module or "").replace(".", "/")
    files = [base / stem / "__init__.py" for base in (start, Path.cwd())]
    files += [base / f"{stem}.py" for base in (start, Path.cwd())]
    return [file for file in files if file.is_file()]


def _top_level_statements(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements that an import executes, without `if __name__ == "__main__"`."""
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
        is_made = isinstance(statement.value, ast.Call | ast.Name | ast.IfExp)
        return is_made and any(isinstance(target, ast.Name) and target.id == name for target in targets)
    return False


def files_of(folder: Path) -> dict[str, bytes]:
    """Returns the Python files in the `source` folder of a run or a study, by their paths.

    Raises:
        RunError: the folder has a link, or can't be read.
    """
    files = {name: read_regular(path) for name, path in _listed(folder) if name.endswith(".py")}
    return {name: content for name, content in files.items() if content is not None}


def folder_digest(folder: Path) -> str:
    """Returns a digest of all files in a `source` folder except bytecode, which nothing reads.

    A Task may read any of them as code: a shared object, C++ text, a pickle.

    Raises:
        RunError: the folder has a link, or can't be read.
    """
    total = hashlib.sha256()
    for name, path in _listed(folder):
        with open(open_regular(path), "rb") as file:
            content = hashlib.file_digest(file, "sha256").digest()
        total.update(f"{name}\0".encode(errors="surrogateescape") + content)
    return total.hexdigest()


def _listed(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields the files of a folder without bytecode, in the order of their paths; a link would lead out of the folder."""
    try:
        entries = [] if folder.is_symlink() or not folder.exists() else sorted(folder.rglob("*"))
        for path in [folder, *entries]:
            if path.is_symlink():
                given = f"{path} is a link"
                raise RunError(given, expected="files and folders, as hotloop wrote them", fix="remove it")
            if not path.is_dir() and path.suffix != ".pyc":
                yield path.relative_to(folder).as_posix(), path
    except OSError as error:
        raise RunError(f"{error.filename or folder} can't be read ({error.strerror})", fix="check the path") from error


def source_digest(files: Mapping[str, bytes]) -> str:
    total = hashlib.sha256()
    for name in sorted(files):
        total.update(f"{name}\0{len(files[name])}\0".encode() + files[name])
    return total.hexdigest()


def imported_packages(files: Mapping[str, bytes]) -> set[str]:
    """Returns the names of packages and modules, also local ones, that a Task's files may import."""
    return {name.partition(".")[0] for content in files.values() for name in _imports_of_file(content, "")} - {""}


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Returns the versions of the installed packages; Python's and local modules have none."""
    return {name: version for name in sorted(packages) if (version := _installed_version(name)) is not None}


def _installed_version(package: str) -> str | None:
    if package in sys.stdlib_module_names:
        return None
    try:
        return _metadata_version(package)
    except metadata.PackageNotFoundError:  # installed under another name
        version = getattr(sys.modules.get(package), "__version__", None)
        return version if isinstance(version, str) else None


@cache
def _metadata_version(package: str) -> str:
    return metadata.version(package)  # takes 10 ms


def module_name(path: Path) -> str:
    """Returns the import name of a file: its stem, unless an installed module has that name."""
    return f"_{path.stem}_task" if is_taken(path.stem) else path.stem


def enclosing_package(path: Path) -> str:
    """Returns the dotted package of a file with relative imports (`from .net import build`); empty for other files.

    The package consists of the folders above the file with an `__init__.py`, and of as many as the imports go up.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return ""  # running the file reports the error
    levels = [node.level for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    if not any(levels):
        return ""
    above = itertools.takewhile(lambda folder: (folder / "__init__.py").is_file(), path.parents)
    folders = path.parents[: max(len(list(above)), *levels)]
    return ".".join(folder.name for folder in reversed(folders))


def is_taken(name: str) -> bool:
    if name in sys.stdlib_module_names or name in ("__main__", "hotloop"):
        return True
    return PathFinder.find_spec(name, [entry for entry in sys.path if is_package_path(entry)]) is not None


def make_importable(folder: Path) -> None:
    """Inserts the folder into `sys.path` before installed packages and after Python's own modules."""
    if str(folder) not in sys.path:
        installed = (place for place, entry in enumerate(sys.path) if is_package_path(entry))
        sys.path.insert(next(installed, len(sys.path)), str(folder))


def local_sources(module: ModuleType, root: Path) -> dict[str, bytes]:
    """Returns the module's file and all files below `root` that it imports, directly or not, by relative path."""
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
"""Number of external files after which imports inside functions are ignored: they may lead to thousands."""


def external_sources(files: Mapping[str, bytes], also: Iterable[str] = ()) -> dict[str, bytes]:
    """Returns the content by module of imports, direct or not, that are neither in `files` nor installed.

    Packages in editable installs and on PYTHONPATH are such modules: their code changes without their version.

    Args:
        files: of a Task, by path.
        also: further module names to start from.
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
        if spec is None or not spec.has_location or spec.origin is None or is_package_path(spec.origin):
            continue
        if (text := _module_content(spec)) is None:
            continue
        found[name] = text
        package = name.rpartition(".")[0] if spec.submodule_search_locations is None else name
        if spec.origin.endswith(".py"):
            waiting += sorted(_imports_of_file(text, package, late=len(found) < _MAX_FILES))
    return found


def _module_content(spec: ModuleSpec) -> bytes | None:
    """Returns the content of a module's file, also in an archive; None if it can't be read."""
    try:
        with suppress(AttributeError):
            return spec.loader.get_data(str(spec.origin))  # type: ignore[union-attr]
        return Path(str(spec.origin)).read_bytes()
    except OSError:
        return None


def _find_spec(name: str) -> ModuleSpec | None:
    """Returns the spec of a module without importing the module or its parents."""
    parent = name.rpartition(".")[0]
    if name.partition(".")[0] in _VERSIONED_PACKAGES:
        return None
    try:
        if not parent:
            return importlib.util.find_spec(name)
        above = _find_spec(parent)
        folders = None if above is None else above.submodule_search_locations
        return None if folders is None else PathFinder.find_spec(name, folders)
    except Exception:  # finders may raise anything; modules made by hand have no spec
        return None


@cache  # a run reads a Task's files several times
def _imports_of_file(content: bytes, package: str, late: bool = True) -> frozenset[str]:
    try:
        return frozenset(_imported_modules(ast.parse(content), package, late))
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()


def _ast_nodes(tree: ast.AST, late: bool) -> Iterator[ast.AST]:
    """Yields all nodes, or without `late` those that an import executes."""
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
    """Returns `a`, `a.b` and `a.b.c` of `a.b.c`."""
    parts = name.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts) + 1)}


def _file_below(name: str, root: Path) -> Path | None:
    """Returns the file below `root` of a module that is loaded, or would be if it were imported."""
    module = sys.modules.get(name)
    if module is not None:
        return _code_file(module) if _is_below(module, root) else None
    stem = root / name.replace(".", "/")
    return next((path for path in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")) if path.is_file()), None)


def _code_file(module: ModuleType) -> Path | None:
    spec = getattr(module, "__spec__", None)
    file = getattr(spec, "origin", None) or getattr(module, "__file__", None)
    return Path(file).resolve() if file and file.endswith(".py") else None


def _is_below(module: ModuleType, root: Path) -> bool:
    path = _code_file(module)
    if path is None or is_package_path(str(path)) or path.is_relative_to(Path(__file__).resolve().parents[2]):
        return False
    return path.is_relative_to(root)


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
