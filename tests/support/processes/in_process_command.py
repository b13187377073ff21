"""Runs the command line in this process, where torch is imported already, its two streams apart."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hotloop.cli import main

SMALL = """
import torch
from torch import nn
import hotloop

X = torch.randn(20, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(20) % 3


def make(**fields):
    given = dict(
        model=lambda: nn.Linear(4, 3),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, weight_decay=1e-4),
        data=(X, Y),
        batch_size=5,
    )
    return hotloop.Task(**(given | fields))


"""
"""The beginning of a Task's file: 20 samples of 4 numbers in 3 classes, and a Task of them to be changed."""


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The one JSON document on stdout; more or less than that is an error."""
        return json.loads(self.out)


Hotloop = Callable[..., Done]


@contextmanager
def commands(folder: Path, patch: pytest.MonkeyPatch, capture: Any) -> Iterator[Hotloop]:
    """Gives `run(*args) -> Done`, working in `folder`; what Tasks import is forgotten at the end."""
    patch.chdir(folder)
    # Whether TensorBoard is installed changes what is printed, and has its own tests.
    patch.setattr("hotloop.training.tensorboard.is_installed", lambda: False)
    patch.setattr(sys, "path", list(sys.path))
    patch.setattr(sys, "meta_path", list(sys.meta_path))
    known = dict(sys.modules)

    def run(*args: object) -> Done:
        patch.setattr(sys, "argv", ["hotloop", *map(str, args)])
        capture.readouterr()
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(SystemExit) as end:
            main()
        signal.signal(signal.SIGINT, before)  # an interrupted command ignores it for its last moments
        out, err = capture.readouterr()
        return Done(int(end.value.code or 0), out, err)

    yield run
    for name, module in list(sys.modules.items()):
        if name not in known and str(getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]
