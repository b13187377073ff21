"""A data set of Hugging Face datasets, used as it is.

Run it:

    pip install datasets
    hotloop train examples/with_datasets.py

One from their hub is used in the same way: `data=datasets.load_dataset("imdb", split="train").map(tokens)`.
"""

import itertools
from typing import Any

import datasets
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import hotloop

GOOD, BAD = ["lovely", "clever", "warm", "bright"], ["dull", "clumsy", "cold", "endless"]
THINGS, LINKS = ["story", "music", "acting", "ending"], ["and", "but also", "yet"]


def reviews() -> datasets.Dataset:
    """Made-up reviews with the columns `text` and `label`: 1 for praise, 0 for the opposite."""
    rows = [
        {"text": f"a {first} {thing} {link} {second}", "label": label}
        for label, words in enumerate((BAD, GOOD))
        for first, thing, link, second in itertools.product(words, THINGS, LINKS, words)
    ]
    return datasets.Dataset.from_list(rows)


def tokens(row: dict[str, Any]) -> dict[str, Any]:
    """The letters of a text as numbers from 1 to 27, a column of lists of different lengths."""
    return {"tokens": [ord(letter) - ord("`") if letter != " " else 27 for letter in row["text"]]}


def together(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Rows as a batch. Numbers and lists of them come as tensors, unless the data set has a format of its own."""
    return {
        "tokens": pad_sequence([row["tokens"] for row in rows], batch_first=True),
        "label": torch.stack([row["label"] for row in rows]),
    }


class Reader(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.letters = nn.Embedding(28, width, padding_idx=0)
        self.three_letters = nn.Conv1d(width, width, 3, padding=1)
        self.say = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """Letters (batch, length) -> class scores (batch, 2)."""
        seen = self.three_letters(self.letters(tokens).transpose(1, 2))
        return self.say(seen.relu().amax(dim=2))


def step(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    scores = model(batch["tokens"])
    right = (scores.argmax(1) == batch["label"]).float().mean()
    return {"loss": F.cross_entropy(scores, batch["label"]), "accuracy": right}


task = hotloop.Task(
    model=Reader,
    step=step,
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
    data=reviews().map(tokens),
    collate=together,
    validation=0.2,
    epochs=8,
    monitor="validation_accuracy",
)
