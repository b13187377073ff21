"""The ratio of two steps with its interval, and the batch from which a GPU pays."""

from __future__ import annotations

import pytest

from hotloop.advisor.machines import Speedup, crossing_batches, pays_from

SIZES = len(crossing_batches())


def rising(first_probable: int, first_sure: int) -> list[Speedup]:
    """Returns ratios above 1 from one batch on, whose low ends are above 1 from another batch on."""
    return [
        Speedup(2.0 if size >= first_probable else 0.5, 1.5 if size >= first_sure else 0.4, 9.0)
        for size in crossing_batches()
    ]


def test_the_interval_of_a_ratio_has_both_intervals():
    wide = Speedup.of((10.0, 5.0, 20.0), (5.0, 2.5, 10.0))
    assert (wide.median, wide.low * wide.high) == (2.0, pytest.approx(4.0))
    assert wide.low == pytest.approx(2 * 2 ** -(2**0.5))
    assert Speedup.of((10.0, 10.0, 10.0), (5.0, 4.0, 8.0)).low == pytest.approx(10 / 8)
    assert Speedup.of((10.0, 10.0, 10.0), (5.0, 4.0, 8.0)).high == pytest.approx(10 / 4)


@pytest.mark.parametrize(
    ("probable", "sure", "words"),
    [
        (64, 512, "A GPU surely pays from batch 512 on, probably from 64 on"),
        (64, 64, "A GPU surely pays from batch 64 on"),
        (64, 10**6, "A GPU probably pays from batch 64 on, surely at no batch"),
        (10**6, 10**6, "A GPU probably pays at no batch up to 65,536"),
    ],
)
def test_the_batches_are_stated_by_median_and_by_low_end(probable, sure, words):
    found = [None if size > 65536 else size for size in (probable, sure)]
    assert pays_from(rising(probable, sure)) == (words, *found)


def test_a_batch_counts_only_if_all_larger_ones_pay_too():
    ratios = rising(64, 64)
    ratios[9] = Speedup(0.9, 0.5, 2.0)  # batch 512
    assert pays_from(ratios)[1:] == (1024, 1024)
    assert len(ratios) == SIZES


def test_beside_other_programs_no_gpu_pays_surely():
    assert pays_from(rising(64, 512), is_sure=False) == ("A GPU probably pays from batch 64 on", 64, None)
