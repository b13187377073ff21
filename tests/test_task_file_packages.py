"""Task files that import relatively, as modules of a package do."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

import hotloop
from hotloop.core.state import differing_paths
from hotloop.errors import TaskError
from hotloop.task_file import load_from_run, load_task
from tests.conftest import RunCli
from tests.support.processes.resumed_training import last_checkpoint

NET = """
from torch import nn
WIDTH = {width}
def build(): return nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
"""

TASK = """
import torch, hotloop
{imports}
X = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
task = hotloop.Task(model=lambda: {build}(), loss=torch.nn.MSELoss(), data=(X, X[:, :1]), validation=(X, X[:, :1]),
    optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_size=8, epochs=2)
"""

FORMS = {
    "from .net": ("pkg/task.py", "pkg/net.py", "from .net import build", "build"),
    "from . import": ("pkg/task.py", "pkg/net.py", "from . import net", "net.build"),
    "from ..": ("pkg/tasks/task.py", "pkg/net.py", "from ..net import build", "build"),
    "from a package beside": ("pkg/tasks/task.py", "pkg/models/net.py", "from ..models.net import build", "build"),
    "in a function": (
        "pkg/task.py",
        "pkg/net.py",
        "def build():\n    from .net import build\n    return build()",
        "build",
    ),
    "in __init__": ("pkg/__init__.py", "pkg/net.py", "from .net import build", "build"),
}


def written(folder: Path, form: str, *, inits: bool = True, width: int = 8) -> Path:
    """The Task's file of a package below `folder`."""
    task, net, imports, build = FORMS[form]
    for name, text in ((net, NET.format(width=width)), (task, TASK.format(imports=imports, build=build))):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for above in [path.parent, *path.parent.parents] if inits else []:
            if above.is_relative_to(folder) and above != folder:
                (above / "__init__.py").touch()
        path.write_text(text)
    return folder / task


def width_of(task: hotloop.Task) -> int:
    return int(task.build_model()[0].out_features)  # type: ignore[index]


@pytest.mark.parametrize("inits", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_it_is_imported_as_python_imports_a_module_of_a_package(tmp_path: Path, form: str, inits: bool) -> None:
    loaded = load_task(str(written(tmp_path, form, inits=inits)))
    assert width_of(loaded.task) == 8
    assert set(FORMS[form][:2]) <= loaded.files.keys()


def test_packages_of_one_name_are_kept_apart(tmp_path: Path) -> None:
    paths = [written(tmp_path / str(width), "from .net", width=width) for width in (3, 5, 3)]
    assert [width_of(load_task(str(path)).task) for path in paths] == [3, 5, 3]


@pytest.mark.more
@pytest.mark.parametrize(("form", "inits"), [("from .net", True), ("from .net", False), ("from ..", True)])
def test_a_run_goes_on_from_its_copy_of_the_package(tmp_path: Path, form: str, inits: bool, run_cli: RunCli) -> None:
    path = written(tmp_path / "there", form, inits=inits)
    options = ("--plan", "baseline", "--run", "run")
    assert run_cli("train", path, *options).returncode == 0
    assert run_cli("train", path, "--plan", "baseline", "--epochs", "4", "--run", "whole").returncode == 0
    shutil.rmtree(tmp_path / "there")
    assert run_cli("train", "--resume", "run", "--epochs", "4").returncode == 0
    assert run_cli("evaluate", "run").returncode == 0
    runs = [hotloop.Run.open(tmp_path / name) for name in ("whole", "run")]
    assert differing_paths(*(last_checkpoint(run).state for run in runs)) == []
    record = runs[1].record.source
    assert record is not None and width_of(load_from_run(tmp_path / "run" / "source", record)) == 8


def test_a_package_with_the_name_of_an_installed_one_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "from .net")
    (tmp_path / "pkg").rename(tmp_path / "numpy")
    before = list(sys.path)
    with pytest.raises(TaskError, match="Rename the folder"):
        load_task(str(tmp_path / "numpy" / path.name))
    assert sys.path == before  # else processes that are started later would import it as NumPy


def test_what_the_package_lacks_is_one_line(tmp_path: Path) -> None:
    path = written(tmp_path, "from .net")
    (tmp_path / "pkg" / "net.py").unlink()
    with pytest.raises(TaskError, match=r"pkg\.net") as caught:
        load_task(str(path))
    assert "\n" not in str(caught.value)
