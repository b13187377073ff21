"""Loads a Task from `file.py`, `file.py:name` or `package.module:name`, with the source files for its run."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from hotloop.core.files.source_files import (
    SourceCopies,
    enclosing_package,
    file_of_reference,
    files_of,
    forget_copies,
    is_taken,
    local_sources,
    make_importable,
    module_name,
    source_digest,
    split_reference,
)
from hotloop.core.records.training import SourceRecord
from hotloop.errors import TaskError, call_user_code, did_you_mean, type_name
from hotloop.task import Task


@dataclass(frozen=True)
class LoadedTask:
    """A Task with its source.

    Attributes:
        record: its location in `files`; None for a Task made in Python.
        files: content by path relative to the source's root, of the Task's file and the local modules that it imports.
    """

    task: Task
    record: SourceRecord | None
    files: dict[str, bytes]


def load_task(reference: str, parameters: Mapping[str, str] | None = None) -> LoadedTask:
    """Loads a Task by reference.

    Args:
        reference: `file.py`, `file.py:name` or `package.module:name`; the default name is `task`.
        parameters: arguments of a `task(...)` function, as command-line text.

    Raises:
        TaskError: a missing file, an error in the file, no Task of that name, or an unknown parameter.
    """
    module, root, stem, attribute = _load_reference(reference)
    task = _task_in(module, attribute, parameters or {}, reference)
    files = local_sources(module, root)
    record = SourceRecord(
        file=Path(str(module.__file__)).resolve().relative_to(root).as_posix(),
        module=module.__name__,
        attribute=attribute,
        parameters=dict(parameters or {}),
        digest=source_digest(files),
        reference=reference,
        origin=str(root),
    )
    if task.name == "task":
        task = replace(task, name=stem if attribute == "task" else attribute)
    return LoadedTask(task, record, files)


def task_parameters(reference: str) -> dict[str, inspect.Parameter]:
    """Returns the parameters of a `task(...)` function by name; empty for a Task that is a value.

    Raises:
        TaskError: a missing file, an error in the file, or no Task of that name.
    """
    module, _, _, attribute = _load_reference(reference)
    value = getattr(module, attribute, None)
    if isinstance(value, Task):
        return {}
    if not callable(value):
        raise _no_task_error(module, attribute, reference)
    return named_parameters(value)


def _load_reference(reference: str) -> tuple[ModuleType, Path, str, str]:
    """Returns the module, its root folder, a name for the Task, and the Task's name in the module."""
    where, attribute = split_reference(reference)
    forget_copies()
    path = file_of_reference(where)
    if path is not None:
        return *_load_file(path.resolve()), path.stem, attribute
    module = _load_module(where, reference)
    is_package = Path(str(module.__file__)).name == "__init__.py"
    root = Path(str(module.__file__)).resolve().parents[module.__name__.count(".") + is_package]
    return module, root, where.rpartition(".")[2], attribute


def load_from_run(folder: Path, record: SourceRecord) -> Task:
    """Loads the Task from the copy of its source in a run folder.

    Raises:
        TaskError: the copy was changed, or the record's file isn't in the copy.
    """
    folder = folder.resolve()
    files = files_of(folder)
    if source_digest(files) != record.digest:
        raise TaskError(
            f"the Task's source in {folder} was changed since the run was started",
            expected=f"the files with digest {record.digest[:12]}",
            fix="put them back, or start a new run",
        )
    if record.file not in files:
        raise TaskError(
            f"the run names {record.file} as the Task's file",
            expected=f"one of the files in {folder}",
            fix="restore run.json from a copy",
        )
    copies = SourceCopies(folder, Path(record.origin), files)
    copies.install()
    module = _execute(copies.spec(record.module, record.file), record.file)
    return _task_in(module, record.attribute, record.parameters, record.reference)


def _load_file(path: Path) -> tuple[ModuleType, Path]:
    """Returns a file's module, and the folder of its outermost package or of the file."""
    package = enclosing_package(path)
    own = [] if path.stem == "__init__" else [path.stem]
    name = ".".join([package, *own]) if package else module_name(path)
    root = path.parents[package.count(".") + 1 if package else 0]
    if package:
        _check_name(package.partition(".")[0], root)
    make_importable(root)
    if package:
        _import_package(package, root)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    return _execute(spec, path.name), root


def _check_name(top: str, root: Path) -> None:
    """Raises TaskError if an installed package has the folder's name."""
    if is_taken(top):
        raise TaskError(
            f"the folder {root / top} is a package, since its Task imports relatively, and {top!r} is an installed one",
            expected="a name that no installed package has",
            fix="rename the folder, or import without the dot",
        )


def _import_package(package: str, root: Path) -> None:
    """Imports the package below `root` in place of a loaded package of the same name."""
    top = package.partition(".")[0]
    if list(getattr(sys.modules.get(top), "__path__", ())) != [str(root / top)]:
        for name in [name for name in sys.modules if f"{name}.".startswith(f"{top}.")]:
            del sys.modules[name]
        spec = PathFinder.find_spec(top, [str(root)])
        assert spec is not None
        if spec.loader is not None:
            _execute(spec, f"{top}/__init__.py")
        else:  # no `__init__.py`: Python would merge all folders of that name
            sys.modules[top] = importlib.util.module_from_spec(spec)
            sys.modules[top].__path__ = [str(root / top)]
    _run_user_file(package, importlib.import_module, package)


def _execute(spec: ModuleSpec, what: str) -> ModuleType:
    """Runs a module's code and adds the module to `sys.modules`, unless the code fails."""
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    previous = sys.modules.get(spec.name)
    sys.modules[spec.name] = module
    try:
        _run_user_file(what, spec.loader.exec_module, module)
    except BaseException:
        del sys.modules[spec.name]
        if previous is not None:
            sys.modules[spec.name] = previous
        raise
    return module


def _load_module(name: str, reference: str) -> ModuleType:
    make_importable(Path.cwd())
    spec = _run_user_file(name, _find_spec, name)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        is_run = (Path(name) / "run.json").is_file()
        raise TaskError(
            f"{reference!r} is neither a Python file nor a module",
            expected="file.py, file.py:name or package.module:name",
            fix=f"go on with that run by --resume {name}" if is_run else "check the path, and the folder you are in",
        )
    module: ModuleType = _run_user_file(name, importlib.import_module, name)
    return module


def _find_spec(name: str) -> ModuleSpec | None:
    if not re.fullmatch(r"\w+(\.\w+)*", name):
        return None
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):  # the module itself or its package is missing
            return None
        raise
    except ValueError:  # such as __main__
        return None


def _run_user_file(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs a user's file; an error becomes one line."""
    try:
        return call_user_code(what, function, *arguments)
    except TaskError as error:
        if isinstance(error.__cause__, SyntaxError) and error.__cause__.lineno:
            raise _syntax_error(what, error.__cause__) from error.__cause__
        if isinstance(error.__cause__, ModuleNotFoundError) and error.__cause__.name:
            library = error.__cause__.name.partition(".")[0]
            raise TaskError(error.given, fix=f"if that is a library: pip install {library}") from error.__cause__
        raise
    except SystemExit as error:
        raise TaskError(
            f"{what} called exit({error.code!r}) while it was loaded",
            expected="a file that defines its Task and returns",
            fix="put what runs it as a script under `if __name__ == '__main__':`",
        ) from error


def _syntax_error(what: str, error: SyntaxError) -> TaskError:
    file = Path(error.filename).name if error.filename else what
    shown = f": {error.text.strip()}" if error.text and error.text.strip() else ""
    found = TaskError(f"{file} line {error.lineno}{shown}", expected=f"Python ({error.msg})", fix="correct that line")
    found.detail = "".join(traceback.format_exception_only(error)).rstrip("\n")
    return found


def _task_in(module: ModuleType, attribute: str, given: Mapping[str, Any], reference: str) -> Task:
    value = getattr(module, attribute, None)
    if isinstance(value, Task):
        if given:
            raise TaskError(
                f"{reference} holds its Task as a value, but {', '.join(given)} was given",
                expected=f"a function {attribute}(...) to pass it to",
                fix=f"write `def {attribute}({next(iter(given))}=...)` that returns the Task",
            )
        return value
    if not callable(value):
        raise _no_task_error(module, attribute, reference)
    arguments = _arguments(value, given, attribute)
    task = _run_user_file(f"{attribute}() in {reference}", lambda: value(**arguments))
    if not isinstance(task, Task):
        raise TaskError(
            f"{attribute}() in {reference} returned {type_name(task)}",
            expected="a hotloop.Task",
            fix="return the Task from it",
        )
    return task


def _no_task_error(module: ModuleType, attribute: str, reference: str) -> TaskError:
    is_defined = hasattr(module, attribute)
    there = f"{attribute!r} in {reference} is {type_name(getattr(module, attribute))}" if is_defined else ""
    others = [name for name, item in vars(module).items() if isinstance(item, Task)]
    where = split_reference(reference)[0]
    return TaskError(
        there or f"{reference} holds no Task named {attribute!r}",
        expected="a hotloop.Task, or a function that returns one",
        fix=f"name one of its Tasks: {where}:{others[0]}" if others else f"write {attribute} = hotloop.Task(...) in it",
    )


def _arguments(function: Any, given: Mapping[str, Any], name: str) -> dict[str, Any]:
    parameters = named_parameters(function)
    unknown = [key for key in given if key not in parameters]
    if unknown:
        raise TaskError(
            f"{name}() has no parameter {unknown[0]!r}",
            expected="one of " + ", ".join(parameters) if parameters else "none, since it takes no parameters",
            fix=did_you_mean(unknown[0], parameters) or "check the spelling"
            if parameters
            else f"write `def {name}({unknown[0]}=...)`",
        )
    missing = [key for key, p in parameters.items() if p.default is p.empty and key not in given]
    if missing:
        raise TaskError(
            f"{name}() needs a value for {missing[0]!r}",
            expected="one for each parameter without a default",
            fix=f"add --param {missing[0]}=VALUE",
        )
    return {key: parse_argument(value, parameters[key]) for key, value in given.items()}


def named_parameters(function: Any) -> dict[str, inspect.Parameter]:
    """Returns a function's parameters by name, without `*args` and `**kwargs`."""
    parameters = _signature(function).parameters
    return {name: p for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _signature(function: Any) -> inspect.Signature:
    """Returns the signature with evaluated annotations, or with text where names are undefined at run time."""
    try:
        return inspect.signature(function, eval_str=True)
    except (NameError, AttributeError, SyntaxError, TypeError):
        return inspect.signature(function)


_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false"}


def parse_argument(value: Any, parameter: inspect.Parameter) -> Any:
    """Returns command-line text as the type of the parameter's annotation or default."""
    if not isinstance(value, str):
        return value
    wanted = _argument_type(parameter)
    if wanted is None:
        return _parse_literal(value)
    literal = _parse_literal(value)
    first = None
    for candidate in [None] * (literal is None) + [value] + [literal] * isinstance(literal, tuple | list | dict | set):
        try:
            return wanted.validate_python(candidate)
        except ValidationError as error:
            first = first or error
    assert first is not None
    kind_of = parameter.annotation if parameter.annotation in _TYPE_NAMES else type(parameter.default)
    raise TaskError(
        f"{parameter.name}={value}",
        expected=_TYPE_NAMES.get(kind_of) or first.errors()[0]["msg"].removeprefix("Input should be "),
        fix="give such a value"
        if parameter.default in (None, parameter.empty)
        else f"check its default, {parameter.default!r}",
    )


def _argument_type(parameter: inspect.Parameter) -> TypeAdapter | None:
    """Returns the validator of a parameter's values; None without annotation and default."""
    default = parameter.default
    candidates = [parameter.annotation, type(default) if default not in (None, parameter.empty) else parameter.empty]
    for candidate in candidates:
        if candidate is not parameter.empty and not isinstance(candidate, str):
            try:
                return TypeAdapter(candidate)
            except (PydanticSchemaGenerationError, PydanticUserError):
                continue
    return None


def _parse_literal(text: str) -> Any:
    """Returns the Python value that a text spells, or the text."""
    try:
        return ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text.lower(), text))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text
