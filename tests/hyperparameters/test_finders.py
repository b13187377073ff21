"""The finders from Python: a function, a picture, and a lack of memory that ends one process alone."""

from __future__ import annotations

from pathlib import Path

import pytest

import hotloop
from hotloop.errors import StudyError
from tests.support.tasks.studied_task import STUDIED


def make_task(text: str = STUDIED):
    names: dict = {}
    exec(text, names)
    return names["task"]


@pytest.mark.slow
def test_a_rate_is_found_and_confirmed_from_python(tmp_path: Path) -> None:
    page = tmp_path / "lr.html"
    found = hotloop.find_learning_rate(make_task(), {"width": 8}, page=page, progress=False)
    assert found.recommended is not None and found.last_loss < found.first_loss
    assert found.command == ""  # a function has no line
    assert page.stat().st_size > 1e6


LIMITED = (
    STUDIED.replace(
        "    def model():",
        """
    pages = int(open("/proc/self/statm").read().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 5 * 2**28,) * 2)

    class Large(nn.Module):
        def forward(self, x):
            return x + x.new_zeros(len(x), 2**16 if len(x) < 32 else 2**26)[:, :1]

    def model():""",
    )
    .replace("nn.Sequential(nn.Linear(4, width)", "nn.Sequential(Large(), nn.Linear(4, width)")
    .replace("network[0]", "network[1]")
    .replace("torch.randn(60, 4", "torch.randn(2000, 4")
)
"""Batches of 32 need 8 GB, which smaller batches don't show, of 1.3 GB."""


@pytest.mark.slow
def test_a_lack_of_memory_ends_the_search_alone() -> None:
    found = hotloop.find_batch_size(make_task(LIMITED), progress=False)
    assert found.largest == 16
    assert "memory" in found.limit
    assert [bool(one.error) for one in found.sizes] == [False] * (len(found.sizes) - 1) + [True]


def test_several_values_are_one_line() -> None:
    with pytest.raises(StudyError, match=r"lr = '0.1,1' for a finder"):
        hotloop.find_batch_size(make_task(), {"lr": "0.1,1"}, progress=False)
