"""Whether a file defines a Task is told from its text, which isn't run."""

from __future__ import annotations

from pathlib import Path

import pytest

from hotloop.core.files.source_files import defines_task

TASKS = {
    "a value": "import hotloop\ntask = hotloop.Task(model=None)",
    "a function": "import torch, hotloop\ndef task(width=1): ...",
    "from hotloop": "from hotloop import Task\ntask: Task = Task()",
    "chosen": "import hotloop\nif True:\n    task = make()\nelse:\n    task = other()",
    "tried": "try:\n    import hotloop\nexcept ImportError:\n    pass\ntask = make()",
    "from elsewhere": "import hotloop\nfrom elsewhere import mine as task",
}
SCRIPTS = {
    "no task": "import torch\nfor step in range(3): print(step)",
    "text": "import hotloop\ntask = 'regression'",
    "an argument": "import hotloop\ntask = args.task",
    "of another library": "import gymnasium\ntask = gymnasium.make('CartPole')",
    "a word of another library": "from prefect import flow, task\n@flow\ndef main(): ...",
    "in a function": "import hotloop\ndef main():\n    task = hotloop.Task()",
    "run as a script": "import hotloop\nif __name__ == '__main__':\n    task = hotloop.Task()",
    "syntax error": "import hotloop\ntask = (",
    "runs away": "raise SystemExit(3)",
}


@pytest.mark.parametrize(
    ("text", "expected"), [*((t, True) for t in TASKS.values()), *((t, False) for t in SCRIPTS.values())]
)
def test_tasks_and_scripts_are_told_apart(text: str, expected: bool, tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(text)
    assert defines_task(file, "task") is expected


def test_another_name(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text("import hotloop\nmine = hotloop.Task()")
    assert defines_task(file, "mine")
    assert not defines_task(file, "task")


@pytest.mark.parametrize("statement", ["from tasks import mine as task", "from .tasks import mine as task"])
def test_a_task_of_another_file(statement: str, tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(statement)
    (tmp_path / "tasks.py").write_text("from more.tasks import mine")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "tasks.py").write_text("from tasks import mine")
    assert not defines_task(file, "task")
    (tmp_path / "tasks.py").write_text("import hotloop\nmine = hotloop.Task()")
    assert defines_task(file, "task")
