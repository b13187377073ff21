"""Two scripts by turns: only one of them runs at a time, and the same steps of both make a pair."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.script_pairs import Side, compare

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


@pytest.mark.parametrize(("steps", "pairs"), [("12", 3), ("2", 0)])
def test_windows_alternate_and_pair_the_same_steps(tmp_path: Path, steps: str, pairs: int) -> None:
    log, sides = tmp_path / "log", []
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(SCRIPT)
        sides.append(Side(tmp_path / f"{name}.py", [str(log), steps], tmp_path, name, updates=2, every=1))
    found = compare(sides[0], sides[1], limit_s=120)
    assert found["pairs"] == pairs
    assert all(side.process.returncode is not None for side in sides)
    if pairs:
        after = log.read_text().split()[-12:]  # the last two pairs
        assert [step[0] for step in after] in (list("bbbaaaaaabbb"), list("aaabbbbbbaaa"))
        assert [step[1:] for step in after[:3]] == [step[1:] for step in after[3:6]]
