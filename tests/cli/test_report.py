"""`hotloop report`, `list` and `compare` as commands: what they read, what they never execute, wrong calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes.forked_server import Server
from tests.support.processes.in_process_command import SMALL, Hotloop
from tests.support.processes.live_pages import watching
from tests.support.stored_runs import write_run

EPOCHS = [{"epoch": n, "step": 4 * n, "train_loss": 1 / n} for n in (1, 2, 3)]

PLANTED = "from pathlib import Path\nPath('{folder}/executed').write_text(__name__)\n"


def test_no_command_executes_what_is_in_a_run(hotloop: Hotloop, tmp_path: Path) -> None:
    planted = PLANTED.format(folder=tmp_path)
    for name in ("first", "second"):
        run = write_run(tmp_path / "runs" / name, epochs=EPOCHS)
        for folder in (run / "source", run, tmp_path / "runs", tmp_path):
            folder.mkdir(exist_ok=True)
            for file in ("task.py", "__init__.py", "sitecustomize.py", "conftest.py"):
                (folder / file).write_text(planted)
    for command in (
        ("report", "runs/first"),
        ("list", "runs"),
        ("list", "runs", "--json"),
        ("compare", "runs/first", "runs/second", "--out", "compare.html"),
    ):
        done = hotloop(*command)
        assert done.code == 0, done.err
    with watching(tmp_path, "runs") as watch:
        assert len(watch.runs()) == 2
        status, page = watch.get("/report?run=runs/first")
    assert status == 200 and "Path(" in page and "executed" in page  # the source is shown as text
    assert not (tmp_path / "executed").exists()
    exec(compile(planted, "task.py", "exec"), {"__name__": "here"})  # an execution would be noticed
    assert (tmp_path / "executed").read_text() == "here"


def test_a_report_of_damaged_files_shows_the_rest_and_names_them(hotloop: Hotloop, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=EPOCHS)
    journal = (run / "journal.jsonl").read_bytes()
    (run / "journal.jsonl").write_bytes(journal[:-30] + b"\n\xff\xfe\n")
    (run / "status.json").write_bytes(b"\xff\x00")
    (run / "plan.toml").write_text("engine = ")
    done = hotloop("report", "run", "--json")
    assert done.code == 0 and len(done.document["damages"]) == 2
    assert done.document["size_bytes"] == (run / "report.html").stat().st_size < 6e6
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "plan.toml is damaged" in page and "journal.jsonl is damaged" in page and "Table of 3 epochs" in page


def test_a_run_without_metrics_and_journal_has_a_report(hotloop: Hotloop, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    for name in ("journal.jsonl", "metrics.jsonl", "plan.toml"):
        (run / name).unlink()
    assert hotloop("report", "run").code == 0
    assert "No figures yet" in (run / "report.html").read_text(encoding="utf-8")
    listed = hotloop("list", ".", "--json").document["runs"]
    assert [(row["run"], row["state"], row["epochs"]) for row in listed] == [("run", "new", 0)]


def test_a_run_that_is_given_twice_is_no_comparison(hotloop: Hotloop, tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_run(tmp_path / name)
    (tmp_path / "best").symlink_to("second")
    done = hotloop("compare", "first", "second", "best")
    assert done.code == 2 and done.err.startswith("error: best is the folder of a run that is given twice")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("report", "empty"), "is not a run"),
        (("report", "none"), "doesn't exist"),
        (("report", "study"), "study is a study; expected a folder that `hotloop train` made. Open study/study.html"),
        (("report", "text.json"), "is no result of hotloop"),
        (("report", "run", "text.json"), "is no result of hotloop"),
        (("report", "run", "--out", "empty"), "empty"),
        (("compare", "run", "empty"), "is not a run"),
        (("list", "text.json"), "is a file"),
        (("list", "none"), "doesn't exist"),
    ],
)
def test_a_wrong_call_is_one_line(hotloop: Hotloop, tmp_path: Path, arguments: tuple[str, ...], expected: str) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "study").mkdir()
    for name in ("text.json", "study/study.json"):
        (tmp_path / name).write_text('{"a": 1}')
    done = hotloop(*arguments)
    assert done.code == 1 and expected in done.err and len(done.err.splitlines()) == 1


SCRIPT = """
import torch
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(30):
    loss = torch.nn.functional.cross_entropy(model(torch.randn(8, 6)), torch.randint(3, (8,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.more
@pytest.mark.parametrize(("file", "source"), [("task.py", f"{SMALL}task = make()\n"), ("script.py", SCRIPT)])
def test_a_profile_of_a_task_and_of_a_script_has_a_report(
    hotloop: Hotloop, server: Server, tmp_path: Path, file: str, source: str
) -> None:
    (tmp_path / file).write_text(source)
    with (tmp_path / "profile.json").open("w") as out:
        profiled = server.start("profile", file, "--steps", "5", "--json", cwd=tmp_path, stdout=out)
    assert profiled.wait(300) == 0, profiled.communicate()[1]
    assert json.loads((tmp_path / "profile.json").read_text())["phases"]
    done = hotloop("report", "profile.json")
    assert done.code == 0, done.err
    page = (tmp_path / "profile.html").read_text(encoding="utf-8")
    for words in (file, "Where a step&#39;s time goes", "backward", "Operators", "Environment"):
        assert words in page, words
