"""One session: all peers of a workload hold it in memory and train in turn, a window of steps each.

A B C, then C B A, and so on: a machine that grows slower meanwhile slows all alike. The windows of a round have the same
number of steps. The first rounds warm up and don't count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.speed.running import Failed, Marked, Peer

Begin = Callable[[str], Peer]
"""Starts the process of the peer of that name."""

Tell = Callable[[str], None]

WARMING = 2
_STARTING = 0.75
"""Share of the budget after which whoever hasn't done a step is left out, so that the others are measured."""

_ENDING_S = 2.0
"""What a peer may take to judge its network."""


@dataclass(frozen=True)
class Session:
    """How long to measure.

    Attributes:
        budget_s: for everything.
        rounds: at most.
        window_s: of the first peer.
    """

    budget_s: float
    rounds: int = 12
    window_s: float = 0.4


def in_turns(names: Sequence[str], begin: Begin, session: Session, tell: Tell = lambda line: None) -> dict[str, Marked]:
    """What each peer reached, by name; the first of them says how many steps a window has."""
    until = time.monotonic() + session.budget_s
    peers: dict[str, Peer] = {}
    found: dict[str, Marked] = {}
    try:
        steps = 0
        for name in names:
            limit_s = until - time.monotonic() - (1 - _STARTING) * session.budget_s
            if limit_s <= 0:
                found[name] = Marked(failure="no time left to start it")
                continue
            peer = peers[name] = begin(name)
            found[name] = peer.marked
            if _tried(name, peers, lambda peer=peer, limit_s=limit_s: peer.begin(limit_s)):
                tell(f"{name}: first step after {peer.marked.startup_s:.1f} s")
                steps = steps or _steps_of(peer, session, until)
        _rounds(peers, steps, session, until - _ENDING_S * len(peers))
        for name, peer in list(peers.items()):
            _tried(name, peers, lambda peer=peer: peer.end(max(20.0, until - time.monotonic())))
    finally:
        for name, marked in found.items():
            if marked.failure:
                tell(f"{name}: {marked.failure}")
        for peer in peers.values():
            peer.close()
    return found


def _tried(name: str, peers: dict[str, Peer], act: Callable[[], None]) -> bool:
    """Whether that worked; a peer that failed leaves, and its figures say why."""
    try:
        act()
    except Failed as error:
        peer = peers.pop(name)
        peer.marked.failure = str(error)
        peer.close()
        return False
    return True


def _steps_of(peer: Peer, session: Session, until: float) -> int:
    """How many steps the first peer does in a window."""
    steps, seconds = peer.window(1, until - time.monotonic())
    while seconds < session.window_s / 4:
        steps, seconds = peer.window(4 * steps, until - time.monotonic())
    return max(1, round(steps * session.window_s / seconds))


def _rounds(peers: dict[str, Peer], steps: int, session: Session, until: float) -> None:
    last = 0.0
    for number in range(WARMING + session.rounds):
        began = time.monotonic()
        if began + last > until and number > WARMING:
            return
        for name in list(peers)[:: -1 if number % 2 else 1]:
            _tried(name, peers, lambda name=name, number=number: _window(peers[name], steps, number, until))
        last = time.monotonic() - began


def _window(peer: Peer, steps: int, number: int, until: float) -> None:
    window = peer.window(steps, max(10.0, until - time.monotonic()))
    if number >= WARMING:
        peer.marked.windows.append(window)


def grouped(names: Sequence[str], together: int, first: str) -> list[list[str]]:
    """Groups that fit into memory; `first`, which the others are compared with, is in each, early, for it may compile."""
    others = [name for name in names if name != first]
    if len(names) <= together:
        return [list(names)]
    size = max(1, together - 1)
    return [[others[at], first, *others[at + 1 : at + size]] for at in range(0, len(others), size)]


def step_times(marked: Mapping[str, object]) -> list[float]:
    """Seconds of a step in each window of a row of the journal."""
    windows = marked["windows"]
    assert isinstance(windows, list)
    return [seconds / steps for steps, seconds in windows]
