"""Messages that a Python function raises or prints name its arguments, never the command's flags."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

import pytest

import hotloop
from hotloop.core.argument_names import name_arguments

SRC = Path(hotloop.__file__).parent
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
OTHERS = {"--json", "--save", "--pictures", "--set", "--scale", "--param"}
OTHERS |= {"--shm-size", "--nproc-per-node", "--query-gpu", "--format", "--install", "--head", "--object-store-memory"}
"""Flags that only a command has, which no Python function raises, and those of other programs."""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("use --device cpu, or parallel=none", "use device='cpu', or parallel=none"),
        ("use --workers 0, or give more", "use workers=0 in the plan, or give more"),
        (
            "go on with it by: hotloop train --resume runs/a",
            "go on with it by: hotloop.fit(task, run='runs/a', resume=True)",
        ),
        ("go on with it by --resume runs/a, or choose", "go on with it by run='runs/a' and resume=True, or choose"),
        ("go on with --resume; the State", "go on with resume=True; the State"),
        ("--set parallel=none --set ranks=none, which", "parallel=none, ranks=none in the plan, which"),
        ("give --batch-size 8 (batch_size=8) for", "give batch_size=8 for"),
        ("a --time-limit gives more time", "a time_limit= gives more time"),
        ("choose another with --run", "choose another with run="),
        (
            "train from the command: hotloop train task.py --ranks 2",
            "train from the command: hotloop train task.py --ranks 2",
        ),
        ("by --steps 60 or --try", "by steps=60 or try_remedies=True"),
        ("docker gives 64 MB without --shm-size", "docker gives 64 MB without --shm-size"),
        ("use --plans baseline,auto", "use plans=['baseline', 'auto']"),
    ],
)
def test_flags_become_arguments(text: str, said: str) -> None:
    assert name_arguments(text) == said


def texts_of(path: Path) -> list[str]:
    """String constants of a file, but for docstrings; a value inside of an f-string becomes `7`."""
    tree = ast.parse(path.read_text())
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inside = {id(one) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for one in node.values}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(one.value if isinstance(one, ast.Constant) else "7" for one in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs | inside:
            found.append(node.value)
    return found


@pytest.mark.parametrize(
    "path", [one for one in sorted(SRC.rglob("*.py")) if not {"cli", "argument_names.py"} & set(one.parts)], ids=str
)
def test_no_message_names_a_flag_that_has_no_argument(path: Path) -> None:
    """Whichever message a function raises: a flag that the table doesn't have is found here."""
    texts = [text for text in texts_of(path) if " " in text and "hotloop " not in text and FLAG.search(text)]
    left = [text for text in texts if set(FLAG.findall(name_arguments(text))) - OTHERS]
    assert left == []


def test_functions_raise_with_arguments(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "other").touch()
    task = object()
    with pytest.raises(hotloop.HotloopError) as found:
        hotloop.fit(task, run=tmp_path / "run")  # type: ignore[arg-type]
    assert "--" not in str(found.value)
    with pytest.raises(hotloop.HotloopError) as found:
        hotloop.devices("gpu7")
    assert "--device" not in str(found.value) and "--device" not in found.value.given + found.value.fix


def test_functions_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(hotloop.fit)) is hotloop.fit
