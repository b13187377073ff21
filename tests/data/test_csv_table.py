"""A CSV file as a data set: kinds of columns, statistics of the training part alone, and refusals in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from torch import nn

import hotloop
from hotloop.errors import DataError, RunError
from tests.support.programs import assert_resumes, trained

CITIES = ("Oslo", "Bern", "Rome")


def write_houses(path: Path, rows: int = 200, separator: str = ",") -> Path:
    """Areas, cities, names and prices; the last column is the price."""
    draw = np.random.default_rng(3)
    lines = [separator.join(("area", "city", "name", "rooms", "price"))]
    for row in range(rows):
        area = draw.normal(100, 20)
        cells = f"{area:.3f}", CITIES[row % 3], f"house {row}", str(row % 5), f"{3 * area + row % 3:.2f}"
        lines.append(separator.join(cells))
    path.write_text("\n".join(lines) + "\n")
    return path


def task_of(data: hotloop.data.Bundle, **fields) -> hotloop.Task:
    outputs = len(data.classes) or data.train[1].shape[1]
    return hotloop.Task(
        model=lambda: nn.Linear(len(data.inputs), outputs),
        loss=nn.CrossEntropyLoss() if data.classes else nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=data,
        batch_size=16,
        **fields,
    )


def rows_of(*rows: str, header: str = "a,b,y") -> str:
    return "\n".join((header, *rows)) + "\n"


def numbered(count: int, row: str = "{0},{0}.5,{0}.25") -> list[str]:
    return [row.format(number) for number in range(count)]


@pytest.fixture
def houses(tmp_path) -> Path:
    return write_houses(tmp_path / "houses.csv")


# --- what becomes of the columns


def test_numbers_are_standardised_and_texts_one_hot_as_by_scikit_learn(houses) -> None:
    data = hotloop.data.csv(houses, target="price", drop=["name"])
    assert data.inputs == ("area", "city=Bern", "city=Oslo", "city=Rome", "rooms")
    x, y = data.train
    assert (x.dtype, y.dtype, y.shape) == (torch.float64, torch.float32, (160, 1))
    scaler = StandardScaler().fit(x[:, [0, 4]].numpy())
    for raw, _ in (data.train, data.validation, data.test):
        expected = scaler.transform(raw[:, [0, 4]].numpy()).astype(np.float32)
        np.testing.assert_allclose(data.prepare(raw)[:, [0, 4]].numpy(), expected, rtol=1e-6, atol=1e-6)
    cities = np.array([CITIES[row % 3] for row in range(200)])[:, None]
    one_hot = OneHotEncoder(sparse_output=False).fit_transform(cities)
    whole = hotloop.data.csv(houses, target="price", drop=["name"], validation=0, test=0).train[0]
    assert np.array_equal(whole[:, 1:4].numpy(), one_hot)


def test_the_statistics_are_those_of_the_training_part_alone(tmp_path, houses) -> None:
    """Other values in validation and test rows change no statistic; one in a training row does."""
    first = hotloop.data.csv(houses, target="price", drop=["name"])
    lines = houses.read_text().splitlines()
    held_out = {float(area) for part in (first.validation, first.test) for area in part[0][:, 0]}
    changed = [
        line.replace(line.split(",")[0], "1e6").replace("Oslo", "Paris")
        if float(line.split(",")[0]) in held_out
        else line
        for line in lines[1:]
    ]
    assert sum("1e6" in line for line in changed) == 40
    houses.write_text("\n".join([lines[0], *changed]) + "\n")
    again = hotloop.data.csv(houses, target="price", drop=["name"])
    assert again.prepare == first.prepare and again.inputs == first.inputs
    assert "'Paris'" in again.note and "lacks" in again.note
    train_area = f"{float(first.train[0][0, 0]):.3f}"
    houses.write_text(houses.read_text().replace(train_area, "999"))
    assert hotloop.data.csv(houses, target="price", drop=["name"]).prepare != first.prepare


def test_parts_are_disjoint_in_the_files_order_and_drawn_by_seed(tmp_path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(rows_of(*numbered(100)))
    data = hotloop.data.csv(path, target="y", validation=7, test=0.2)
    numbers = [part[0][:, 0].long().tolist() for part in (data.train, data.validation, data.test)]
    assert list(map(len, numbers)) == [73, 7, 20] and {*numbers[0], *numbers[1], *numbers[2]} == {*range(100)}
    assert all(part == sorted(part) for part in numbers)
    other = hotloop.data.csv(path, target="y", validation=7, test=0.2, seed=1)
    assert other.test[0].tolist() != data.test[0].tolist()


def test_texts_and_few_whole_numbers_are_classes(tmp_path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(rows_of(*(f"{row},1.5,{label}" for row, label in enumerate(["b", "a", "c"] * 10))))
    data = hotloop.data.csv(path, target="y", test=0, validation=0)
    assert data.classes == ("a", "b", "c") and data.train[1][:3].tolist() == [1, 0, 2] and data.note == ""
    path.write_text(rows_of(*(f"{row},1.5,{(2, 10, 1)[row % 3]}" for row in range(30))))
    data = hotloop.data.csv(path, target="y", test=0, validation=0)
    assert data.classes == ("1", "2", "10") and data.train[1][:3].tolist() == [1, 2, 0]
    assert "count as classes; kind='regression' changes this" in data.note
    assert hotloop.data.csv(path, target="y", kind="regression").train[1].dtype == torch.float32
    path.write_text(rows_of(*(f"{row},1.5,{row}" for row in range(30))))
    assert hotloop.data.csv(path, target="y").classes == ()
    data = hotloop.data.csv(path, target="y", kind="classes", test=0, validation=0)
    assert data.classes == tuple(map(str, range(30))) and data.train[1].tolist() == list(range(30))


def test_several_targets(houses) -> None:
    data = hotloop.data.csv(houses, target=["price", "rooms"], drop=["name"])
    assert data.train[1].shape == (160, 2) and data.reader.targets == ("price", "rooms")
    with pytest.raises(DataError, match="'city' has texts; expected numbers for a regression"):
        hotloop.data.csv(houses, target=["price", "city"])


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_the_separator_is_detected(tmp_path, separator) -> None:
    path = write_houses(tmp_path / "a.csv", separator=separator)
    expected = hotloop.data.csv(write_houses(tmp_path / "b.csv"), target="price", drop=["name"])
    found = hotloop.data.csv(path, target="price", drop=["name"])
    assert torch.equal(found.train[0], expected.train[0])


def test_quotes_byte_order_marks_and_empty_lines(tmp_path) -> None:
    path = tmp_path / "a.csv"
    rows = [f'{row},"x, ""y""\nz",{row}.5' for row in range(30)]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join([" a ,b,y", *rows]).encode())
    data = hotloop.data.csv(path, target="y", test=0, validation=0)
    assert data.inputs == ("a", 'b=x, "y"\nz') and len(data.train[0]) == 30


def test_numbers_as_categories(tmp_path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(rows_of(*(f"{row % 3},1.5,{row}.5" for row in range(30))))
    assert hotloop.data.csv(path, target="y", categories=["a"]).inputs == ("a=0", "a=1", "a=2", "b")


def test_a_constant_column_becomes_zero(tmp_path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(rows_of(*(f"{row},7,{row}.5" for row in range(30))))
    data = hotloop.data.csv(path, target="y")
    assert not data.prepare(data.train[0])[:, 1].any()


def test_a_large_file(tmp_path, monkeypatch) -> None:
    """Rows beyond a chunk, and a column whose first chunk has numbers alone."""
    monkeypatch.setattr("hotloop.data.readers.csv_cells._CHUNK_ROWS", 10)
    path = tmp_path / "a.csv"
    path.write_text(rows_of(*(f"{row},{row if row < 30 else 'abc'[row % 3]},{row}.5" for row in range(100))))
    data = hotloop.data.csv(path, target="y", validation=0, test=0)
    assert len(data.inputs) == 1 + 33 and torch.equal(data.train[0][:, 0], torch.arange(100).double())
    assert data.train[0][:, 1:].sum(1).eq(1).all()


# --- missing cells


@pytest.mark.parametrize("cell", ["", "NA", " nan ", "N/A", "null"])
def test_missing_cells_are_refused_or_replaced_or_left_out(tmp_path, cell) -> None:
    path = tmp_path / "a.csv"
    rows = [f"{row},{'uv'[row % 2]},{row}.5" for row in range(40)]
    rows[6], rows[9] = f"{cell},u,6.5", f"9,{cell},9.5"
    path.write_text(rows_of(*rows))
    with pytest.raises(DataError, match=r"column 'a' has no value in 1 of 40 rows, first in row 7.*missing='mean'"):
        hotloop.data.csv(path, target="y")
    dropped = hotloop.data.csv(path, target="y", missing="drop", validation=0, test=0)
    assert len(dropped.train[0]) == 38
    mean = hotloop.data.csv(path, target="y", missing="mean", validation=0, test=0)
    others = [row for row in range(40) if row != 6]
    assert mean.train[0][6, 0] == pytest.approx(np.mean(others))
    assert mean.prepare(mean.train[0])[6, 0] == pytest.approx(0, abs=1e-6)
    assert mean.train[0][9].tolist() == [9, 0, 0]
    rows[3] = f"3,u,{cell}"
    path.write_text(rows_of(*rows))
    with pytest.raises(DataError, match=r"column 'y' has no value in 1 of 40 rows.*missing='drop'"):
        hotloop.data.csv(path, target="y", missing="mean")


def test_the_mean_of_missing_cells_is_that_of_the_training_part(tmp_path) -> None:
    path = tmp_path / "a.csv"
    rows = numbered(50)
    rows[6] = ",6.5,6.25"
    path.write_text(rows_of(*rows))
    data = hotloop.data.csv(path, target="y", missing="mean", test=0.4)
    place = [part[0][:, 1].tolist().index(6.5) if 6.5 in part[0][:, 1] else None for part in (data.train, data.test)]
    train = [number for number in data.train[0][:, 1].sub(0.5).tolist() if number != 6]
    part = data.train if place[0] is not None else data.test if place[1] is not None else data.validation
    row = part[0][:, 1].tolist().index(6.5)
    assert part[0][row, 0] == pytest.approx(np.mean(train))


# --- refusals


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("", {}, "is empty"),
        ("\n\n", {}, "is empty"),
        ("a,b,y\n", {}, "has a header and no rows"),
        ("1,2,3\n4,5,6\n", {}, "has numbers alone; expected names of the columns"),
        ("a,,y\n1,2,3\n", {}, "column 2 .*has no name"),
        ("a,a,y\n1,2,3\n", {}, "two columns 'a'"),
        (rows_of(*numbered(30), "1,2"), {}, "has 2 cells near line 32; expected 3"),
        (rows_of(*numbered(30)), {"target": "Y"}, "no column 'Y'; expected one of a, b, y"),
        (rows_of(*numbered(30), header="area,price,y"), {"target": "prize"}, "Did you mean 'price'"),
        (rows_of(*numbered(30)), {"drop": ["c"]}, "no column 'c'"),
        (rows_of(*numbered(30), "x1,2,3"), {}, "column 'a' has 'x1' in row 31; expected a number"),
        (rows_of(*numbered(30), "inf,2,3"), {}, "column 'a' has 'inf' in row 31"),
        (rows_of(*(f"u{row},1,2.5" for row in range(200))), {}, "'a' has 160 different texts.*drop="),
        (rows_of(*numbered(30, "1,2,c")), {}, "one class, 'c'"),
        (rows_of(*numbered(30)), {"missing": "zero"}, "missing='zero'"),
        (rows_of(*numbered(30)), {"kind": "class"}, "kind='class'"),
        (rows_of(*numbered(30)), {"test": 1.0}, "test=1.0"),
        (rows_of(*numbered(30)), {"test": 30}, "test=30"),
        (rows_of(*numbered(30)), {"separator": ", "}, "separator=', '"),
        (rows_of(*numbered(30)), {"drop": ["a", "b"]}, "no column for inputs"),
        (rows_of(*numbered(30, "{0},5;1.2"), header="a;y"), {}, "'a' has '0,5' in row 1.*decimal point"),
        ("a,b,y\n1,2\n", {}, "has 2 cells near line 2"),
        ('a,b,y\n1,"2,3\n', {}, "can't be read near line"),
    ],
)  # fmt: skip
def test_refusals_take_one_line(tmp_path, text, options, says) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=says) as refusal:
        hotloop.data.csv(path, **{"target": "y"} | options)
    assert "\n" not in str(refusal.value)


def test_missing_files_and_other_encodings(tmp_path) -> None:
    with pytest.raises(DataError, match=r"no file .*nowhere.csv"):
        hotloop.data.csv(tmp_path / "nowhere.csv", target="y")
    with pytest.raises(DataError, match=r"is a folder"):
        hotloop.data.csv(tmp_path, target="y")
    path = tmp_path / "a.csv"
    path.write_bytes(rows_of(*(f"{row},Zürich,{row}.5" for row in range(30))).encode("latin-1"))
    with pytest.raises(DataError, match=r"isn't text in the encoding.*latin-1"):
        hotloop.data.csv(path, target="y")
    assert hotloop.data.csv(path, target="y", encoding="latin-1").inputs == ("a", "b=Zürich")


# --- other files for validation and test


def test_validation_and_test_in_files_of_their_own(tmp_path, houses) -> None:
    other = write_houses(tmp_path / "other.csv", rows=30)
    data = hotloop.data.csv(houses, target="price", drop=["name"], test=other)
    assert data.sizes() == {"train": 180, "validation": 20, "test": 30}
    whole = hotloop.data.csv(houses, target="price", drop=["name"], test=0)
    assert data.prepare == whole.prepare
    text = rows_of(*(f"{row},1.5,{'ab'[row % 2]}" for row in range(30)))
    (tmp_path / "train.csv").write_text(text)
    (tmp_path / "test.csv").write_text(text.replace("a\n", "c\n"))
    with pytest.raises(DataError, match=r"test.csv: column 'y' has the class 'c'"):
        hotloop.data.csv(tmp_path / "train.csv", target="y", test=tmp_path / "test.csv")


# --- training and prediction


def test_a_resumed_training_is_exact(houses) -> None:
    assert_resumes(task_of(hotloop.data.csv(houses, target="city", drop=["name"]), epochs=2))


def test_new_files_are_predicted_with_the_runs_statistics(tmp_path, houses) -> None:
    data = hotloop.data.csv(houses, target="price", drop=["name"])
    run = trained(task_of(data, epochs=2), tmp_path / "run")
    expected = hotloop.predict(run, data.test[0])
    rows = houses.read_text().splitlines()
    new = tmp_path / "new.csv"
    areas = {f"{area:.3f}" for area in data.test[0][:, 0].tolist()}
    chosen = [row.split(",") for row in rows[1:] if row.split(",")[0] in areas]
    new.write_text("rooms;city;area\n" + "".join(f"{row[3]};{row[1]};{row[0]}\n" for row in chosen))
    assert np.array_equal(hotloop.predict(run, new), expected)
    model = hotloop.load_model(run)
    with torch.no_grad():
        np.testing.assert_allclose(model(data.prepare(data.test[0])).numpy(), expected, rtol=1e-5)

    houses.write_text("\n".join([*rows, "5000,Rome,palace,9,15000"]) + "\n")
    changed = task_of(hotloop.data.csv(houses, target="price", drop=["name"]))
    assert changed.data.prepare != data.prepare
    assert np.array_equal(hotloop.predict(run, new, task=changed), expected)
    with pytest.raises(RunError, match="are not those that the run was started with"):
        hotloop.evaluate(run, task=changed)
    with pytest.raises(RunError, match="are not those that the run was started with"):
        hotloop.export(run, tmp_path / "model.pt2", task=changed)


def test_new_files_with_faults(tmp_path, houses) -> None:
    run = trained(task_of(hotloop.data.csv(houses, target="price", drop=["name"])), tmp_path / "run")
    new = tmp_path / "new.csv"
    for text, says in (
        ("area,rooms\n1,2\n", "no column 'city'"),
        ("area,rooms,city\n1,,Oslo\n", "'rooms' has no value in 1 of 1 rows"),
        ("area,rooms,city\n1,many,Oslo\n", "'rooms' has texts; expected numbers"),
    ):
        new.write_text(text)
        with pytest.raises(DataError, match=says):
            hotloop.predict(run, new)
    new.write_text("area,rooms,city\n1,2,Paris\n")
    with pytest.warns(UserWarning, match="1 values that the training part lacks, such as 'Paris'"):
        assert hotloop.predict(run, new).shape == (1, 1)


def test_the_export_takes_raw_numbers(tmp_path, houses) -> None:
    data = hotloop.data.csv(houses, target="price", drop=["name"])
    run = trained(task_of(data), tmp_path / "run")
    hotloop.export(run, tmp_path / "model.pt2")
    found = torch.export.load(tmp_path / "model.pt2").module()(data.test[0])
    np.testing.assert_allclose(found.detach().numpy(), hotloop.predict(run, data.test[0]), rtol=1e-4)
