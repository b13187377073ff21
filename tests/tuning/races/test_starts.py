"""Times of several races on one clock, where the machine's load may have changed between them."""

from __future__ import annotations

import pytest

from hotloop.core.records.race import Timing
from hotloop.tuning.races.starts import rebase_timings


def timed(name: str, step_ms: float, ratio: float) -> Timing:
    spread = {"ratio_low": 0.9 * ratio, "ratio_high": 1.1 * ratio}
    return Timing(
        name=name, plan={}, step_ms=step_ms, samples_per_s=1e3 / step_ms, ratio=ratio, startup_s=1.0, **spread
    )


def moved(timing: Timing, base_ms: float) -> Timing:
    """As it is beside the baseline of a later race."""
    timings = {one.name: one for one in (timed("baseline", base_ms, 1.0), timing)}
    return rebase_timings(timings, "baseline", 1000)[timing.name]


@pytest.mark.parametrize("base_ms", [0.8, 1.0, 1.2])
def test_beside_a_like_load_the_ratio_stays(base_ms: float) -> None:
    found = moved(timed("fused", 0.5, 2.0), base_ms)
    assert found.ratio == pytest.approx(2.0) and found.step_ms == pytest.approx(base_ms / 2)
    assert found.run_s == pytest.approx(1.0 + base_ms / 2)


def test_what_won_beside_a_crowded_baseline_took_no_less_than_it_did() -> None:
    """As one thread does where another program has the other core, which the baseline's two wait for."""
    found = moved(timed("threads=1", 0.2, 109.0), 1.0)
    assert found.step_ms == pytest.approx(0.2) and found.ratio == pytest.approx(5.0)
    assert found.ratio_low == pytest.approx(4.5) and found.run_s == pytest.approx(1.2)
    assert moved(found, 1.1).ratio == pytest.approx(5.0)


def test_where_the_load_has_grown_it_is_taken_to_slow_all_alike() -> None:
    found = moved(timed("fused", 0.5, 2.0), 10.0)
    assert found.step_ms == pytest.approx(5.0) and found.ratio == pytest.approx(2.0)
