"""One session: all peers of a workload hold it in memory and train in turn, a window of steps each.

A B C, then C B A, and so on: a machine that grows slower meanwhile slows all alike. The windows of a round have the same
number of steps. The first rounds warm up and don't count; they say whether a window is long enough for peers that take
several steps at once. Who has done fewer steps in the end catches up outside the clock before the networks are judged. Each peer has an allowance of its own to start within; what it
leaves over goes to those that start after it, and then to windows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from bench.speed.running import Failed, Marked, Peer

Begin = Callable[[str], Peer]
"""Starts the process of the peer of that name."""

Tell = Callable[[str], None]

T = TypeVar("T")

WARMING = 2
LEAST = 3
"""Windows that are measured also where that overdraws the budget."""

_STARTING = 0.75
"""Share of the budget after which whoever hasn't done a step is left out, so that the others are measured."""

_START_S = 10.0
"""What a peer may take to start at the least, also where that comes off what those after it have."""

_CATCHING_UP = 2
"""Times that those behind catch up: the first time whoever takes several steps at once comes to stand before the others."""

_WINDOW_S = 10.0
_WINDOW_TIMES = 4
"""What a window may take at the least, and so many times what the last one's steps took, also where the time is over."""

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


def in_turns(
    names: Sequence[str],
    begin: Begin,
    session: Session,
    tell: Tell = lambda line: None,
) -> dict[str, Marked]:
    """What each peer reached, by name.

    Args:
        names: they start in this order; the first says how many steps a window has.
    """
    until = time.monotonic() + session.budget_s
    peers: dict[str, Peer] = {}
    found: dict[str, Marked] = {}
    try:
        steps = 0
        own_s = _STARTING * session.budget_s / len(names)
        for place, name in enumerate(names, 1):
            left_s = until - time.monotonic() - (1 - _STARTING) * session.budget_s
            limit_s = max(left_s - own_s * (len(names) - place), min(left_s, _START_S))
            if limit_s <= 0:
                found[name] = Marked(failure="no time left to start it")
                continue
            peer = peers[name] = begin(name)
            found[name] = peer.marked
            begun = _tried(name, peers, partial(_begun, peer, limit_s, steps, session, until))
            if begun is not None:
                tell(f"{name}: first step after {peer.marked.startup_s:.1f} s")
                steps = begun
        done = _rounds(peers, steps, session, until - _ENDING_S * len(peers))
        if peers and done < session.rounds:
            tell(f"{done} windows of each in place of {session.rounds}: no time left for more")
        _level(peers, until)
        for name, peer in list(peers.items()):
            _tried(name, peers, lambda peer=peer: peer.end(max(20.0, until - time.monotonic())))
    finally:
        for name, marked in found.items():
            if marked.failure:
                tell(f"{name}: {marked.failure}")
        for peer in peers.values():
            peer.close()
    return found


def _tried(name: str, peers: dict[str, Peer], act: Callable[[], T]) -> T | None:
    """What comes of it; a peer that failed leaves, and its figures say why."""
    try:
        return act()
    except Failed as error:
        peer = peers.pop(name)
        peer.marked.failure = str(error)
        peer.close()
        return None


def _begun(peer: Peer, limit_s: float, steps: int, session: Session, until: float) -> int:
    """Waits for its first step; how many steps a window has, which the first peer says."""
    peer.begin(limit_s)
    return steps or _steps_of(peer, session, until)


def _steps_of(peer: Peer, session: Session, until: float) -> int:
    """How many steps the first peer does in a window, by the faster of two, since either may be disturbed."""

    def faster(steps: int) -> tuple[int, float]:
        each = [peer.window(steps, until - time.monotonic()) for _ in range(2)]
        return min(each, key=lambda window: window[1] / window[0])

    steps, seconds = faster(1)
    while seconds < session.window_s / 4:
        steps, seconds = faster(4 * steps)
    return max(1, round(steps * session.window_s / seconds))


def _rounds(peers: dict[str, Peer], steps: int, session: Session, until: float) -> int:
    """How many rounds counted."""
    last = 0.0
    for number in range(WARMING + session.rounds):
        began = time.monotonic()
        if began + last > until and number >= WARMING + LEAST:
            return number - WARMING
        for name in list(peers)[:: -1 if number % 2 else 1]:
            _tried(name, peers, partial(_window, peers[name], steps, number, until))
        if number < WARMING:  # who can't stop within a window would run ahead in each of them
            steps = max([steps, *(peer.last[0] for peer in peers.values())])
        last = time.monotonic() - began
    return session.rounds


def _window(peer: Peer, steps: int, number: int, until: float) -> None:
    window = peer.window(steps, _limit_s(peer, steps, until))
    if number >= WARMING:
        peer.marked.windows.append(window)


def _limit_s(peer: Peer, steps: int, until: float) -> float:
    """What so many steps may take: where steps are long, the time may be over before the last one is."""
    last, seconds = peer.last
    return max(_WINDOW_S, _WINDOW_TIMES * seconds * steps / max(1, last), until - time.monotonic())


def _level(peers: dict[str, Peer], until: float) -> None:
    """Has those behind catch up, so that all networks are judged after the same steps."""
    for _ in range(_CATCHING_UP):
        most = max((peer.done for peer in peers.values()), default=0)
        for name, peer in list(peers.items()):
            if peer.done < most:
                _tried(name, peers, partial(peer.catch_up, most, _limit_s(peer, most - peer.done, until)))


def grouped(names: Sequence[str], together: int, ours: str) -> list[list[str]]:
    """Groups that fit into memory, their members in order; `ours`, which the others are compared with, is in each."""
    others = [name for name in names if name != ours]
    if len(names) <= together:
        return [list(names)]
    size = max(1, together - 1)
    members = [{ours, *others[at : at + size]} for at in range(0, len(others), size)]
    return [[name for name in names if name in group] for group in members]


def step_times(marked: Mapping[str, object]) -> list[float]:
    """Seconds of a step in each window of a row of the journal."""
    windows = marked["windows"]
    assert isinstance(windows, list)
    return [seconds / steps for steps, seconds in windows]
