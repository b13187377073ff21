"""Peers that compute nothing, and rows of their times as the bench against peers keeps them."""

from __future__ import annotations

from dataclasses import asdict

from bench.speed.lanes import OURS
from bench.speed.running import Marked

PEER = """
import os, sys, time
from bench.speed.job import main

kind = sys.argv[2]
at_once = {"spans": 3, "long spans": 60}.get(kind, 1)

def train(job):
    if kind == "never":
        time.sleep(600)
    for number in range(100_000 if job.marks.in_turns else 10):
        if kind == "breaks" and number == 3:
            raise ValueError("out of luck")
        if kind == "hangs" and number == 3:
            os.closerange(3, 64)
            time.sleep(600)
        time.sleep(1e-3)
        if not job.marks.step(at_once):
            break
    if kind == "lies":
        raise ValueError("not judged")
    return lambda: (0.5, 0.9)

main(train)
"""


def lanes(**seconds: float) -> dict[str, dict]:
    """Marked windows of eight rounds, all of one length, of a step that takes so many seconds."""
    made = {}
    for name, step_s in seconds.items():
        windows = [(10, 10 * step_s)] * 8
        marked = Marked(1.0, windows, 80, 10**9, 0.5, 0.9, plan="compile=step" if name == OURS else None)
        made[name] = asdict(marked)
    return made


def row(workload: str = "W4", **seconds: float) -> dict:
    return {"kind": "session", "workload": workload, "session": 0, "group": 0, "lanes": lanes(**seconds)}
