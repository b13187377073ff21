"""A start of its own for each peer that searches or compiles, into its own cache: what that takes is shown apart."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bench.speed.caching import Filled, begun, note_filled
from bench.speed.running import Failed, Peer

Tell = Callable[[str], None]

LONGEST_S = 3600.0
"""Of a search, where the bench has no time limit of its own."""


def search(name: str, script: Sequence[str], folder: Path, limit_s: float | None, tell: Tell) -> str:
    """Starts a peer, and ends it after its first step; why that came to nothing, empty if it did not.

    Args:
        name: of workload and peer, for what is told.
        folder: its cache.
        limit_s: after which it is cut off; None for the longest that any may take.
    """
    limit_s = LONGEST_S if limit_s is None else limit_s
    environment, found_as = begun(folder)
    peer = Peer(script, environment)
    try:
        peer.begin(limit_s)
    except Failed as error:
        tell(f"{name}: its search came to nothing: {error}")
        return str(error)
    finally:
        peer.close()
    assert peer.marked.startup_s is not None
    for line in peer.marked.said:
        tell(f"{name}: {line}")
    note_filled(folder, Filled(peer.marked.startup_s, found_as, peer.marked.start_peak_bytes))
    tell(f"{name}: first step after {peer.marked.startup_s:.1f} s, {found_as}")
    return ""
