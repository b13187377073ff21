"""What a server and its workers say to each other, whatever carries it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from hotloop.errors import HotloopError
from hotloop.parallel.ledger import Work
from hotloop.parallel.server import Weights


@dataclass(frozen=True)
class Gradient:
    """What a worker made of a batch; all tensors on the CPU.

    Attributes:
        loss: 0-dim.
        scalars: further ones that the Task's step gave, 0-dim.
        weight: what the loss counts: a number, or a 0-dim tensor.
        gradients: of each parameter, in the model's order; None where it has none.
        buffers: of the model after the forward pass, in its order.
    """

    work: Work
    samples: int
    loss: Tensor
    weight: Any
    gradients: list[Tensor | None]
    buffers: list[Tensor] = field(default_factory=list)
    scalars: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Ready:
    """The worker waits for its first batch, or for its first one after it came back."""


@dataclass(frozen=True)
class Lost:
    """The worker died; `why` goes on from its name: `was killed by SIGKILL`."""

    why: str


Answer = Ready | Gradient | Lost | HotloopError
"""An error is what kept the worker from computing its batch: it ends the training."""


Look = Callable[[], None]


def nothing() -> None:
    """Looks at nothing."""


class Crew(Protocol):
    """Workers, by number from 0; each computes one batch at a time."""

    def give(self, worker: int, work: Work, weights: Weights) -> None:
        """Hands out a batch to a worker that is ready or has answered; does not wait."""

    def receive(self, look: Look = nothing) -> tuple[int, Answer]:
        """Waits for the next answer, and says whose it is.

        Args:
            look: called now and then while none comes; what it raises ends the wait.

        Raises:
            TrainingError: all workers are gone.
        """

    def close(self) -> None:
        """Ends the workers, whatever they are doing."""
