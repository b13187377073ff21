"""From what a user types to a Task, and from a run's copy of its source to the same Task."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotloop.core.files.source_files import make_importable, module_name, source_digest, split_reference
from hotloop.errors import TaskError
from hotloop.task_file import LoadedTask, load_from_run, load_task

TASK = """
from torch import nn, optim
import torch
import hotloop


def make(outputs=3):
    return hotloop.Task(
        model=lambda: nn.Linear(4, outputs),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: optim.SGD(parameters, lr=0.1),
        data=(torch.zeros(6, 4), torch.zeros(6, dtype=torch.int64)),
    )


"""


@pytest.fixture(autouse=True)
def imports(monkeypatch, tmp_path: Path) -> Iterator[None]:
    """Each test imports into a world that the others left as it was."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # files change within the second that caches go by
    before = dict(sys.modules)
    yield
    for name in sys.modules.keys() - before.keys():
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
    sys.modules.update(before)


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    importlib.invalidate_caches()


def as_run(loaded: LoadedTask, folder: Path) -> Path:
    """Writes a Task's source as a run folder holds it."""
    for name, content in loaded.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def outputs_of(task: Any) -> int:
    return task.build_model().out_features


# --- what is typed


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("task.py", ("task.py", "task")),
        ("task.py:net", ("task.py", "net")),
        ("task.py:", ("task.py", "task")),
        ("folder/task.py:net", ("folder/task.py", "net")),
        ("package.module", ("package.module", "task")),
        ("package.module:net", ("package.module", "net")),
        (r"C:\work\task.py", (r"C:\work\task.py", "task")),
        (r"C:\work\task.py:net", (r"C:\work\task.py", "net")),
        ("C:/project/task.py", ("C:/project/task.py", "task")),
        ("C:task.py", ("C:task.py", "task")),
        ("C:task.py:net", ("C:task.py", "net")),
        (r"\\server\share\task.py:net", (r"\\server\share\task.py", "net")),
        ("10:30/task.py", ("10:30/task.py", "task")),
        ("10:30/task.py:net", ("10:30/task.py", "net")),
    ],
)
def test_a_reference_is_a_place_and_a_name(reference: str, parts: tuple[str, str]) -> None:
    assert split_reference(reference) == parts


@pytest.mark.more
@given(
    st.from_regex(r"([A-Z]:)?[a-z /\\.]{0,12}[a-z]\.py", fullmatch=True), st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
)
def test_a_name_behind_any_path_is_found(path: str, name: str) -> None:
    assert split_reference(f"{path}:{name}") == (path, name)
    assert split_reference(path) == (path, "task")


# --- loading


def test_a_value_and_a_function(tmp_path: Path) -> None:
    write(tmp_path, {"work": TASK + "task = make()\ndef built(outputs: int = 5):\n    return make(outputs)\n"})
    file = tmp_path / "work.py"
    plain_task = load_task(str(file))
    assert (outputs_of(plain_task.task), plain_task.task.name) == (3, "work")
    built = load_task(f"{file}:built", {"outputs": "7"})
    assert (outputs_of(built.task), built.task.name, built.record.parameters) == (7, "built", {"outputs": "7"})
    assert outputs_of(load_task(f"{file}:built").task) == 5


def test_a_name_of_its_own_stays(tmp_path: Path) -> None:
    write(tmp_path, {"work": TASK + "import dataclasses\ntask = dataclasses.replace(make(), name='mine')\n"})
    assert load_task(str(tmp_path / "work.py")).task.name == "mine"


def test_the_record_says_where_in_the_copy_the_task_is(tmp_path: Path, monkeypatch) -> None:
    write(
        tmp_path,
        {
            "package/__init__": "",
            "package/net": TASK + "from .sizes import SIZE\ntask = make(SIZE)\n",
            "package/sizes": "SIZE = 9",
        },
    )
    monkeypatch.chdir(tmp_path)
    loaded = load_task("package.net:task")
    record = loaded.record
    assert (record.file, record.module, record.attribute, record.origin) == (
        "package/net.py",
        "package.net",
        "task",
        str(tmp_path),
    )
    assert record.reference == "package.net:task"
    assert loaded.files.keys() == {"package/__init__.py", "package/net.py", "package/sizes.py"}
    assert record.digest == source_digest(loaded.files)
    assert outputs_of(load_from_run(as_run(loaded, tmp_path / "run"), record)) == 9


def test_a_file_that_fails_leaves_no_half_made_module(tmp_path: Path) -> None:
    write(tmp_path, {"work": "first = 1\nraise ValueError('later')"})
    with pytest.raises(TaskError, match="later"):
        load_task(str(tmp_path / "work.py"))
    assert "work" not in sys.modules


def test_two_files_of_one_name_are_two_tasks(tmp_path: Path) -> None:
    for outputs in (4, 5):
        write(tmp_path / str(outputs), {"work": TASK + f"task = make({outputs})\n"})
    assert [outputs_of(load_task(str(tmp_path / str(outputs) / "work.py")).task) for outputs in (4, 5)] == [4, 5]


def test_a_symbolic_link_finds_the_neighbours_of_the_file(tmp_path: Path) -> None:
    write(
        tmp_path / "real",
        {"work": TASK + "import beside_real\ntask = make(beside_real.SIZE)\n", "beside_real": "SIZE = 8"},
    )
    (tmp_path / "link.py").symlink_to(tmp_path / "real" / "work.py")
    assert outputs_of(load_task(str(tmp_path / "link.py")).task) == 8


# --- names that others have


def test_installed_names_are_not_taken_away(tmp_path: Path) -> None:
    for name in ("random", "numpy", "hotloop", "__main__", "torch"):
        kept = sys.modules.get(name)
        write(tmp_path, {name: TASK + "task = make(6)\n"})
        loaded = load_task(str(tmp_path / f"{name}.py"))
        assert outputs_of(loaded.task) == 6 and loaded.record.file == f"{name}.py"
        assert sys.modules.get(name) is kept
        assert outputs_of(load_from_run(as_run(loaded, tmp_path / f"run-{name}"), loaded.record)) == 6
        assert sys.modules.get(name) is kept


def test_a_free_name_is_kept() -> None:
    assert module_name(Path("work.py")) == "work"
    assert module_name(Path("random.py")) != "random"


def test_neighbours_come_before_installed_packages_and_after_python_itself(tmp_path: Path) -> None:
    make_importable(tmp_path)
    place = sys.path.index(str(tmp_path))
    assert not any("site-packages" in entry for entry in sys.path[:place])
    assert importlib.util.find_spec("statistics").origin.startswith(sys.base_prefix)
    make_importable(tmp_path)
    assert sys.path.count(str(tmp_path)) == 1


# --- the source


IMPORTS = """
import json, used
from package import inner as renamed

def late():
    import later.part

try:
    import never_written
except ImportError:
    pass

task = make()
"""


def test_only_the_files_that_a_task_may_import_are_taken(tmp_path: Path) -> None:
    taken = {
        "work": TASK + IMPORTS,
        "used": "import json\nimport used_by_used",
        "used_by_used": "",
        "package/__init__": "from .other import thing",
        "package/inner": "from . import other",
        "package/other": "thing = 1",
        "later/__init__": "",
        "later/part": "import deeper",
        "deeper": "",
    }
    left = {"package/never": "", "stranger": "", "json/__init__": "raise RuntimeError('Python has its own')"}
    write(tmp_path, taken | left)
    files = load_task(str(tmp_path / "work.py")).files
    assert files.keys() == {f"{name}.py" for name in taken}
    assert files["used.py"] == (tmp_path / "used.py").read_bytes()


def test_modules_that_import_each_other_end(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "work": TASK + "import one_way\ntask = make()\n",
            "one_way": "import or_another",
            "or_another": "import one_way",
        },
    )
    assert load_task(str(tmp_path / "work.py")).files.keys() == {"work.py", "one_way.py", "or_another.py"}


@given(
    st.dictionaries(st.text(max_size=4), st.binary(max_size=4), max_size=3),
    st.dictionaries(st.text(max_size=4), st.binary(max_size=4), max_size=3),
)
def test_a_digest_tells_sources_apart(one: dict[str, bytes], other: dict[str, bytes]) -> None:
    assert (source_digest(one) == source_digest(other)) == (one == other)
    assert source_digest(dict(reversed(one.items()))) == source_digest(one)


# --- the copy


def test_the_copy_is_used_although_the_original_changed(tmp_path: Path) -> None:
    project = tmp_path / "project"
    write(
        project,
        {
            "work": TASK + "import sizes_of_work\ndef task():\n    return make(sizes_of_work.SIZE)\n",
            "sizes_of_work": "SIZE = 4",
        },
    )
    loaded = load_task(str(project / "work.py"))
    run = as_run(loaded, tmp_path / "run")
    write(project, {"sizes_of_work": "SIZE = 5"})
    assert outputs_of(load_from_run(run, loaded.record)) == 4
    again = load_task(str(project / "work.py"))
    assert outputs_of(again.task) == 5
    assert outputs_of(load_from_run(run, loaded.record)) == 4


def test_what_the_model_imports_late_comes_from_the_copy_too(tmp_path: Path) -> None:
    project = tmp_path / "project"
    body = """
def model():
    from late_net import SIZE
    return nn.Linear(4, SIZE)

import dataclasses
task = dataclasses.replace(make(), model=model)
"""
    write(project, {"work": TASK + body, "late_net": "SIZE = 4"})
    loaded = load_task(str(project / "work.py"))
    run = as_run(loaded, tmp_path / "run")
    write(project, {"late_net": "SIZE = 5"})
    assert outputs_of(load_from_run(run, loaded.record)) == 4


WHERE = "import pathlib\nHERE = pathlib.Path(__file__).parent\n"
COUNTING = f"""
{WHERE}
import beside_work
task = make(len([*HERE.glob("*.txt"), *beside_work.HERE.glob("*.txt")]))
"""


def test_the_copy_believes_to_stand_where_the_original_stood(tmp_path: Path) -> None:
    project = tmp_path / "project"
    write(project, {"work": TASK + COUNTING, "beside_work": WHERE})
    (project / "data.txt").write_text("")
    loaded = load_task(str(project / "work.py"))
    assert outputs_of(loaded.task) == 2
    run = as_run(loaded, tmp_path / "run")
    for name in ("work.py", "beside_work.py"):
        (project / name).unlink()
    assert outputs_of(load_from_run(run, loaded.record)) == 2
    (project / "data.txt").unlink()
    project.rmdir()
    for name in ("one.txt", "two.txt"):
        (run / name).write_text("")
    assert outputs_of(load_from_run(run, loaded.record)) == 4  # with nothing there, it stands where it lies


SCALED = """
def task(sizes=(1, 2), scale: float = 1):
    assert type(sizes) is tuple
    return make(int(sizes[0] * scale))
"""


def test_parameters_are_the_same_again(tmp_path: Path) -> None:
    write(tmp_path / "project", {"work": TASK + SCALED})
    loaded = load_task(str(tmp_path / "project" / "work.py"), {"sizes": "6,7", "scale": "2"})
    assert outputs_of(loaded.task) == 12
    record = type(loaded.record).model_validate_json(loaded.record.model_dump_json())
    assert outputs_of(load_from_run(as_run(loaded, tmp_path / "run"), record)) == 12


@pytest.mark.parametrize("change", ["edited", "removed", "added"])
def test_a_copy_that_was_changed_is_refused(change: str, tmp_path: Path) -> None:
    write(tmp_path / "project", {"work": TASK + "import part_of_work\ntask = make()\n", "part_of_work": ""})
    loaded = load_task(str(tmp_path / "project" / "work.py"))
    run = as_run(loaded, tmp_path / "run")
    if change == "removed":
        (run / "part_of_work.py").unlink()
    else:
        (run / ("part_of_work.py" if change == "edited" else "stranger.py")).write_text("x = 1")
    with pytest.raises(
        TaskError, match=r"was changed since the run was started; expected the files with digest .* Put them back"
    ):
        load_from_run(run, loaded.record)


def test_no_bytecode_is_written_beside_copies_nor_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk tears such files, and Python then fails on them."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    write(tmp_path, {"mine": TASK + "task = make(5)\n"})
    loaded = load_task(str(tmp_path / "mine.py"))
    assert loaded.record is not None
    run = as_run(loaded, tmp_path / "run")
    assert outputs_of(load_from_run(run, loaded.record)) == 5
    assert not list(run.rglob("*.pyc"))
    torn = Path(importlib.util.cache_from_source(str(run / "mine.py")))
    torn.parent.mkdir()
    whole = Path(importlib.util.cache_from_source(str(tmp_path / "mine.py"))).read_bytes()
    shutil.copystat(tmp_path / "mine.py", run / "mine.py")  # by whose time and size Python knows its bytecode
    torn.write_bytes(whole[:20])
    assert outputs_of(load_from_run(run, loaded.record)) == 5
