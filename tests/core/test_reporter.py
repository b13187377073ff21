"""What is shown while lowering takes long: on a terminal a bar or a spinner, elsewhere lines."""

from __future__ import annotations

from functools import partial
from io import StringIO

import pytest
from rich.console import Console

import hotloop
from hotloop.core import reporter
from hotloop.lowering.program import Program
from hotloop.plan import Plan
from hotloop.report.progress import TrainingDisplay, progress_bar
from tests.support.programs import a_task
from tests.support.tasks.in_memory_datasets import Pairs


def terminal() -> Console:
    return Console(file=StringIO(), force_terminal=True, color_system=None, width=100)


def shown(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_reading_shows_a_bar_and_how_far_it_is() -> None:
    console, lines = terminal(), list[str]()
    hotloop.lower(
        a_task(data=Pairs()), Plan(residency="host"), lines.append, partial(progress_bar, console, after_s=0.0)
    )
    assert "reading data into memory" in shown(console) and "24/24 samples" in shown(console)
    assert [line.split(" (")[0] for line in lines] == ["read 24 samples of data into memory"]


def test_compiling_shows_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Program, "prepare", lambda self, batch, samples: None)
    display, lines = TrainingDisplay(terminal()), list[str]()
    hotloop.lower(a_task(), Plan(compile="step"), lines.append, display.during)
    assert "compiling the step 0:00:00" in shown(display.console)
    assert lines[0].startswith("compiling the step") and lines[1].startswith("compiled the step in ")


def test_an_error_takes_the_bar_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Program, "prepare", interrupted)
    display = TrainingDisplay(terminal())
    with pytest.raises(KeyboardInterrupt):
        hotloop.lower(a_task(), Plan(compile="step"), during=display.during)
    assert shown(display.console).endswith("\x1b[?25h\r\x1b[1A\x1b[2K")  # the cursor is back, the line is gone


def test_without_a_terminal_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "_REPORT_INTERVAL_S", 0.0)
    display = TrainingDisplay(Console(file=StringIO(), force_terminal=False))
    assert display.during is None
    hotloop.lower(a_task(data=Pairs()), Plan(residency="host"), display.say, display.during)
    assert "reading data into memory: 20 of 24 samples\n" in shown(display.console)
