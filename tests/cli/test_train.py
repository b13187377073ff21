"""`hotloop train` as people and programs use it: its figures, its run folder, its bar."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import tomllib
from pathlib import Path

import pytest

from tests.support.auto_plans import BY_RULES
from tests.support.processes.forked_server import Server
from tests.support.processes.in_process_command import Hotloop
from tests.support.tasks.task_sources import put

# --- figures

KNOWN = """
def model():
    made = nn.Linear(4, 3)
    nn.init.zeros_(made.weight)
    nn.init.zeros_(made.bias)
    return made


task = make(model=model, optimizer=lambda p: torch.optim.SGD(p, lr=0.0, momentum=0.5), validation=(X[:10], Y[:10]),
            test=(X[:5], Y[:5]), epochs=2)
"""
"""A network that says the first class of anything, with equal probabilities, and never learns."""


def test_the_document_has_the_figures_that_follow_from_the_task(hotloop: Hotloop, tmp_path: Path) -> None:
    put(tmp_path, KNOWN)
    done = hotloop("train", "task.py", "--device", "cpu", "--run", "first", "--json")
    assert done.code == 0, done.err
    document = done.document
    assert document.keys() == {"run", "plan", "epochs", "final", "reason"}
    assert document["run"] == "first"
    assert document["plan"] == tomllib.loads((tmp_path / "first" / "plan.toml").read_text()) | {
        axis: None for axis, value in document["plan"].items() if value is None
    }
    assert document["plan"]["device"] == "cpu"
    assert document["reason"] == "finished"
    assert [row["epoch"] for row in document["epochs"]] == [1, 2]
    assert [row["step"] for row in document["epochs"]] == [4, 8]
    for row in document["epochs"]:
        assert row["train_loss"] == pytest.approx(math.log(3))
        assert row["validation_loss"] == pytest.approx(math.log(3))
        assert row["validation_accuracy"] == 0.4  # labels 0 1 2 0 1 2 0 1 2 0
        assert row["samples"] == 20
        assert row["learning_rate"] == 0.0
        assert row["seconds"] > 0 and row["samples_per_s"] > 0
    assert document["final"]["test_accuracy"] == 0.4  # labels 0 1 2 0 1
    assert document["final"]["test_loss"] == pytest.approx(math.log(3))


def test_without_validation_and_test_those_figures_are_null(hotloop: Hotloop, tmp_path: Path) -> None:
    put(tmp_path, "task = make()")
    document = hotloop("train", "task.py", "--device", "cpu", "--json").document
    (row,) = document["epochs"]
    assert row["validation_loss"] is None and row["validation_accuracy"] is None
    assert document["final"]["test_loss"] is None and document["final"]["test_accuracy"] is None


def test_both_tables_hold_the_same_rows_as_the_document(hotloop: Hotloop, tmp_path: Path) -> None:
    put(tmp_path, "task = make(validation=0.25, epochs=3)")
    document = hotloop("train", "task.py", "--device", "cpu", "--run", "first", "--json").document
    lines = (tmp_path / "first" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == document["epochs"]
    with (tmp_path / "first" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3
    for row, expected in zip(rows, document["epochs"], strict=True):
        assert list(row) == list(expected)
        assert {name: float(text) for name, text in row.items()} == expected


def test_scalars_of_a_step_and_named_metrics_are_columns(hotloop: Hotloop, tmp_path: Path) -> None:
    put(tmp_path, """
        def step(model, batch):
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            return {"loss": loss, "twice": 2 * loss, "seven": 7.0}

        task = make(loss=None, step=step)
    """)  # fmt: skip
    (row,) = hotloop("train", "task.py", "--device", "cpu", "--json").document["epochs"]
    assert row["train_twice"] == pytest.approx(2 * row["train_loss"], rel=1e-6)
    assert row["train_seven"] == pytest.approx(7.0)
    put(tmp_path, "task = make(validation=0.25, metrics={'always': lambda output, target: 0.5})")
    (row,) = hotloop("train", "task.py", "--device", "cpu", "--json").document["epochs"]
    assert row["validation_always"] == 0.5


NOISY = """
print("at import")

def model():
    print("in the factory")
    return nn.Linear(4, 3)

def loss(output, target):
    print("in the loss")
    return nn.functional.cross_entropy(output, target)

def watch(view):
    print("in a callback")

task = make(model=model, loss=loss, callbacks=[watch])
"""


def test_with_json_stdout_holds_the_document_alone_whatever_the_task_prints(hotloop: Hotloop, tmp_path: Path) -> None:
    put(tmp_path, NOISY)
    done = hotloop("train", "task.py", "--device", "cpu", "--json")
    assert done.document["reason"] == "finished"
    for words in ("at import", "in the factory", "in the loss", "in a callback"):
        assert words in done.err
    again = hotloop("train", "task.py", "--device", "cpu")
    assert "in the loss" in again.out and "in the loss" not in again.err


# --- the run folder


def test_the_run_folder_is_complete(hotloop: Hotloop, tmp_path: Path) -> None:
    file = put(tmp_path, "task = make(validation=0.25, epochs=2)")
    document = hotloop("train", "task.py", "--device", "cpu", "--json").document
    folder = tmp_path / document["run"]
    assert re.fullmatch(r"task-\d{8}-\d{6}", folder.name) and folder.parent == tmp_path / "runs"
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names >= {
        "run.json",
        "plan.toml",
        "source/task.py",
        "journal.jsonl",
        "metrics.jsonl",
        "metrics.csv",
        "curves.html",
    }
    assert any(re.fullmatch(r"checkpoints/step-0+6-[0-9a-f]{64}\.safetensors", name) for name in names)
    assert any(name.startswith("checkpoints/best/") for name in names)
    assert not [name for name in names if name.endswith(".part")]
    assert (folder / "source" / "task.py").read_bytes() == file.read_bytes()
    events = [json.loads(line)["event"] for line in (folder / "journal.jsonl").read_text().splitlines()]
    assert events[0] == "start" and events[-2:] == ["stop", "final"] and "checkpoint" in events


def test_runs_of_the_same_second_do_not_meet(hotloop: Hotloop, tmp_path: Path, monkeypatch) -> None:
    put(tmp_path, "task = make()")
    monkeypatch.setattr("hotloop.training.start.time.strftime", lambda form: "20260101-000000")
    runs = [hotloop("train", "task.py", "--device", "cpu", "--json").document["run"] for _ in range(3)]
    assert runs == [f"runs/task-20260101-000000{ending}" for ending in ("", "-2", "-3")]


def test_options_take_the_place_of_the_tasks_own(hotloop: Hotloop, tmp_path: Path) -> None:
    put(tmp_path, "task = make(epochs=5, seed=3)")
    options = ("--device", "cpu", "--epochs", 2, "--batch-size", 7, "--seed", 4, "--run", "first", "--json")
    document = hotloop("train", "task.py", *options).document
    assert [row["step"] for row in document["epochs"]] == [3, 6]  # 7 + 7 + 6 samples
    record = json.loads((tmp_path / "first" / "run.json").read_text())
    assert record["overrides"] == {"epochs": 2, "batch_size": 7, "seed": 4}
    put(tmp_path, "task = make(epochs=2, batch_size=7, seed=4)", "same.py")
    same = hotloop("train", "same.py", "--device", "cpu", "--json").document
    figures = [[row["train_loss"] for row in one["epochs"]] for one in (document, same)]
    assert figures[0] == figures[1]


def test_training_twice_gives_the_same_figures_and_another_seed_others(hotloop: Hotloop, tmp_path: Path) -> None:
    put(tmp_path, "task = make(validation=0.25, epochs=2)")
    one, two, other = (
        hotloop("train", "task.py", "--device", "cpu", "--json", "--seed", seed).document["epochs"]
        for seed in (1, 1, 2)
    )
    pick = ("train_loss", "validation_loss", "validation_accuracy")
    assert [[row[name] for name in pick] for row in one] == [[row[name] for name in pick] for row in two]
    assert one[0]["train_loss"] != other[0]["train_loss"]


def test_what_a_person_sees(hotloop: Hotloop, tmp_path: Path) -> None:
    put(tmp_path, KNOWN)
    done = hotloop("train", "task.py", "--device", "cpu", "--run", "first")
    assert done.out == ""
    lines = done.err.splitlines()
    assert re.fullmatch(
        r"epoch 1/2  train loss 1\.0986  validation loss 1\.0986  validation accuracy 0\.4000  [\d,]+ samples/s  \d.*s",
        lines[0],
    )
    assert lines[1].startswith("epoch 2/2  ")
    assert lines[2] == "finished after 2 epochs"
    assert lines[3] == "test loss 1.0986  test accuracy 0.4000"
    assert lines[4:] == [f"run: first   plan: {BY_RULES.brief()} (default)   learning curves: first/curves.html"]
    assert "\x1b" not in done.err


def test_a_finished_run_is_left_as_it_is(hotloop: Hotloop, tmp_path: Path) -> None:
    put(tmp_path, "task = make()")
    first = hotloop("train", "task.py", "--device", "cpu", "--run", "first", "--json").document
    done = hotloop("train", "--resume", "first", "--json")
    assert (done.code, done.document["epochs"], done.document["final"]) == (0, first["epochs"], first["final"])
    assert "finished already; --epochs with a larger number goes on with it" in done.err
    longer = hotloop("train", "--resume", "first", "--epochs", 2, "--json").document
    assert [row["epoch"] for row in longer["epochs"]] == [1, 2]
    assert longer["epochs"][0] == first["epochs"][0]


def test_the_pace_of_checkpoints_can_change_when_going_on(hotloop: Hotloop, tmp_path: Path) -> None:
    put(tmp_path, "task = make(epochs=1)")
    hotloop("train", "task.py", "--device", "cpu", "--run", "first", "--checkpoint-every", "2")
    assert hotloop("train", "--resume", "first", "--epochs", 2, "--checkpoint-every", "1").code == 0
    events = [json.loads(line) for line in (tmp_path / "first" / "journal.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "checkpoint"] == [2, 4, 5, 6, 7, 8]


# --- in a terminal

SLOW = """
import time

def loss(output, target):
    time.sleep(0.03)
    return nn.functional.cross_entropy(output, target)

task = make(loss=loss, batch_size=1, epochs=2, validation=0.25)
"""
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
BAR = re.compile(
    r"epoch (?P<epoch>[12])/2 .*step (?P<step>\d+)/15  [\d,]+ samples/s  loss \d+\.\d{4}  \d+(\.\d)?s left *$",
    re.MULTILINE,
)


@pytest.mark.more
@pytest.mark.skipif(os.name == "nt", reason="Windows has no pseudo-terminals of this kind")
@pytest.mark.parametrize("columns", [80])
def test_a_terminal_shows_a_bar_that_moves(columns: int, server: Server, tmp_path: Path) -> None:
    put(tmp_path, SLOW)
    shown = in_terminal(server, "train", "task.py", "--device", "cpu", cwd=tmp_path, columns=columns)
    frames = [match for line in re.split(r"[\r\n]+", ESCAPE.sub("", shown)) if (match := BAR.search(line))]
    assert {match["epoch"] for match in frames} == {"1", "2"}
    assert len({match["step"] for match in frames}) > 3
    assert max(len(match.string.rstrip()) for match in frames) <= columns
    assert "━" in shown
    assert re.search(r"epoch 2/2  train loss \d\.\d{4}  validation loss", shown)


@pytest.mark.more
@pytest.mark.skipif(os.name == "nt", reason="Windows has no pseudo-terminals of this kind")
def test_with_json_in_a_terminal_only_stdout_is_the_document(server: Server, tmp_path: Path) -> None:
    put(tmp_path, SLOW)
    with (tmp_path / "out.json").open("w") as out:
        shown = in_terminal(
            server, "train", "task.py", "--device", "cpu", "--json", cwd=tmp_path, columns=100, stdout=out
        )
    assert len(json.loads((tmp_path / "out.json").read_text())["epochs"]) == 2
    assert "samples/s" in shown and '"epochs"' not in shown


@pytest.mark.more
def test_a_pipe_gets_a_line_per_epoch_and_no_escape_codes(run_cli, tmp_path: Path) -> None:
    put(tmp_path, SLOW)
    done = run_cli("train", "task.py", "--device", "cpu", env=os.environ | {"TERM": "xterm-256color"})
    assert (done.returncode, done.stdout) == (0, "")
    assert "\x1b" not in done.stderr and "\r" not in done.stderr and "━" not in done.stderr
    assert len(re.findall(r"^epoch \d/2  train loss", done.stderr, re.MULTILINE)) == 2


def in_terminal(server: Server, *args: str, cwd: Path, columns: int, **streams: object) -> str:
    """What a terminal of some width is sent by `hotloop ARGS`."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs} | streams
    process = server.start(*args, cwd=cwd, env=environment | {"TERM": "xterm-256color"}, **streams)  # type: ignore[arg-type]
    os.close(theirs)
    pieces = []
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # Linux says so when the other side is closed
            break
        if not piece:
            break
        pieces.append(piece)
    os.close(ours)
    assert process.wait(timeout=60) == 0
    return b"".join(pieces).decode()
