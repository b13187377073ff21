"""What the files of a source tree import, as it stands in their text: nothing of it is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Import:
    """One name imported by a file."""

    line: int
    module: str  # absolute and dotted: `hotloop.data.order`, `torch.nn`
    name: str  # of `from module import name`; empty for `import module`
    at_once: bool  # runs when the file is imported: not in a function, not under TYPE_CHECKING


class Imports(ast.NodeVisitor):
    """Collects the imports of one file."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.found: list[Import] = []
        self._at_once = True

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level:
            parents = self.package.split(".")
            module = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [module])])
        for alias in node.names:
            self._add(node, module, alias.name)

    def visit_Call(self, node: ast.Call) -> None:
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if called in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
            self._add(node, str(node.args[0].value))
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        with self._later():
            self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in (getattr(node.test, "attr", ""), getattr(node.test, "id", "")):
            self.generic_visit(node)
            return
        with self._later():
            for statement in node.body:
                self.visit(statement)
        for statement in node.orelse:
            self.visit(statement)

    @contextmanager
    def _later(self) -> Iterator[None]:
        before, self._at_once = self._at_once, False
        yield
        self._at_once = before

    def _add(self, node: ast.stmt | ast.expr, module: str, name: str = "") -> None:
        self.found.append(Import(node.lineno, module, name, self._at_once))


@cache  # by content: copies of the tree with one breach each are read at the price of the breach
def imports_of(text: str, package: str) -> list[Import]:
    """All imports in the text of a file that belongs to the package."""
    visitor = Imports(package)
    visitor.visit(ast.parse(text))
    return visitor.found


class Tree:
    """All files of one source tree, by key: `errors`, `data/order`, `data/__init__`."""

    def __init__(self, root: Path) -> None:
        self.paths = {path.relative_to(root).with_suffix("").as_posix(): path for path in root.rglob("*.py")}
        self.imports = {
            key: imports_of(path.read_text(encoding="utf-8"), ".".join(["hotloop", *key.split("/")[:-1]]))
            for key, path in self.paths.items()
        }

    def target(self, found: Import) -> str | None:
        """The key of the project's file that an import reads, None when it isn't the project's."""
        if found.module.split(".")[0] != "hotloop":
            return None
        if found == Import(found.line, "hotloop", "__version__", found.at_once):
            return None  # the one value that belongs to the package itself
        key = "/".join(found.module.split(".")[1:])
        inside = "/".join(filter(None, [key, found.name]))
        for candidate in (inside, f"{inside}/__init__", key, f"{key}/__init__".lstrip("/")):
            if candidate in self.paths:
                return candidate
        return key

    def targets(self, key: str, *, at_once: bool = False) -> Iterator[tuple[int, str]]:
        """Line and key of each file of the project that a file imports."""
        for found in self.imports[key]:
            target = self.target(found)
            if target is not None and target != key and (found.at_once or not at_once):
                yield found.line, target
