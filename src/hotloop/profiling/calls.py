"""What the loop itself calls in a step: which networks, how often, and between which backwards."""

from __future__ import annotations

_MOST = 4
"""Of one network in a step, on average, if what it is given counts as samples."""


class Calls:
    """Of the step that is on; networks are known by their id."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._called: list[int] = []
        self._since: set[int] = set()
        self._trained: set[int] = set()
        self._accumulates = False

    def called(self, network: int) -> bool:
        """A network is called; whether it was the last one that was called before."""
        again = bool(self._called) and self._called[-1] == network
        self._called.append(network)
        self._since.add(network)
        return again

    def backward(self) -> None:
        """A backward begins, of what was called since the one before."""
        self._accumulates |= not self._trained.isdisjoint(self._since)
        self._trained |= self._since
        self._since = set()

    @property
    def none(self) -> bool:
        return not self._called

    @property
    def tells_samples(self) -> bool:
        """Whether a network is given all samples of the step at a time; else nobody knows what one sample is."""
        return not self._accumulates and len(self._called) <= _MOST * max(1, len(set(self._called)))
