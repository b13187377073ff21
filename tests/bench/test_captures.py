"""The bench of networks whose steps are captured tells those that are from those that aren't, and why."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from bench import captures


class Seeing(nn.Module):
    """Images (B, 3, 64, 64) to ten classes; asks for a tensor's value where `asks` says so."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.asks = asks
        self.layers = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, captures.CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        if self.asks and x.mean() > 100:
            x = x / 2
        return self.layers(x)  # type: ignore[no-any-return]


def too_large() -> nn.Module:
    with torch.device("meta"):
        model = nn.Linear(20_000, 20_000)
        captures._check_size(model)
    return model


@pytest.mark.parametrize(
    ("make", "outcome", "why"),
    [
        (lambda: Seeing(asks=False), "captured", None),
        (lambda: Seeing(asks=True), "refused", "can't be captured as one graph"),
        (lambda: nn.Linear(5, 10), "eager", "shapes cannot be multiplied"),
        (too_large, "not tried", "400 million parameters"),
    ],
)
def test_each_outcome_is_told(make: Callable[[], nn.Module], outcome: str, why: str | None) -> None:
    row = captures.tried("timm", "one", make)
    assert row["outcome"] == outcome
    assert why is None or why in row["why"]
    text = captures.markdown([row])
    assert ("- one: " in text) == (outcome == "refused")
    assert ("1 of 1" in text) == (outcome == "captured")


def test_a_capture_that_fails_with_no_word_of_hotloops_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(captures, "_capture", fail)
    row = captures.tried("timm", "one", lambda: Seeing(asks=False))
    assert row["outcome"] == "failed" and "planted" in row["why"]
    assert "0 of 1" in captures.markdown([row])


def test_a_process_that_dies_takes_one_network_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five networks in two processes, of which that for the even ones dies at its second."""

    def told(family: str, part: str) -> list[captures.Row]:
        first, parts, begun = map(int, part.split("/"))
        names = [f"n{number}" for number in range(5)][first::parts][begun:]
        dies = {"family": family, "network": "n2", "outcome": "failed", "why": "its process died"}
        rows = [{"family": family, "network": name, "outcome": "captured", "why": ""} for name in names]
        return [*rows[: names.index("n2")], dies] if "n2" in names else rows

    monkeypatch.setattr(captures, "_told", told)
    found = captures.in_processes("timm", 2)
    assert [row["network"] for row in found] == ["n0", "n1", "n2", "n3", "n4"]
    assert [row["network"] for row in found if row["outcome"] == "failed"] == ["n2"]


def test_ctrl_c_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = captures.subprocess.CompletedProcess([], -2, stdout='{"network": "n0", "why": "its process died"}')
    monkeypatch.setattr(captures.subprocess, "run", lambda *given, **more: ended)
    with pytest.raises(KeyboardInterrupt):
        captures.in_processes("timm", 1)
