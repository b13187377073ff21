"""Sequences of different lengths, which a function of one's own puts into batches.

Run it:

    hotloop train examples/lengths.py
"""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

import hotloop

Sample = tuple[Tensor, int]


def sequences(count: int = 600) -> list[Sample]:
    """Sequences of 3 to 20 numbers, each labelled with whether its numbers add up to more than zero."""
    draws = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 21, (count,), generator=draws).tolist()
    numbers = [torch.randn(length, 1, generator=draws) for length in lengths]
    return [(sequence, int(sequence.sum() > 0)) for sequence in numbers]


def together(samples: list[Sample]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Samples as one batch: `((padded, lengths), labels)`, where padded is (batch, longest, 1)."""
    numbers, labels = zip(*samples, strict=True)
    lengths = torch.tensor([len(sequence) for sequence in numbers])
    return (pad_sequence(numbers, batch_first=True), lengths), torch.tensor(labels)


class Reader(nn.Module):
    """A GRU that reads a sequence and then says which of two classes it is in."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.read = nn.GRU(1, width, batch_first=True)
        self.say = nn.Linear(width, 2)

    def forward(self, padded: Tensor, lengths: Tensor) -> Tensor:
        """Two inputs, since the first item of a batch is a pair -> class scores (batch, 2)."""
        packed = pack_padded_sequence(padded, lengths.cpu(), batch_first=True, enforce_sorted=False)
        _, last = self.read(packed)
        return self.say(last[0])


task = hotloop.Task(
    model=Reader,
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=5e-3),
    data=sequences(),
    collate=together,
    validation=100,
    batch_size=25,
    epochs=10,
)
