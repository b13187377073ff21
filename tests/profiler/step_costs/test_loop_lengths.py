"""The lengths of the loops around a line, in all functions that run."""

from __future__ import annotations

import sys
from argparse import Namespace
from types import FrameType
from typing import Any

import pytest

from hotloop.profiler.step_costs.script_step import loop_lengths


def lengths(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, **names: Any) -> list[int | None]:
    """Runs a script that calls `here()` once in its loops."""
    path = tmp_path / "script.py"
    path.write_text(text)
    found: list[list[int | None]] = []

    class Stop(Exception):
        pass

    def here() -> None:
        frame: FrameType | None = sys._getframe(1)
        found.append(loop_lengths(frame, lambda file: file != str(path)))
        raise Stop

    with pytest.raises(Stop):
        exec(compile(text, str(path), "exec"), {"here": here, **names})
    return found[0]


EPOCHS = Namespace(epochs=5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("for epoch in range(5):\n for batch in loader:\n  here()", [5, 3]),
        ("for epoch in range(1, args.epochs + 1):\n for n, batch in enumerate(loader):\n  here()", [5, 3]),
        ("def train(data):\n for b in tqdm(data):\n  here()\nfor e in range(args.epochs):\n train(loader)", [5, 3]),
        ("for e in range(2):\n for i in range(0, len(loader) * 4, 2):\n  if i:\n   here()", [2, 6]),
        ("while True:\n for b in loader:\n  here()", [None, 3]),
        ("for e in epochs_of(args):\n for b in loader:\n  here()", [None, 3]),
        ("for e in range(3):\n pass\nfor a, b in zip(loader, range(2)):\n here()", [2]),
        ("for e in range(3):\n def f():\n  here()\n f()", [3]),
        ("for e in range(3):\n pass\nelse:\n here()", []),
        ("for e in [1, 2]:\n here()", [2]),
    ],
)
def test_loops_around_a_line(text: str, expected: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    names = {"loader": [7, 8, 9], "args": EPOCHS, "tqdm": iter, "epochs_of": lambda args: [1]}
    assert lengths(text, monkeypatch, tmp_path, **names) == expected
