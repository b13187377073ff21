"""Shows a network's training: a bar, and a line for each epoch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hotloop.core.terminal import Bar, Terminal


@dataclass(frozen=True)
class Epoch:
    """The results of one pass over the data.

    Attributes:
        number: from 1.
        train_loss, train_error: means over the epoch's batches, while the weights changed.
        test_loss, test_error: after the epoch; None without test data.
        seconds: duration with the test.
    """

    number: int
    train_loss: float
    train_error: float
    test_loss: float | None
    test_error: float | None
    seconds: float

    @property
    def last_error(self) -> float:
        """The test error; the training error without test data."""
        return self.train_error if self.test_error is None else self.test_error

    def __str__(self) -> str:
        tested = ""
        if self.test_error is not None:
            tested = f"  test loss {self.test_loss:.4f}  test error {self.test_error:.4f}"
        trained = f"train loss {self.train_loss:.4f}  train error {self.train_error:.4f}"
        return f"epoch {self.number}  {trained}{tested}  {self.seconds:.1f}s"


class ProgressDisplay:
    def __init__(self, epochs: int, batches: int, visible: bool) -> None:
        self.console = Terminal(stderr=False, quiet=not visible)
        self.bar = Bar(console=self.console, transient=True, disable=not (visible and self.console.is_terminal))
        self._epochs = epochs
        self._task = self.bar.add_task(f"epoch 1/{epochs}", total=batches)

    def step(self) -> None:
        self.bar.advance(self._task)

    def epoch(self, epoch: Epoch) -> None:
        self.console.print(str(epoch), markup=False, highlight=False, soft_wrap=True)
        if epoch.number < self._epochs:
            self.bar.reset(self._task, description=f"epoch {epoch.number + 1}/{self._epochs}")


@contextmanager
def show_progress(epochs: int, batches: int, visible: bool) -> Iterator[ProgressDisplay]:
    display = ProgressDisplay(epochs, batches, visible)
    with display.bar:
        yield display
