"""`hotloop evaluate`, `predict` and `export`: what they print, write, and refuse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import hotloop as library
from hotloop.report.progress import progress_bar
from tests.support.processes.in_process_command import Done, Hotloop, commands
from tests.support.runs import start_run

DIGITS = """
import torch
from torch import nn
import hotloop

print("a Task's file may print")


def task(width: int = 8) -> hotloop.Task:
    return hotloop.Task(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.ReLU(), nn.Linear(width, 10)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        data=hotloop.data.digits(),
        batch_size=100,
    )
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a trained run, whose Task's file has gone since, and pictures to look at."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "digits_of_a_test.py").write_text(DIGITS)
    from hotloop.task_file import load_task

    start_run(
        load_task(str(folder / "digits_of_a_test.py"), {"width": "9"}), run=folder / "run", axes={"device": "cpu"}
    )
    (folder / "digits_of_a_test.py").unlink()
    x, _ = library.data.digits().test
    np.save(folder / "images.npy", x.numpy())
    return folder


@pytest.fixture
def hotloop(folder: Path, monkeypatch, capfd) -> Iterator[Hotloop]:
    with commands(folder, monkeypatch, capfd) as run:
        yield run


def assert_refused(done: Done, *says: str, kind: str) -> None:
    """One line for a person and the same in the one document for a program."""
    assert done.code == 1
    assert done.err.splitlines()[-1].startswith("error: "), done.err
    assert "Traceback" not in done.err
    assert done.document["error"]["kind"] == kind
    for words in says:
        assert words in done.err


# --- evaluate


@pytest.mark.more
def test_evaluate_prints_a_table_and_writes_its_files(hotloop, folder) -> None:
    done = hotloop("evaluate", "run")
    assert done.code == 0, done.err
    for words in ("Metrics per class", "Most frequent confusions", "test: loss", "accuracy", "297 samples"):
        assert words in done.err
    for name in ("evaluation.json", "confusion.html", "mistakes.html"):
        assert str(Path("run/evaluation") / name) in done.err
        assert (folder / "run/evaluation" / name).stat().st_size > 1000
    written = json.loads((folder / "run/evaluation/evaluation.json").read_text())
    assert written["samples"] == 297 and len(written["confusion"]) == 10


def test_evaluate_shows_its_figures_though_nothing_can_be_written(hotloop, folder) -> None:
    there = folder / "run" / "evaluation"
    for path in there.glob("*"):
        path.unlink()
    if there.exists():
        there.rmdir()
    there.touch()  # where a folder should be
    try:
        done = hotloop("evaluate", "run")
        assert done.code == 1 and "test: loss" in done.err and "\nwritten:" not in done.err
        assert "can't be written" in done.err.splitlines()[-1]
        done = hotloop("evaluate", "run", "--json")
        assert done.code == 1 and done.document["files"] == {} and done.document["loss"] > 0
    finally:
        there.unlink()


@pytest.mark.more
def test_evaluate_with_json_prints_one_document_with_the_runs_figures(hotloop) -> None:
    document = hotloop("evaluate", "run", "--json").document
    final = library.Run.open(Path("run")).final
    assert document["loss"] == final["test_loss"]
    assert document["metrics"]["accuracy"] == final["test_accuracy"]
    assert set(document["files"]) == {"evaluation", "confusion", "mistakes"}
    assert all(Path(path).is_file() for path in document["files"].values())


@pytest.mark.more
@pytest.mark.few("validation-200")
@pytest.mark.parametrize(("on", "samples"), [("validation", 200), ("train", 1300)])
def test_evaluate_on_another_part(hotloop, on, samples) -> None:
    document = hotloop("evaluate", "run", "--on", on, "--weights", "last", "--json").document
    assert (document["on"], document["samples"], document["weights"]) == (on, samples, "last")


def test_evaluate_says_that_choosing_by_test_data_is_choosing(hotloop) -> None:
    assert "read once" in hotloop("evaluate", "--help").out


def test_evaluate_of_another_kind_of_task_has_no_classes(hotloop, folder) -> None:
    (folder / "regression_of_a_test.py").write_text(
        "import torch, hotloop\n"
        "from torch import nn\n"
        "x = torch.randn(20, 3)\n"
        "task = hotloop.Task(model=lambda: nn.Linear(3, 1), loss=nn.MSELoss(), data=(x, x[:, :1]),\n"
        "    test=(x, x[:, :1]), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))\n"
    )
    assert hotloop("train", "regression_of_a_test.py", "--run", "regression", "--device", "cpu").code == 0
    done = hotloop("evaluate", "regression")
    assert done.code == 0 and "test: loss" in done.err and "class" not in done.err
    files = sorted(path.name for path in (folder / "regression/evaluation").iterdir())
    assert files == ["evaluation.json", "residuals.html"]


def test_evaluate_what_is_no_run(hotloop) -> None:
    assert_refused(hotloop("evaluate", "nowhere", "--json"), "nowhere doesn't exist", kind="RunError")
    (Path("empty")).mkdir(exist_ok=True)
    assert_refused(hotloop("evaluate", "empty", "--json"), "empty is not a run", kind="RunError")


def test_a_wrong_part_is_a_wrong_call(hotloop) -> None:
    done = hotloop("evaluate", "run", "--on", "tests")
    assert done.code == 2 and "'tests'" in done.err and done.err.count("\n") == 1


# --- predict


def test_predict_writes_what_python_gives(hotloop, folder) -> None:
    done = hotloop("predict", "run", "images.npy", "--out", "deep/down/scores.npy")
    assert done.code == 0, done.err
    scores = np.load(folder / "deep/down/scores.npy")
    assert (scores.shape, scores.dtype) == ((297, 10), np.float32)
    assert np.array_equal(scores, library.predict("run", np.load("images.npy")))
    assert "(297, 10)" in done.err and str(Path("deep/down/scores.npy")) in done.err


def test_predict_names_its_file_after_the_inputs(hotloop) -> None:
    document = hotloop("predict", "run", "images.npy", "--json").document
    assert document["out"] == "images-scores.npy" and Path("images-scores.npy").is_file()
    assert document["shapes"] == {"scores": [297, 10]}
    assert document["classes"] == list("0123456789")


def test_predict_to_an_archive(hotloop) -> None:
    np.savez("images.npz", pictures=np.load("images.npy")[:5])
    assert hotloop("predict", "run", "images.npz", "--out", "scores.npz").code == 0
    with np.load("scores.npz") as archive:
        assert archive["scores"].shape == (5, 10)


SEVERAL = """
import torch, hotloop
from torch import nn

X = torch.randn(20, 3)
task = hotloop.Task(
    model=lambda: nn.Linear(3, 2),
    loss=nn.CrossEntropyLoss(),
    data=(X, torch.arange(20) % 2),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    predict=lambda model, x: {"scores": model(x), "sums": x.sum(1)},
)
"""


def test_several_outputs_go_into_an_archive(hotloop, folder) -> None:
    (folder / "several_of_a_test.py").write_text(SEVERAL)
    assert hotloop("train", "several_of_a_test.py", "--run", "several", "--device", "cpu").code == 0
    np.save("rows.npy", np.ones((7, 3), np.float32))
    assert hotloop("predict", "several", "rows.npy", "--json").document["out"] == "rows-scores.npz"
    with np.load("rows-scores.npz") as archive:
        assert archive["sums"].tolist() == [3.0] * 7 and archive["scores"].shape == (7, 2)
    refused = hotloop("predict", "several", "rows.npy", "--out", "rows-out.npy", "--json")
    assert_refused(refused, "scores, sums", "rows-out.npz", kind="DataError")
    assert not Path("rows-out.npy").exists()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("nowhere.npy",), "no file nowhere.npy"),
        (("text.npy",), "no .npy or .npz file"),
        (("images.npy", "--out", "scores.txt"), ".npy, .npz or .csv"),
        (("images.npy", "--format", "csv", "--out", "scores.npy"), "--format csv and --out scores.npy"),
        ((".",), "is a folder"),
        (("images.npy", "--out", "images.npy"), "is the file with the inputs"),
        (("small.npy",), "(N, 28, 28)"),
        (("images.npy", "--device", "cuda:99"), "cuda:99"),
    ],
)
def test_predict_refuses_in_one_line(hotloop, args, says) -> None:
    Path("text.npy").write_text("these are words")
    np.save("small.npy", np.zeros((2, 3, 3), np.uint8))
    before = Path("images.npy").read_bytes()
    done = hotloop("predict", "run", *args, "--json")
    assert_refused(done, says, kind="DeviceError" if "cuda" in says else "DataError")
    assert Path("images.npy").read_bytes() == before


# --- export


def test_export_says_what_the_file_takes_and_how_it_was_checked(hotloop) -> None:
    done = hotloop("export", "run", "--to", "model.pt2")
    assert done.code == 0, done.err
    for words in ("takes input: uint8 (batch, 28, 28)", "gives output: float32 (batch, 10)", "prepare is in the file",
                  "loaded again and run on batches of 1, 4, 7", "written: model.pt2"):  # fmt: skip
        assert words in done.err
    found = torch.export.load("model.pt2").module()(torch.from_numpy(np.load("images.npy")))
    np.testing.assert_allclose(found.detach().numpy(), library.predict("run", np.load("images.npy")), atol=1e-5)


def test_export_with_json_prints_one_document(hotloop) -> None:
    document = hotloop("export", "run", "--to", "model.safetensors", "--json").document
    assert (document["format"], document["difference"], document["file"]) == ("safetensors", 0.0, "model.safetensors")
    assert hotloop("export", "run", "--to", "model.pt2", "--without-prepare", "--batch-size", "2", "--json").document[
        "inputs"
    ] == [{"name": "input", "dtype": "float32", "shape": [2, 1, 28, 28]}]


def test_export_to_an_unknown_format(hotloop) -> None:
    assert_refused(hotloop("export", "run", "--to", "model.h5", "--json"), ".safetensors", kind="ExportError")
    assert not Path("model.h5").exists()


def test_export_without_a_target_is_a_wrong_call(hotloop) -> None:
    done = hotloop("export", "run")
    assert done.code == 2 and "--to" in done.err


# --- the progress bar


@pytest.mark.parametrize(("after_s", "shown"), [(0.0, True), (60.0, False)])
def test_a_bar_shows_for_long_work_alone(after_s: float, shown: bool) -> None:
    from io import StringIO

    from rich.console import Console

    terminal = Console(file=StringIO(), force_terminal=True, width=100)
    with progress_bar(terminal, "predicting", after_s=after_s) as progress:
        for done in range(0, 101, 50):
            progress(done, 100)
    assert ("predicting" in terminal.file.getvalue()) == shown  # type: ignore[attr-defined]
