"""Machines compared by time, memory and cost; prices of the user."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hotloop.advisor.chips import find_chip, read_prices, shipped_prices
from hotloop.advisor.machines import CROSSING_BATCHES, Machine, Speedup, compare_machines, duration, pays_from
from hotloop.advisor.parallel_ways import at_batch
from hotloop.core.records.advice import MeasuredStep
from hotloop.errors import HotloopError
from tests.advisor.conftest import mlp_costs

HERE = Machine(find_chip("cpu 8 cores avx2 3 GHz"), name="this machine", is_here=True, memory_bytes=16e9)


def machines(*names: str) -> list[Machine]:
    return [HERE] + [Machine(find_chip(name)) for name in names]


def test_a_short_run_needs_no_other_machine():
    advice = compare_machines(mlp_costs(batch=8, width=64), machines("RTX 4090"), 1000)
    assert advice.stage == 1
    assert "this machine is enough" in advice.reason


def test_a_deadline_that_this_machine_misses_needs_a_gpu(costs):
    steps = 200_000
    advice = compare_machines(costs, machines("RTX 4090", "H100"), steps, deadline_s=12 * 3600)
    assert advice.stage == 2
    assert "RTX 4090" in advice.reason
    here, consumer, _ = advice.machines
    assert not here.meets and consumer.meets


def test_what_fits_no_consumer_gpu_takes_a_workstation_or_several():
    large = mlp_costs(batch=64, width=16384, layers=8)  # 34 GB of state
    advice = compare_machines(large, machines("RTX 4090", "A100"), 10_000)
    by_name = {row.chip: row for row in advice.machines}
    assert by_name["RTX 4090"].fits == "no"
    assert by_name["A100 SXM4 80GB"].fits == "fits"
    assert advice.stage == 3
    huge = mlp_costs(batch=64, width=16384, layers=64)  # 275 GB of state
    several = compare_machines(huge, [HERE, Machine(find_chip("A100")), Machine(find_chip("A100"), 8)], 10_000)
    assert several.stage == 4
    assert several.machines[-1].fits == "sharded"
    assert several.machines[1].fits == "no"


def test_accumulation_fits_a_batch_whose_activations_do_not():
    large = mlp_costs(batch=65536, width=4096, layers=8)
    row = compare_machines(large, machines("RTX 2060"), 100).machines[1]
    assert row.fits == "fits with accumulation"
    assert row.accumulation > 1
    assert row.memory_bytes < find_chip("RTX 2060").memory_bytes


def test_the_cheapest_and_the_fastest_are_marked(costs):
    prices = {"Tesla T4": 0.5, "H100 SXM5 80GB": 3.0}
    prices = {name: replace(shipped_prices()["Tesla T4"], chip=name, per_hour=value) for name, value in prices.items()}
    advice = compare_machines(
        costs, [Machine(find_chip(name)) for name in ("T4", "H100", "RTX 4090")], 100_000, prices=prices
    )
    rows = {row.chip: row for row in advice.machines}
    assert "fastest" in rows["H100 SXM5 80GB"].marks
    assert rows["RTX 4090"].cost is None
    cheapest = min((row for row in rows.values() if row.cost is not None), key=lambda row: row.cost)
    assert "cheapest" in cheapest.marks
    assert rows["Tesla T4"].cost == pytest.approx(rows["Tesla T4"].run_s / 3600 * 0.5)
    assert rows["Tesla T4"].cost_per_1000_steps == pytest.approx(rows["Tesla T4"].cost / 100)


def test_a_budget_leaves_out_machines_without_a_price(costs):
    advice = compare_machines(costs, machines("RTX 3080"), 100, budget=1.0)
    assert not advice.machines[1].meets
    assert advice.machines[0].meets and advice.machines[0].cost == 0


def rows_at(costs, batch, *names):
    """Returns the rows of a batch of another size: the CPU at hand first."""
    return compare_machines(at_batch(costs, batch), machines(*names), 100).machines


def test_a_gpu_pays_probably_by_the_median_and_surely_by_the_low_end():
    small = mlp_costs(batch=4, width=128)
    advice = compare_machines(small, machines("RTX 4090"), 100)
    probably, surely = advice.pays_from, advice.pays_surely_from
    assert 1 < probably < surely
    for batch, is_probable, is_sure in ((probably / 2, 0, 0), (probably, 1, 0), (surely / 2, 1, 0), (surely, 1, 1)):
        cpu, gpu = rows_at(small, batch, "RTX 4090")
        ratio = Speedup.of(*((row.step_ms, row.low_ms, row.high_ms) for row in (cpu, gpu)))
        assert (ratio.median > 1, ratio.low > 1) == (is_probable, is_sure)
    start = f"A GPU surely pays from batch {surely:,} on, probably from {probably:,} on; at your batch of 4 an RTX 4090 would be"
    assert advice.pays_sentence.startswith(start) and "\n" not in advice.pays_sentence


def test_the_sentence_has_the_speedup_at_the_users_batch_with_its_interval():
    advice = compare_machines(mlp_costs(batch=4, width=128), machines("RTX 4090"), 100)
    cpu, gpu = advice.machines
    median, low, high = map(
        float, re.search(r"be ([\d.]+) times .*\(([\d.]+) to ([\d.]+)\)", advice.pays_sentence).groups()
    )
    assert median == pytest.approx(cpu.step_ms / gpu.step_ms, rel=0.06)
    assert cpu.low_ms / gpu.high_ms < low < median < high < cpu.high_ms / gpu.low_ms


def test_a_gpu_that_pays_at_no_batch_is_so_stated():
    tiny = mlp_costs(batch=1, width=8, layers=1)
    huge_cpu = replace(HERE, measured=MeasuredStep(step_ms=1e-3, low_ms=1e-3, high_ms=1e-3))
    advice = compare_machines(tiny, [huge_cpu, Machine(find_chip("RTX 4090"))], 10)
    assert advice.pays_from is None and advice.pays_surely_from is None
    assert advice.pays_sentence.startswith(
        "A GPU probably pays at no batch up to 65,536; at your batch of 1 an RTX 4090"
    )


def test_a_measured_step_replaces_the_prediction(costs):
    measured = MeasuredStep(step_ms=50.0, low_ms=30.0, high_ms=90.0)
    row = compare_machines(costs, [replace(HERE, measured=measured)], 10).machines[0]
    assert (row.step_ms, row.low_ms, row.high_ms) == (50.0, 30.0, 90.0)
    assert sum(row.parts.values()) == pytest.approx(50.0)


def test_the_interval_of_a_measured_step_has_9_of_10_steps():
    uneven = MeasuredStep.from_times([10.0] * 50 + [20.0] * 50)
    assert (uneven.step_ms, uneven.low_ms, uneven.high_ms) == (15.0, 10.0, 20.0)
    with_outlier = MeasuredStep.from_times([10.0] * 99 + [1000.0])
    assert with_outlier.low_ms == 10.0 and with_outlier.high_ms == pytest.approx(1.05 * with_outlier.step_ms)
    even = MeasuredStep.from_times([10.0] * 3)
    assert (even.low_ms, even.high_ms) == pytest.approx((9.5, 10.5))


def test_durations_have_a_fitting_unit():
    assert [duration(value) for value in (1.5, 45, 600, 7200, 1e6)] == ["1.5 s", "45 s", "10 min", "2 h", "11.6 days"]


def test_the_packages_prices_name_known_chips_and_dates():
    for name, price in shipped_prices().items():
        assert find_chip(name).name == name
        assert 0.1 < price.per_hour < 20
        assert "(20" in price.source


@pytest.mark.parametrize("header", ["name,price per hour", "chip,price_per_hour", "\ufeffName,Price"])
def test_prices_are_read_from_csv(tmp_path, header):
    path = tmp_path / "mine.csv"
    path.write_text(f"{header}\nrtx4090,$0.40\nh100-sxm,2.5\n\n", encoding="utf-8")
    prices = read_prices(path)
    assert prices["RTX 4090"].per_hour == 0.4
    assert prices["H100 SXM5 80GB"].source == "mine.csv"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "columns none"),
        ("name\nT4\n", "columns name"),
        ("name,price\n", "no rows"),
        ("name,price\nT5000,1\n", "line 2: unknown chip"),
        ("name,price\nT4,cheap\n", "line 2: price 'cheap'"),
        ("name,price\nT4,-1\n", "line 2: price '-1'"),
        ("name,price\nT4,nan\n", "line 2: price 'nan'"),
        ("name,price\nT4\n", "line 2: price ''"),
    ],
)
def test_wrong_prices_are_errors_of_one_line(tmp_path, text, message):
    path = tmp_path / "prices.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(HotloopError, match=message) as caught:
        read_prices(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_an_error_of_one_line(tmp_path):
    with pytest.raises(HotloopError, match=r"none\.csv"):
        read_prices(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(HotloopError, match="UTF-8"):
        read_prices(tmp_path / "binary.csv")


SIZES = len(CROSSING_BATCHES)


def rising(first_probable: int, first_sure: int) -> list[Speedup]:
    """Returns ratios above 1 from one batch on, whose low ends are above 1 from another batch on."""
    return [
        Speedup(2.0 if size >= first_probable else 0.5, 1.5 if size >= first_sure else 0.4, 9.0)
        for size in CROSSING_BATCHES
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
