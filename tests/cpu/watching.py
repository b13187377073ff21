"""Runs a loop in this process under a watch, without a process of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hotloop.profiles import Profile
from hotloop.profiling.compose import profile_of
from hotloop.profiling.protocols import Observer
from hotloop.profiling.sites import Sites
from hotloop.profiling.watcher import Watch


def watched(
    loop: Callable[[], Any], *, steps: int | None = 24, observers: Callable[[Watch], list[Observer]] | None = None
) -> Profile:
    """What a watch says of a loop; modules, operators and lines are left out unless observers are given."""
    watch = Watch(steps, Sites(), lambda facts: None, observers or (lambda watch: []))
    watch.install()
    try:
        loop()
    finally:
        watch.close()
        watch.remove()
    assert not [note for note in watch.facts.notes if "own" in note], watch.facts.notes
    return profile_of(watch.facts, "loop")
