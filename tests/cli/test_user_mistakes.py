"""What a user's mistakes look like: one line that says what was given, what was expected and what to do."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest
import torch

from tests.support.processes.in_process_command import SMALL, Done, Hotloop
from tests.support.tasks.task_mistakes import DATA, FIELDS, FILES, OPTIONS, SAMPLES, Case


def put(folder: Path, body: str, name: str = "task.py") -> Path:
    """Writes a Task's file that begins with `SMALL`."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(SMALL + textwrap.dedent(body))
    return path


def at_lines(words: str) -> str:
    """`@1` is the number of the first line after `SMALL`."""
    return re.sub(r"@(\d+)", lambda match: str(SMALL.count("\n") + int(match[1])), words)


_SAID_BEFORE = ("auto leaves out ", "read ", "  ", "SyntaxError: ", "IndentationError: ")
"""What training says of its data before it begins, and the place of an error of syntax as Python shows it."""


def assert_one_line(done: Done, *says: str, kind: str, code: int = 1) -> None:
    """One line on stderr that holds all of `says`, in this order, and the same as the one document on stdout."""
    assert done.code == code, done.err
    lines = [line for line in done.err.splitlines() if not line.startswith(_SAID_BEFORE)]
    assert len(lines) == 1 and lines[0].startswith("error: "), done.err
    message = lines[0].removeprefix("error: ")
    place = 0
    for words in map(at_lines, says):
        assert words in message[place:], f"{words!r} is not in {message[place:]!r}"
        place = message.index(words, place) + len(words)
    assert json.loads(done.out) == {"error": {"kind": kind, "message": message}}


@pytest.mark.parametrize("case", [*FILES, *FIELDS, *DATA, *OPTIONS], ids=str)
def test_a_mistake_is_one_line_that_helps(case: Case, hotloop: Hotloop, tmp_path: Path) -> None:
    put(tmp_path, case.body)
    before = files_in(tmp_path)
    device = () if "--device" in case.options else ("--device", "cpu")
    done = hotloop("train", "task.py", "--json", *device, *case.options)
    kind = "DataError" if case in DATA and case.kind == "TaskError" and not _blames_a_function(case) else case.kind
    assert_one_line(done, *case.says, kind=kind, code=case.code)
    assert files_in(tmp_path) == before or case not in SEEN_BEFORE_TRAINING  # else there is a run, with what it says


def files_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def _blames_a_function(case: Case) -> bool:
    return case.name in ("prepare raises", "augment raises")


SEEN_BEFORE_TRAINING = [*FILES, *OPTIONS, *(case for case in [*FIELDS, *DATA] if case.name in (
    "model raises", "optimizer raises", "unequal lengths", "unequal test", "labels too high", "labels of test", "NaN",
    "NaN by prepare", "empty", "empty stream", "batch too large", "monitor without validation", "one output",
))]  # fmt: skip


def test_a_missing_file(hotloop: Hotloop) -> None:
    done = hotloop("train", "nowhere/task.py", "--json")
    assert_one_line(done, "no file nowhere/task.py", "expected a Python file", "Check the path", kind="TaskError")


def test_a_missing_module(hotloop: Hotloop) -> None:
    done = hotloop("train", "nowhere.module:net", "--json")
    assert_one_line(done, "'nowhere.module:net' is neither a Python file nor a module", "expected", kind="TaskError")


@pytest.mark.parametrize("name", ["sys", "os.path.nothing", "-", "a b", "tests"])
def test_something_else_than_a_task(name: str, hotloop: Hotloop) -> None:
    done = hotloop("train", "--json", "--", name)
    assert_one_line(done, "is neither a Python file nor a module", kind="TaskError")


def test_a_file_that_is_not_python(hotloop: Hotloop, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert_one_line(
        hotloop("train", "notes.txt", "--json"), "notes.txt is not a Python file", "expected file.py", kind="TaskError"
    )


def test_a_module_whose_package_fails(hotloop: Hotloop, tmp_path: Path) -> None:
    put(tmp_path, "task = make()", "broken_package/net.py")
    (tmp_path / "broken_package" / "__init__.py").write_text("import missing_package\n")
    done = hotloop("train", "broken_package.net", "--json")
    assert_one_line(done, "No module named 'missing_package' (__init__.py:1)", kind="TaskError")


def test_a_syntax_error_in_a_neighbour_is_shown_where_it_is(hotloop: Hotloop, tmp_path: Path) -> None:
    put(tmp_path, "import broken_neighbour")
    (tmp_path / "broken_neighbour.py").write_text("x = 1\ny = = 2\n")
    done = hotloop("train", "task.py", "--json")
    assert_one_line(done, "broken_neighbour.py line 2: y = = 2", "invalid syntax", kind="TaskError")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_where_there_is_none(hotloop: Hotloop, tmp_path: Path) -> None:
    put(tmp_path, "task = make()")
    done = hotloop("train", "task.py", "--json", "--device", "cuda")
    assert_one_line(done, "'cuda' isn't on this machine", "expected", "Use --device", kind="DeviceError")


def test_a_run_that_is_there_already(hotloop: Hotloop, tmp_path: Path) -> None:
    put(tmp_path, "task = make()")
    assert hotloop("train", "task.py", "--device", "cpu", "--run", "first").code == 0
    done = hotloop("train", "task.py", "--device", "cpu", "--run", "first", "--json")
    assert_one_line(
        done, "first holds a run already", "expected a new folder", "--resume first", "--run", kind="RunError"
    )
    done = hotloop("train", "first", "--json")
    assert_one_line(done, "'first' is neither", "Go on with that run by --resume first", kind="TaskError")


@pytest.mark.parametrize(("folder", "says"), [("nowhere", "nowhere doesn't exist"), (".", ". is not a run")])
def test_resuming_what_is_no_run(folder: str, says: str, hotloop: Hotloop) -> None:
    done = hotloop("train", "--resume", folder, "--json")
    assert_one_line(done, says, "expected a folder that `hotloop train` made", "Check the path", kind="RunError")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "give either a Task, or --resume with a run's folder"),
        (("--resume", "first", "--run", "second"), "--run and --param are for a new run"),
        (("--resume", "first", "-p", "width=1"), "--run and --param are for a new run"),
        (("task.py", "second.py"), "unexpected extra argument"),
        (("--seed",), "'--seed' requires an argument"),
    ],
)
def test_a_wrong_call(args: tuple[str, ...], says: str, hotloop: Hotloop) -> None:
    assert_one_line(hotloop("train", "--json", *args), says, "See: hotloop", kind="UsageError", code=2)


def test_an_unknown_monitor_is_refused_with_what_there_is(hotloop: Hotloop, tmp_path: Path) -> None:
    put(tmp_path, "task = make(validation=0.2, monitor='validation_f1')")
    done = hotloop("train", "task.py", "--device", "cpu", "--json")
    says = ("monitor='validation_f1'", "expected one of", "train_loss", "validation_accuracy", "Check the spelling")
    assert_one_line(done, *says, kind="TaskError")


def test_labels_out_of_range_in_a_data_set_that_is_loaded_sample_by_sample(hotloop: Hotloop, tmp_path: Path) -> None:
    put(tmp_path, SAMPLES.format(trouble="return X[index], Y[index] + 9"))
    done = hotloop("train", "task.py", "--device", "cpu", "--json")
    assert_one_line(done, "label 10", "3 outputs", "expected labels from 0 to 2", kind="DataError")


REAL = {
    "missing file": (None, (), "error: no file task.py; expected a Python file that holds a Task. Check the path\n"),
    "syntax error": (
        "def f(:",
        (),
        "error: task.py line @1: def f(:; expected Python (invalid syntax). Correct that line\n",
    ),
    "sample raises": (
        SAMPLES.format(trouble="raise ValueError('broken')"),
        ("--workers", "2"),
        "error: the data set raised ValueError: broken (task.py:@7) in sample 7. "
        "Correct the data set, or leave that sample out\n",
    ),
    "worker dies": (
        SAMPLES.format(trouble="__import__('os')._exit(3)"),
        ("--workers", "1"),  # a second one might complain that nobody takes what it had ready
        "error: a worker process that loads the data died; expected workers that live until training ends. "
        "Try --workers 0; lack of memory is a common cause\n",
    ),
}


@pytest.mark.more
@pytest.mark.parametrize("what", REAL)
def test_a_real_process_prints_the_line_and_nothing_else(what: str, run_cli, tmp_path: Path) -> None:
    body, options, says = REAL[what]
    if body is not None:
        put(tmp_path, body)
    done = run_cli("train", "task.py", "--device", "cpu", *options)
    lines = [line for line in done.stderr.splitlines(keepends=True) if not line.startswith("TensorBoard")]
    if what == "syntax error":  # Python's own words come first
        assert lines[:-1][-1].startswith("SyntaxError: invalid syntax")
        assert any(line.strip() == "^" for line in lines)
        lines = lines[-1:]
    assert (done.returncode, done.stdout, "".join(lines)) == (1, "", at_lines(says))


def test_a_real_process_with_json_prints_one_document(run_cli) -> None:
    done = run_cli("train", "task.py", "--json", "--device", "cpu")
    message = "no file task.py; expected a Python file that holds a Task. Check the path"
    assert (done.returncode, done.stderr) == (1, f"error: {message}\n")
    assert json.loads(done.stdout) == {"error": {"kind": "TaskError", "message": message}}
