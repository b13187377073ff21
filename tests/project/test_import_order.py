"""A file imports only what stands before it, so the project can be read from top to bottom.

The order is `ORDER`, here and nowhere else. Source is read, not run: imports inside functions and under
`if TYPE_CHECKING` count as well. Each rule is also shown to catch its own breach, planted in a copy.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.source_tree import Tree

SRC = Path(__file__).parents[2] / "src" / "hotloop"

# `folder/*` stands for the files of a folder, in any order without cycles; not for those of folders in it.
ORDER = (
    "errors",
    "margins",
    "plan",
    "core/processes/*",
    "core/records/*",
    "core/*",
    "core/feasibility/*",
    "core/files/*",
    "core/hardware/*",
    "core/random/*",
    "core/task_parts/*",
    "scripts/*",
    "scripts/inject/*",
    "arrays/*",
    "report/*",
    "report/regression/*",
    "data/downloads/*",
    "data/bundle",
    "data/readers/*",
    "data/*",
    "data/feeds/*",
    "task_checks",
    "task",
    "task_file",
    "distributed/*",
    "distributed/ray/*",
    "distributed/wrappers/*",
    "lowering/grouped_mm",
    "lowering/product_counts",
    "lowering/step_generators",
    "lowering/training_mode",
    "lowering/losses/*",
    "lowering/object_state/*",
    "lowering/context",
    "lowering/rewrites/*",
    "lowering/transforms/*",
    "lowering/checks/*",
    "lowering/eager_step",
    "lowering/batch_cursor",
    "lowering/program",
    "lowering/evaluation",
    "lowering/training_accuracy",
    "lowering/task_facts",
    "lowering/arrays_engine/*",
    "lowering/compile/compiled_rng",
    "lowering/compile/inductor_patches/*",
    "lowering/compile/*",
    "lowering/failures/*",
    "lowering/parameter_server/*",
    "lowering/steps/*",
    "lowering/pipeline/*",
    "lowering/build",
    "lowering/parameter_server/workers/*",
    "parity/*",
    "explainer/layers/*",
    "explainer/*",
    "tuning/run_context",
    "tuning/contenders",
    "tuning/rules",
    "tuning/cuda_rules",
    "tuning/races/*",
    "tuning/search/*",
    "tuning/auto/*",
    "tuning/live/*",
    "tuning/check",
    "tuning/race",
    "tuning/tune",
    "profiler/busy_machine",
    "profiler/phase_refinement",
    "profiler/base/*",
    "profiler/compile_race",
    "profiler/costs/*",
    "profiler/step_costs/*",
    "profiler/detectors/*",
    "profiler/hooks/*",
    "profiler/autograd/*",
    "profiler/child_processes",
    "profiler/timers/*",
    "profiler/trace/*",
    "profiler/session/*",
    "profiler/array_layers",
    "profiler/rank_profiles",
    "profiler/script_child",
    "profiler/summary",
    "profiler/model_summary",
    "profiler/script",
    "profiler/task_profile",
    "profiler/profile",
    "exchanges/windows/*",
    "exchanges/call_race",
    "exchanges/part",
    "exchanges/options/*",
    "exchanges/modules/*",
    "exchanges/workers/dataset_watch",
    "exchanges/sample_table",
    "exchanges/workers/*",
    "exchanges/*",
    "advisor/*",
    "hardware_advice/*",
    "training/loggers/*",
    "training/cadence",
    "training/checkpoint_schema",
    "training/checkpoint",
    "training/early_stopping",
    "training/gradient_norm",
    "training/monitor",
    "training/run",
    "training/resume",
    "training/repeated_steps",
    "training/rehearsal",
    "training/loop",
    "training/rehearsal_process",
    "training/live/*",
    "training/*",
    "inference/*",
    "hyperparameters/trial_processes",
    "hyperparameters/ray/*",
    "hyperparameters/*",
    "hyperparameters/finders/*",
    "hyperparameters/packs/*",
    "view",
    "asynchronous",
    "parallel",
    "api",
    "cli/*",
)

# These tie the project together: they may import anything, and nothing may import them.
WIRING = ("__init__", "__main__")

# Importing these, and so all that they import at once, must not import torch.
TORCH_FREE = (
    "__init__",
    "__main__",
    "errors",
    "margins",
    "plan",
    "core/terminal",
    "core/number_formats",
    "core/plan_request",
    "core/records/",
    "core/feasibility/",
    "arrays/",
    "tuning/contenders",
    "tuning/rules",
    "scripts/",
    "profiler/costs/",
    "profiler/detectors/",
    "advisor/",
    "training/cadence",
    "report/",
    "hyperparameters/study",  # its processes import torch at the same time
    "cli/",
)

MAX_LINES = 900


def place(key: str) -> int | None:
    """Where a file stands in ORDER; None when nowhere."""
    folder = key.rpartition("/")[0]
    return next((index for index, entry in enumerate(ORDER) if entry in (key, f"{folder}/*")), None)


def out_of_order(tree: Tree) -> Iterator[str]:
    """Files without a place, and imports of what doesn't stand before the importing file."""
    for key in sorted(set(tree.paths) - set(WIRING)):
        here = place(key)
        if here is None and key.endswith("/__init__") and not any(tree.targets(key)):
            continue  # it says what the package is for, and nothing else
        if here is None:
            yield f"{key}.py has no place in ORDER"
            continue
        for line, target in tree.targets(key):
            there = place(target)
            same_folder = here == there and ORDER[here].endswith("/*")
            if there is None or (there >= here and not same_folder):
                yield f"{key}.py:{line} imports {target}, which doesn't stand before it"


def cycles(tree: Tree) -> Iterator[str]:
    """A circle of imports, if there is one."""
    try:
        TopologicalSorter({key: {to for _, to in tree.targets(key)} for key in tree.paths}).prepare()
    except CycleError as error:
        yield f"imports in a circle: {' <- '.join(error.args[1])}"


def imports_of_torch(tree: Tree) -> Iterator[str]:
    """Torch-free files that import torch at once, themselves or through others."""
    for start in sorted(tree.paths):
        if not any(start == entry or (entry.endswith("/") and start.startswith(entry)) for entry in TORCH_FREE):
            continue
        reached = [start]
        for key in reached:  # grows while it is read
            if any(found.at_once and found.module.split(".")[0] == "torch" for found in tree.imports[key]):
                yield f"{start}.py imports torch through {key}.py"
            packages = [f"{parent}/__init__" for parent in _parents(key)]
            reads = [*packages, *(target for _, target in tree.targets(key, at_once=True))]
            reached += [read for read in dict.fromkeys(reads) if read in tree.paths and read not in reached]


def _parents(key: str) -> list[str]:
    parts = key.split("/")[:-1]
    return ["/".join(parts[: n + 1]) for n in range(len(parts))]


def misshapen(tree: Tree) -> Iterator[str]:
    """Files that are too long, and names that say nothing."""
    for key, path in sorted(tree.paths.items()):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_LINES:
            yield f"{key}.py has {lines} lines, more than {MAX_LINES}"
        if {"util", "utils"} & set(key.split("/")):
            yield f"{key}.py: a name such as utils doesn't say what is inside"


RULES = (out_of_order, cycles, imports_of_torch, misshapen)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_source_keeps_the_rule(rule) -> None:
    tree = Tree(SRC)
    assert "errors" in tree.paths, f"nothing to check in {SRC}"
    assert list(rule(tree)) == []


def test_every_entry_of_the_order_exists() -> None:
    tree = Tree(SRC)
    empty = sorted({*range(len(ORDER))} - {place(key) for key in tree.paths})
    assert empty == []


BREACHES = {
    "absolute": (out_of_order, "errors.py", "import hotloop.plan"),
    "absolute, from": (out_of_order, "errors.py", "from hotloop.plan import Plan"),
    "relative": (out_of_order, "errors.py", "from .plan import Plan"),
    "relative, of a module": (out_of_order, "errors.py", "from . import plan"),
    "relative, from a folder below": (out_of_order, "data/order.py", "from ..cli import options"),
    "in a function": (out_of_order, "errors.py", "def late():\n    from hotloop.plan import Plan"),
    "in a nested function": (
        out_of_order,
        "errors.py",
        "class A:\n    async def late(self):\n        def later():\n            import hotloop.plan",
    ),
    "in an if of a function": (
        out_of_order,
        "errors.py",
        "def late():\n    if 1:\n        import hotloop.plan",
    ),
    "for types only": (
        out_of_order,
        "errors.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from hotloop.plan import Plan",
    ),
    "by name": (out_of_order, "errors.py", "import importlib\nimportlib.import_module('hotloop.plan')"),
    "through the package": (out_of_order, "plan.py", "from hotloop import fit"),
    "of what isn't there": (out_of_order, "plan.py", "import hotloop.nowhere"),
    "within a folder": (out_of_order, "data/order.py", "import hotloop.data.feeds.feed"),
    "new file": (out_of_order, "stray.py", ""),
    "new file in a folder": (out_of_order, "lowering/stray.py", ""),
    "circle": (cycles, "lower/first.py", "from hotloop.lower import second"),
    "torch": (imports_of_torch, "errors.py", "import torch.nn as nn"),
    "torch, from": (
        imports_of_torch,
        "plan.py",
        "try:\n    from torch import nn\nexcept ImportError:\n    pass",
    ),
    "torch, through another": (imports_of_torch, "cli/options.py", "import hotloop.core.random.rng"),
    "too long": (misshapen, "errors.py", "\n" * MAX_LINES + "x = 1"),
    "utils": (misshapen, "data/utils.py", ""),
    "utils folder": (misshapen, "utils/text.py", ""),
}


@pytest.mark.few("absolute*", "relative", "by name", "in a nested function", "new file in a folder")
@pytest.mark.parametrize("breach", BREACHES)
def test_a_planted_breach_is_caught(breach: str, tmp_path: Path) -> None:
    rule, file, code = BREACHES[breach]
    root = tmp_path / "hotloop"
    shutil.copytree(SRC, root, ignore=shutil.ignore_patterns("__pycache__"))
    _append(root / "lower/first.py")
    _append(root / "lower/second.py", "import hotloop.lower.first")
    before = set(rule(Tree(root)))
    _append(root / file, code)
    assert set(rule(Tree(root))) - before


ALLOWED = {
    "what stands before": ("plan.py", "from .errors import PlanError\nimport hotloop.errors"),
    "the version": (
        "errors.py",
        "def version():\n    from hotloop import __version__\n    return __version__",
    ),
    "torch inside a function": ("cli/options.py", "def late():\n    import torch"),
    "torch for types only": (
        "errors.py",
        "import typing\nif typing.TYPE_CHECKING:\n    from torch import Tensor",
    ),
    "other libraries": ("errors.py", "import hotloopless\nfrom torchless import x"),
}


@pytest.mark.few("what stands before", "torch inside a function")
@pytest.mark.parametrize("case", ALLOWED)
def test_what_is_allowed_is_not_caught(case: str, tmp_path: Path) -> None:
    file, code = ALLOWED[case]
    root = tmp_path / "hotloop"
    shutil.copytree(SRC, root, ignore=shutil.ignore_patterns("__pycache__"))
    before = {problem for rule in RULES for problem in rule(Tree(root))}
    _append(root / file, code)
    assert {problem for rule in RULES for problem in rule(Tree(root))} <= before


def _append(path: Path, code: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"\n{code}\n")
