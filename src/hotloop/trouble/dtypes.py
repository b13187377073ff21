"""What torch says when dtypes don't go together."""

from __future__ import annotations

import re

import torch

_SAID = re.compile(
    r"same dtype|expected scalar type|following scalar types|Found dtype|target dtype|result type \w+ can't be cast"
    r"|not implemented for '|Input type \(.+\) and (bias|weight) type|does not match weight dtype|class probabilities"
)
_NAMES = {
    "double": torch.float64,
    "float64": torch.float64,
    "float": torch.float32,
    "float32": torch.float32,
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "long": torch.int64,
    "int": torch.int32,
    "short": torch.int16,
    "byte": torch.uint8,
    "unsigned char": torch.uint8,
    "char": torch.int8,
    "bool": torch.bool,
}
_WORDS = re.compile(r"\b(unsigned char|" + "|".join(_NAMES) + r")(?:Tensor)?\b", re.IGNORECASE)


def is_mismatch(text: str) -> bool:
    """Whether `text` is torch's word for dtypes that don't go together."""
    return _SAID.search(text) is not None


def named_in(text: str) -> set[torch.dtype]:
    """The dtypes that such a text speaks of."""
    return {_NAMES[match[1].lower()] for match in _WORDS.finditer(text)}


def remedy(text: str, *, from_data: bool) -> str:
    """What to do about it, as a sentence that begins with a verb."""
    if "class probabilities" in text:
        return "give class numbers of shape (batch,), or float probabilities of shape (batch, classes)"
    if "target" in text or "can't be cast" in text:
        return "give classes as y.long(), and targets of other losses as y.float()"
    if re.search(r"(expected scalar type|scalar types:) Long", text):
        return "give indices and classes as int64, such as x.long()"
    if not from_data:
        return "make tensors with dtype=x.dtype in the model and the loss"
    return "give inputs and targets in the dtype of the parameters, such as x.float()"
