"""What is planted in the scripts of this folder, by which words its remedy is known, and where it stands.

A script takes the variant as its first argument: `plant`; `other`, the same in other words or in another file; `clean`,
without it; `decoy`, which has the words but not the cost. Lines that cost end in `# plant` or `# other`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ELSEWHERE = FOLDER / "elsewhere.py"


@dataclass(frozen=True)
class Planted:
    """A bottleneck.

    Attributes:
        words: in the cause of the remedy that names it.
        light: variants that take next to no time on a CPU, so that a note is all they get.
        anywhere: whether any place will do, as for a setting that is felt everywhere.
        nothing: whether the script has nothing to name in any variant.
    """

    words: str
    light: frozenset[str] = frozenset()
    anywhere: bool = False
    nothing: bool = False

    def is_named(self, remedy: Mapping[str, object]) -> bool:
        return re.search(self.words, str(remedy["cause"])) is not None


BOTH = frozenset({"plant", "other"})

CASES = {
    "slow_samples": Planted("slow samples"),
    "item_each_step": Planted(r"\.item\(\)", BOTH),
    "copies_each_step": Planted("copy to the device|in the loop", frozenset({"plant"})),
    "pool_scatter": Planted("scatter by index"),
    "tiny_kernels": Planted("many tiny kernels"),
    "many_parameters": Planted("for-loop optimizer|update by hand"),
    "time_steps": Planted("Python loop .*time steps"),
    "pictures_each_step": Planted("logging|at each step|in the loop"),
    "retained_graph": Planted("retain_graph", BOTH),
    "loss_twice": Planted("double evaluation|evaluation at each step"),
    "double_precision": Planted("float64", anywhere=True),
    "too_many_threads": Planted("too many threads", anywhere=True),
    "kept_losses": Planted("growing list of losses", BOTH),
    "small_batch": Planted("too small a batch", anywhere=True),
    "metrics_each_step": Planted("metrics at each step"),
    "validating": Planted("evaluation at each step"),
    "collating": Planted("slow samples: collating the samples"),
    "large_blocks": Planted("memory is given back", anywhere=True),
    "layers_watched": Planted("no gradient reaches"),
    "several_lines": Planted("metrics at each step|in the loop"),
    "weights_read": Planted("loop over parameters"),
    "through_numpy": Planted("moved back and forth|in the loop"),
    "opened_each_step": Planted("opened anew"),
    "unused_gradients": Planted("unused gradients"),
    "repeated_forward": Planted("a repeated forward"),
    "shared_trunk": Planted("two backwards"),
    "graded_validation": Planted("evaluation at each step"),
    "forward_called": Planted("past its modules|outside of the network|plain Python|metrics", nothing=True),
    "checked_arguments": Planted("argument validation"),
    "cleared_unread": Planted("cleared before any optimizer reads"),
    "grown_buffer": Planted("copied as a whole|concatenated in the loop"),
    "classes_by_hand": Planted("number by number|plain Python in the loop|in the loop|many tiny kernels"),
    "transformed_samples": Planted("slow samples: they are loaded"),
    "update_by_hand": Planted("update by hand"),
}


def script(case: str) -> Path:
    return FOLDER / f"{case}.py"


def is_there(case: str, variant: str, where: str) -> bool:
    """Whether a place `file:line` is that of the plant: a marked line, or one of the same statement."""
    if CASES[case].anywhere:
        return bool(where)
    file, _, line = where.rpartition(":")
    path, mark = (script(case), variant) if Path(file).name != ELSEWHERE.name else (ELSEWHERE, f"{variant}: {case}")
    return Path(file).name == path.name and int(line) in set(_lines(path, mark))


def _lines(path: Path, mark: str) -> Iterator[int]:
    """The lines of the innermost statements that hold a mark; of a function, those before its body."""
    text = path.read_text(encoding="utf-8")
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    for number, line in enumerate(text.splitlines(), 1):
        if re.search(rf"# {mark}(?=  # |$)", line):
            around = [node for node in statements if node.lineno <= number <= (node.end_lineno or 0)]
            inner = max(around, key=lambda node: node.lineno)
            body = getattr(inner, "body", None)
            yield from range(inner.lineno, body[0].lineno if body else (inner.end_lineno or 0) + 1)
