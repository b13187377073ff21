"""A folder of images and a CSV file from Task to table of predictions, as a user types the commands."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import hotloop as library
from tests.support.processes.in_process_command import Hotloop, commands

PETS = """
import torch, hotloop
from torch import nn

data = hotloop.data.image_folder("pets", size=8)
task = hotloop.Task(
    model=lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(len(data.classes))),
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    data=data,
    epochs=4,
)
"""

HOUSES = """
import torch, hotloop
from torch import nn

data = hotloop.data.csv("houses.csv", target="price")
task = hotloop.Task(
    model=lambda: nn.Linear(len(data.inputs), 1),
    loss=nn.MSELoss(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    data=data,
)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    for name, colour in (("red", (250, 20, 0)), ("blue", (0, 20, 250))):
        (folder / "pets" / name).mkdir(parents=True)
        for number in range(20):
            Image.new("RGB", (10, 9 + number), colour).save(folder / "pets" / name / f"{number}.png")
    (folder / "new").mkdir()
    Image.new("RGB", (30, 20), (250, 30, 0)).save(folder / "new" / "b.png")
    Image.new("RGB", (30, 20), (0, 30, 250)).save(folder / "new" / "a.jpg")
    rows = [f"{row},{'uv'[row % 2]},{2 * row}.5" for row in range(100)]
    (folder / "houses.csv").write_text("\n".join(["area,city,price", *rows]))
    (folder / "new.csv").write_text("city,area\nu,7\nv,9\n")
    (folder / "pets.py").write_text(PETS)
    (folder / "houses.py").write_text(HOUSES)
    return folder


@pytest.fixture
def hotloop(folder: Path, monkeypatch, capfd) -> Iterator[Hotloop]:
    with commands(folder, monkeypatch, capfd) as run:
        yield run


def read(path: str) -> list[dict[str, str]]:
    with Path(path).open(newline="") as file:
        return list(csv.DictReader(file))


def test_images_from_training_to_a_table(hotloop) -> None:
    assert hotloop("train", "pets.py", "--run", "pets-run", "--device", "cpu").code == 0
    done = hotloop("evaluate", "pets-run")
    assert done.code == 0 and "Metrics per class" in done.err and "macro F1 1.0000" in done.err, done.err
    done = hotloop("predict", "pets-run", "new", "--format", "csv")
    assert done.code == 0 and "class (the most probable class)" in done.err, done.err
    rows = read("new-predictions.csv")
    assert [(row["file"], row["class"]) for row in rows] == [("a.jpg", "blue"), ("b.png", "red")]
    assert float(rows[0]["probability_blue"]) + float(rows[0]["probability_red"]) == pytest.approx(1, abs=1e-5)
    document = hotloop("predict", "pets-run", "new/b.png", "--out", "one.csv", "--json").document
    assert list(document["columns"]) == ["file", "class", "probability_blue", "probability_red"]
    assert read("one.csv")[0]["file"] == "b.png"
    done = hotloop("predict", "pets-run", "new")
    assert "columns: blue, red" in done.err and np.load("new-scores.npy").shape == (2, 2)


def test_a_table_from_training_to_a_table(hotloop, folder) -> None:
    assert hotloop("train", "houses.py", "--run", "houses-run", "--device", "cpu").code == 0
    document = hotloop("evaluate", "houses-run", "--json").document
    assert document["regression"]["targets"][0]["name"] == "price" and set(document["files"]) == {
        "evaluation",
        "residuals",
    }
    assert (folder / "houses-run/evaluation/residuals.html").stat().st_size > 1000
    done = hotloop("evaluate", "houses-run")
    assert "RMSE" in done.err and "residuals.html" in done.err
    assert hotloop("predict", "houses-run", "new.csv", "--format", "csv").code == 0
    rows = read("new-predictions.csv")
    assert [row["row"] for row in rows] == ["1", "2"]
    expected = library.predict("houses-run", "new.csv")[:, 0]
    np.testing.assert_allclose([float(row["price"]) for row in rows], expected, rtol=1e-5)
    document = hotloop("predict", "houses-run", "new.csv", "--json").document
    assert document["columns"] == {"price": "target"} and document["out"] == "new-scores.npy"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("new.csv", "--format", "csv", "--out", "new.npy"), "--format csv and --out new.npy"),
        (("new.csv", "--out", "new.csv"), "is the file with the inputs"),
        (("nowhere.csv",), "no file nowhere.csv"),
        (("houses.py",), "no column 'area'"),
    ],
)
def test_wrong_calls_take_one_line(hotloop, args, says) -> None:
    if not Path("wrong-run").exists():
        assert hotloop("train", "houses.py", "--run", "wrong-run", "--device", "cpu").code == 0
    done = hotloop("predict", "wrong-run", *args)
    assert done.code == 1 and says in done.err.splitlines()[-1] and "Traceback" not in done.err
