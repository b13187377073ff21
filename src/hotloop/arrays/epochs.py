"""What is seen of a training while it goes on: a bar, and a line for each epoch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hotloop.core.terminal import Bar, Terminal


@dataclass(frozen=True)
class Epoch:
    """What one pass over the data came to.

    Attributes:
        number: from 1.
        train_loss, train_error: means over the epoch, while the weights moved.
        test_loss, test_error: after the epoch; None without test data.
        seconds: with the test.
    """

    number: int
    train_loss: float
    train_error: float
    test_loss: float | None
    test_error: float | None
    seconds: float

    @property
    def last_error(self) -> float:
        """The test error, or the training error where nothing is tested."""
        return self.train_error if self.test_error is None else self.test_error

    def __str__(self) -> str:
        tested = (
            "" if self.test_error is None else f"  test loss {self.test_loss:.4f}  test error {self.test_error:.4f}"
        )
        trained = f"train loss {self.train_loss:.4f}  train error {self.train_error:.4f}"
        return f"epoch {self.number}  {trained}{tested}  {self.seconds:.1f}s"


class ProgressDisplay:
    """Moves the bar, and writes the lines above it."""

    def __init__(self, epochs: int, batches: int, visible: bool) -> None:
        self.console = Terminal(stderr=False, quiet=not visible)
        self.bar = Bar(console=self.console, transient=True, disable=not (visible and self.console.is_terminal))
        self._epochs = epochs
        self._task = self.bar.add_task(f"epoch 1/{epochs}", total=batches)

    def step(self) -> None:
        """A batch is done."""
        self.bar.advance(self._task)

    def epoch(self, found: Epoch) -> None:
        """An epoch is done."""
        self.console.print(str(found), markup=False, highlight=False, soft_wrap=True)
        if found.number < self._epochs:
            self.bar.reset(self._task, description=f"epoch {found.number + 1}/{self._epochs}")


@contextmanager
def show_progress(epochs: int, batches: int, visible: bool) -> Iterator[ProgressDisplay]:
    """Shows a training for as long as it takes."""
    show = ProgressDisplay(epochs, batches, visible)
    with show.bar:
        yield show
