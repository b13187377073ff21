"""Shows a training's progress: a bar, and a line for each epoch."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from hotloop.core.callback import View
from hotloop.core.processes import REASONS
from hotloop.core.reporter import Reporter
from hotloop.core.terminal import Bar


@contextmanager
def progress_bar(
    console: Console, doing: str, of: str = "samples", counted: bool = True, after_s: float = 2.0
) -> Iterator[Callable[[int, int | None], None]]:
    """Shows a progress bar for work that lasts longer than `after_s` seconds; yields a function of (done, total).

    Work that isn't `counted` gets a spinner with the elapsed time at once.
    """
    count = (BarColumn(), MofNCompleteColumn(), TextColumn(of), TimeRemainingColumn())
    shown = Bar(
        SpinnerColumn(),
        TextColumn(doing),
        *(count if counted else (TimeElapsedColumn(),)),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    work = shown.add_task("", total=None)
    started = time.monotonic()

    def progress(done: int, total: int | None) -> None:
        shown.update(work, completed=done, total=total)
        if time.monotonic() - started > after_s:
            shown.start()

    try:
        if not counted:
            shown.start()
        yield progress
    finally:
        shown.stop()


class TrainingDisplay:
    """A callback with a bar on a terminal or in a notebook, and a line for each epoch everywhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._progress: Progress | None = None
        self._bar: TaskID | None = None

    def say(self, line: str) -> None:
        """Shows a line, above a bar."""
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    @property
    def during(self) -> Callable[..., AbstractContextManager[Callable[[int, int | None], None]]] | None:
        """`progress_bar` for long work on a terminal; None elsewhere, which shows lines."""
        return partial(progress_bar, self.console) if self.console.is_terminal else None

    @property
    def reporter(self) -> Reporter:
        return Reporter(self.say, self.during)

    def __call__(self, view: View) -> None:
        if view.event in ("start", "progress", "epoch"):
            self._update_bar(view)
        if view.event == "epoch":
            self.say(epoch_line(view))
        if view.event == "stop":
            self.close()
            self.say(stop_line(view))

    def close(self) -> None:
        """Removes the bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _update_bar(self, view: View) -> None:
        if not (_has_widgets() if self.console.is_jupyter else self.console.is_terminal):
            return
        if view.epoch == view.epochs:  # the bar stays full after the last epoch
            return
        if self._progress is None:
            self._progress = Bar(
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(bar_width=None),
                _Figures(),
                console=self.console,
                transient=True,
                auto_refresh=not self.console.is_jupyter,
            )
            self._progress.start()
            self._bar = self._progress.add_task("", total=view.batches)
        assert self._bar is not None
        self._progress.update(
            self._bar,
            description=f"epoch {view.epoch + 1}/{view.epochs}",
            completed=view.batch,
            total=view.batches,
            figures=progress_figures(view),
            refresh=self.console.is_jupyter,
        )


def _has_widgets() -> bool:
    """A notebook without ipywidgets can't show a bar."""
    return importlib.util.find_spec("ipywidgets") is not None


class _Figures(ProgressColumn):
    """A column that stays on one line: in a narrow terminal the bar shrinks instead."""

    def get_table_column(self) -> Column:
        return Column(no_wrap=True)

    def render(self, task: Task) -> Text:
        return Text(task.fields.get("figures", ""))


def progress_figures(view: View) -> str:
    """Returns step, speed, loss and remaining time in a line."""
    parts = [f"step {view.batch}/{view.batches or '?'}"]
    if view.samples_per_s:
        parts.append(f"{view.samples_per_s:,.0f} samples/s")
    if view.loss is not None:
        parts.append(f"loss {view.loss:.4f}")
    if view.remaining_s is not None:
        parts.append(f"{format_duration(view.remaining_s)} left")
    return "  ".join(parts)


def epoch_line(view: View) -> str:
    record = view.history[-1]
    parts = [f"epoch {record.epoch}/{view.epochs}", f"train loss {record.train['loss']:.4f}"]
    parts += [f"validation {name} {value:.4f}" for name, value in record.validation.items()]
    return "  ".join([*parts, f"{record.samples_per_s:,.0f} samples/s", format_duration(record.seconds)])


def stop_line(view: View) -> str:
    """Returns how training ended, and how to resume."""
    if view.reason in REASONS:
        return f"stopped ({view.reason}) at step {view.step}, saved; go on with: hotloop train --resume {view.run}"
    return f"{view.reason} after {len(view.history)} epoch{'' if len(view.history) == 1 else 's'}"


def summary(run: Path, plan: str, final: Mapping[str, Any] | None) -> list[str]:
    """Returns a training's final metrics, and the places of its results."""
    shown = {name: value for name, value in (final or {}).items() if isinstance(value, float)}
    figures = "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in shown.items())
    return [*([figures] if figures else []), f"run: {run}   plan: {plan}   learning curves: {run / 'curves.html'}"]


def format_duration(seconds: float) -> str:
    """Returns text such as `0.8s`, `42s`, `3m12s`, `2h05m`."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"
