"""Which Task `hotloop train` takes, with which parameters, and its source in the run."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from pathlib import Path

import pytest

from tests.support.processes.in_process_command import Hotloop
from tests.support.tasks.task_sources import put


def write(folder: Path, files: dict[str, str]) -> None:
    """Writes Python files: path without its ending -> text."""
    for name, text in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


# --- which Task


@pytest.mark.few("task.py-task", "./task.py:task-task")
@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("task.py", "task"),
        ("./task.py:task", "task"),
        ("task.py:", "task"),
        ("task.py:other", "other"),
        ("task.py:built", "built"),
        ("package.net", "net"),
        ("package.net:task", "net"),
        ("package.net:other", "other"),
        ("package", "package"),
    ],
)
def test_references(reference: str, name: str, hotloop: Hotloop, tmp_path: Path) -> None:
    body = "task = make()\nother = make()\ndef built():\n    return make()\n"
    put(tmp_path, body)
    put(tmp_path, body, "package/net.py")
    write(tmp_path, {"package/__init__": "from package.net import task"})
    document = hotloop("train", reference, "--device", "cpu", "--json").document
    assert re.fullmatch(rf"runs/{name}-\d{{8}}-\d{{6}}", document["run"])
    resumed = hotloop("train", "--resume", document["run"], "--epochs", 2, "--json").document
    assert len(resumed["epochs"]) == 2


def test_a_task_by_its_absolute_path_from_elsewhere(hotloop: Hotloop, tmp_path: Path) -> None:
    write(tmp_path / "project", {"neighbour": "LABELS = [0, 1, 2, 3] * 5"})
    file = put(
        tmp_path / "project", "import neighbour\ntask = make(model=lambda: nn.Linear(4, 4), data=(X, neighbour.LABELS))"
    )
    assert hotloop("train", file, "--device", "cpu").code == 0
    assert sorted(path.name for path in (tmp_path / "project").iterdir() if path.suffix == ".py") == [
        "neighbour.py",
        "task.py",
    ]
    assert (tmp_path / "runs").is_dir()


PARAMETERS = """
import json

def task(width: float = 1, depth=3, deep=False, name="x", sizes=(1, 2), limit: int | None = None, kind=None):
    given = [width, depth, deep, name, sizes, limit, kind]
    with open("given.json", "w") as file:
        json.dump([[type(value).__name__, value] for value in given], file)
    return make()
"""


def test_parameters_have_the_types_that_the_function_says(hotloop: Hotloop, tmp_path: Path) -> None:
    put(tmp_path, PARAMETERS)
    texts = ("width=2", "depth=4", "deep=true", "name=7", "sizes=3,4,5", "limit=9", "kind=a=b")
    options = [part for text in texts for part in ("-p", text)]
    assert hotloop("train", "task.py", "--device", "cpu", "--run", "first", *options).code == 0
    given = json.loads((tmp_path / "given.json").read_text())
    wanted = [
        ["float", 2.0],
        ["int", 4],
        ["bool", True],
        ["str", "7"],
        ["tuple", [3, 4, 5]],
        ["int", 9],
        ["str", "a=b"],
    ]
    assert given == wanted
    (tmp_path / "given.json").unlink()
    assert hotloop("train", "--resume", "first", "--epochs", 2).code == 0
    assert json.loads((tmp_path / "given.json").read_text()) == wanted


# --- its source


def test_the_local_modules_that_a_task_uses_go_into_the_run(hotloop: Hotloop, tmp_path: Path) -> None:
    modules = {
        "direct": "import indirect",
        "indirect": "import package.deep",
        "package/__init__": "",
        "package/deep": "from . import beside",
        "package/beside": "",
        "package/unused": "raise RuntimeError",
        "late": "WIDTH = 4",
        "unrelated": "",
    }
    write(tmp_path, modules)
    put(tmp_path, """
        import direct

        def model():
            import late
            return nn.Linear(late.WIDTH, 3)

        task = make(model=model)
    """)  # fmt: skip
    assert hotloop("train", "task.py", "--device", "cpu", "--run", "first").code == 0
    source = tmp_path / "first" / "source"
    copied = {path.relative_to(source).as_posix() for path in source.rglob("*.py")}
    assert copied == {
        "task.py", "direct.py", "indirect.py", "late.py", "package/__init__.py", "package/deep.py", "package/beside.py"
    }  # fmt: skip


MOVABLE = {
    "nets": "from torch import nn\ndef net():\n    from parts import head\n    return head()\n",
    "parts": "from torch import nn\ndef head():\n    return nn.Linear(4, 3)\n",
}


def test_a_run_goes_on_after_the_tasks_files_are_gone(hotloop: Hotloop, tmp_path: Path) -> None:
    project = tmp_path / "project"
    write(project, MOVABLE)
    put(project, "import nets\ntask = make(model=nets.net)")
    assert hotloop("train", "project/task.py", "--device", "cpu", "--run", "first").code == 0
    shutil.rmtree(project)
    shutil.move(tmp_path / "first", tmp_path / "elsewhere")
    done = hotloop("train", "--resume", "elsewhere", "--epochs", 2, "--json")
    assert done.code == 0, done.err
    assert len(done.document["epochs"]) == 2


def test_a_run_goes_on_with_what_it_began_with_although_the_files_changed(hotloop: Hotloop, tmp_path: Path) -> None:
    write(tmp_path, MOVABLE)
    put(tmp_path, "import nets\ntask = make(model=nets.net, epochs=2)")
    whole = hotloop("train", "task.py", "--device", "cpu", "--json").document["epochs"]
    hotloop("train", "task.py", "--device", "cpu", "--run", "first", "--epochs", 1)
    write(tmp_path, dict.fromkeys(MOVABLE, "raise RuntimeError('not this one')"))
    put(tmp_path, "raise RuntimeError('not this one')")
    done = hotloop("train", "--resume", "first", "--epochs", 2, "--json")
    assert done.code == 0, done.err
    assert [row["train_loss"] for row in done.document["epochs"]] == [row["train_loss"] for row in whole]


def test_data_beside_the_task_and_beside_its_neighbour_is_found_when_going_on(hotloop: Hotloop, tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "files").mkdir(parents=True)
    for name in ("inputs.txt", "labels.txt"):
        (project / "files" / name).write_text("\n".join(str(number % 3) for number in range(20)))
    loading = """
        from pathlib import Path

        def labels():
            return [int(line) for line in (Path(__file__).parent / "files" / "labels.txt").read_text().split()]
    """
    write(project, {"loading": loading})
    put(project, """
        from pathlib import Path
        import loading

        inputs = [[float(line)] * 4 for line in (Path(__file__).parent / "files" / "inputs.txt").read_text().split()]
        task = make(data=(inputs, loading.labels()))
    """)  # fmt: skip
    assert hotloop("train", "project/task.py", "--device", "cpu", "--run", "first").code == 0
    (project / "task.py").unlink()
    (project / "loading.py").unlink()
    done = hotloop("train", "--resume", "first", "--epochs", 2)
    assert done.code == 0, done.err


def test_a_changed_copy_is_refused(hotloop: Hotloop, tmp_path: Path) -> None:
    put(tmp_path, "task = make()")
    hotloop("train", "task.py", "--device", "cpu", "--run", "first")
    copy = tmp_path / "first" / "source" / "task.py"
    copy.write_text(copy.read_text().replace("lr=0.1", "lr=0.2"))
    done = hotloop("train", "--resume", "first", "--epochs", 2)
    assert done.code == 1
    assert (
        "source" in done.err
        and "was changed since you started or trusted the run" in done.err
        and "Put them back" in done.err
    )


@pytest.mark.few("my-task")
@pytest.mark.parametrize(
    "name", ["random", "train", "torch_task", "numpy", "hotloop", "types", "my-task", "queue", "rich", "task.v2"]
)
def test_a_file_may_have_the_name_of_an_installed_module(name: str, hotloop: Hotloop, tmp_path: Path) -> None:
    put(
        tmp_path,
        "import random, queue, types\nassert random.random and queue.Queue and types.ModuleType\ntask = make()",
        f"{name}.py",
    )
    document = hotloop("train", f"{name}.py", "--device", "cpu", "--json").document
    assert document["run"].startswith(f"runs/{name}-")
    assert (tmp_path / document["run"] / "source" / f"{name}.py").is_file()
    assert len(hotloop("train", "--resume", document["run"], "--epochs", 2, "--json").document["epochs"]) == 2
    import numpy
    import rich

    assert "site-packages" in numpy.__file__ and "site-packages" in rich.__file__
