"""Two scripts by turns: only one of them runs at a time, and the same steps of both make a pair."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.script_pairs import WARM_UP, Side, compare, compare_switched

pytestmark = pytest.mark.more

SCRIPT = """
import sys
import torch
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(int(sys.argv[2])):
    with open(sys.argv[1], "a") as log:
        log.write(f"{__file__[-4]}{step} ")
    weight.sum().backward()
    optimizer.step()
"""


def test_windows_alternate_and_pair_the_same_steps(tmp_path: Path) -> None:
    log, sides = tmp_path / "log", []
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(SCRIPT)
        sides.append(Side(tmp_path / f"{name}.py", [str(log), "12"], tmp_path, name, updates=2, every=1))
    found = compare(sides[0], sides[1], limit_s=120)
    assert found["pairs"] == 3
    assert all(side.process.returncode is not None for side in sides)
    after = log.read_text().split()[-12:]  # the last two pairs
    assert [step[0] for step in after] in (list("bbbaaaaaabbb"), list("aaabbbbbbaaa"))
    assert [step[1:] for step in after[:3]] == [step[1:] for step in after[3:6]]


def test_a_switched_script_has_both_forms_in_each_pair(tmp_path: Path) -> None:
    log, script = tmp_path / "log", tmp_path / "a.py"
    script.write_text(SCRIPT.replace("{__file__[-4]}{step}", "{int(EDITED)}"))
    found = compare_switched(script, [str(log), "1000"], tmp_path, steps=4, every=1)
    assert found["pairs"] == 4
    forms = log.read_text().split()[1:]  # the first step ends before the first pair
    assert len(forms) == 2 * (4 + WARM_UP)
    assert all({first, second} == {"0", "1"} for first, second in zip(forms[::2], forms[1::2], strict=True))
