"""The figures of a bench as one small table, put between two comments of a Markdown file such as the project's README."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bench.speed.lanes import TUTORIAL
from bench.speed.summary import Line, Summary
from bench.speed.table import ratio_text, rows
from bench.speed.workloads import WORKLOADS
from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.format import format_milliseconds
from hotloop.errors import HotloopError

BEGIN, END = "<!-- figures of make bench -->", "<!-- end of the figures -->"

HEAD = ("network", "hotloop", "PyTorch tutorial's loop", "Lightning", "fastest other library")

_TITLES = {
    TUTORIAL: "tutorial's loop",
    "lightning": "Lightning",
    "accelerate": "Accelerate",
    "jax-scan": "JAX",
    "jax-step": "JAX",
    "keras-jax": "Keras on JAX",
    "keras-torch": "Keras on PyTorch",
}
"""Peers whose name isn't that of their library."""


def put_between(path: Path, text: str) -> None:
    """Replaces what stands between the two comments.

    Raises:
        HotloopError: they aren't there, each once and in order.
    """
    try:
        before, rest = path.read_text(encoding="utf-8").split(BEGIN)
        _, after = rest.split(END)
    except (OSError, ValueError) as error:
        raise HotloopError(
            f"{path} has no place for the figures",
            expected=f"a file with {BEGIN} and {END}, once",
            fix="add both lines",
        ) from error
    write_atomic(path, f"{before}{BEGIN}\n{text}\n{END}{after}")


def overview(found: Summary, where: str) -> str:
    """Returns a row for each workload that hotloop was measured on.

    Args:
        where: device, machine and threads of the measurement.
    """
    caption = (
        f"The time of a training step under the plan of `tune`, on {where}, and how many times as long a step of the others takes, "
        "with 95 % intervals. Below 1 the other is faster."
    )
    return "\n".join([caption, "", *rows(HEAD, list(_cells(found)))])


def _cells(found: Summary) -> Iterator[list[str]]:
    for workload in found.lines:
        own, best = found.line(workload, found.ours), found.best_peer(workload)
        if own is not None and own.step_ms is not None:
            others = [_times(found.line(workload, name)) for name in (TUTORIAL, "lightning")]
            fastest = f"{_TITLES.get(best.name, best.name)}, {_times(best)}" if best is not None else ""
            yield [f"{workload} {WORKLOADS[workload].title}", format_milliseconds(own.step_ms), *others, fastest]


def _times(line: Line | None) -> str:
    return ratio_text(line.ratio) if line is not None and line.ratio is not None else "not run"
