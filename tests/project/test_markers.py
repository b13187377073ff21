"""The marker `few` leaves to `make test` the cells of a matrix that it names."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conftest import pytest_collection_modifyitems


class Cell:
    def __init__(self, nodeid: str, *names: str) -> None:
        self.nodeid, self.names, self.added = nodeid, names, list[str]()

    def get_closest_marker(self, name: str) -> Any:
        return pytest.mark.few(*self.names).mark if name == "few" and self.names else None

    def add_marker(self, name: str) -> None:
        self.added.append(name)


def left_out(*cells: Cell) -> list[str]:
    pytest_collection_modifyitems(cells)  # type: ignore[arg-type]
    return [cell.nodeid for cell in cells if cell.added == ["more"]]


def test_cells_that_are_not_named_are_more() -> None:
    cells = [Cell(f"test.py::test_a[{name}]", "a-*", "('b', 2)") for name in ("a-1", "a-2", "('b', 2)", "b-1")]
    assert left_out(*cells, Cell("test.py::test_plain")) == ["test.py::test_a[b-1]"]


def test_cells_that_are_asked_for_alone_run() -> None:
    assert left_out(Cell("test.py::test_a[b-1]", "a-*"), Cell("test.py::test_b[a-1]", "a-*")) == []
