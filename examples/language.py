"""A small language model: a step function, batches that are dicts, and one matrix used twice.

Run it:

    hotloop train examples/language.py
    hotloop train examples/language.py -p width=96
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotloop

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
# One letter of this text is one token.
TEXT = "".join(f"{WORDS[i]} and {WORDS[j]} make {WORDS[i + j]}. " for i in range(7) for j in range(7))
LETTERS = sorted(set(TEXT))
LENGTH = 48


class Letters(nn.Module):
    """A transformer that tells the next letter from those before it.

    The embedding and the last layer share one matrix, so the optimizer sees it, and checkpoints keep it, once.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), width)
        self.places = nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=2 * width, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2)
        self.out = nn.Linear(width, len(LETTERS), bias=False)
        self.out.weight = self.letters.weight
        nn.init.normal_(self.letters.weight, std=width**-0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        """Letters, int64 (batch, length) -> a score for each next letter, (batch, length, letters)."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.letters(tokens) + self.places(torch.arange(length, device=tokens.device))
        return self.out(self.layers(x, mask=mask, is_causal=True))


def step(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What one step computes. Beside the loss, further figures are averaged and reported."""
    scores = model(batch["tokens"])
    loss = F.cross_entropy(scores.flatten(0, 1), batch["next"].flatten())
    return {"loss": loss, "bits_per_letter": loss.detach() / torch.log(torch.tensor(2.0))}


def pieces() -> dict[str, Tensor]:
    """The text cut into overlapping pieces, int64 (pieces, LENGTH), and each letter's next one beside it."""
    text = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    windows = text.unfold(0, LENGTH + 1, 4)
    return {"tokens": windows[:, :-1].contiguous(), "next": windows[:, 1:].contiguous()}


def task(width: int = 48) -> hotloop.Task:
    """`width` is the size of a letter's vector."""
    return hotloop.Task(
        model=lambda: Letters(width),
        step=step,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=5e-3),
        data=pieces(),
        validation=0.1,
        batch_size=32,
        epochs=30,
        clip_norm=1.0,
    )
