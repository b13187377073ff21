"""Probes of a CPU's operators, and predictions from them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from hotloop.advisor.rates import cpu_step_time
from hotloop.core.records.step_costs import CpuRates, OperatorCost, StepCosts
from hotloop.errors import HotloopError
from hotloop.profiler.step_costs import cpu_probe
from hotloop.profiler.step_costs.cpu_probe import PRODUCT_PROBES, TRAFFIC_PROBES
from hotloop.profiler.step_costs.trace import trace_step

RATES = CpuRates(
    {"aten.addmm/forward": (((1.0, 64.0, 64.0, 64.0), 1e9), ((1.0, 1024.0, 1024.0, 1024.0), 4e9))},
    {"aten.mul": (((1e3,), 1e-6), ((1e6,), 1e-4))},
    {"view": 1e-6, "node": 1e-6, "module": 1e-6, "parameter": 1e-6, "optimizer": 1e-5, "engine": 1e-5},
    1e-9,
    1e-10,
    2**25,
)
PRODUCT = OperatorCost("aten.addmm", "linear", "forward", 2 * 64**3, 0, 0, (1, 64, 64, 64))
TRAFFIC = OperatorCost("aten.sin", "elementwise", "forward", 0, 500_000, 500_000, (125_000,))


def costs_of(*operators: OperatorCost) -> StepCosts:
    return StepCosts(operators, 1, 0, 0, 0, 0, 0, 0, 0, 0)


def test_a_probed_product_takes_its_probed_time() -> None:
    assert cpu_step_time(costs_of(PRODUCT), RATES).products == pytest.approx(2 * 64**3 / 1e9, rel=0.05)
    twice = cpu_step_time(costs_of(replace(PRODUCT, count=2)), RATES).products
    assert twice == pytest.approx(2 * cpu_step_time(costs_of(PRODUCT), RATES).products)


def test_an_operator_without_probe_takes_the_time_of_its_kind() -> None:
    assert cpu_step_time(costs_of(TRAFFIC), RATES).traffic == pytest.approx(1e-4)
    larger = replace(TRAFFIC, read_bytes=1_500_000)
    assert cpu_step_time(costs_of(larger), RATES).traffic == pytest.approx(2e-4)


def test_new_pages_and_main_memory_add_time() -> None:
    small = replace(costs_of(TRAFFIC), activation_peak_bytes=10**6, largest_bytes=10**6, peak_bytes=2**20)
    large = replace(small, activation_peak_bytes=10**8, peak_bytes=2**28, parameter_bytes=10**7)
    assert cpu_step_time(small, RATES).memory == 0
    assert cpu_step_time(large, RATES).memory == pytest.approx(98e6 * 1e-9 + (1 - 2**-3) * 3e7 * 1e-10)


def test_rates_survive_json_and_wrong_ones_are_named() -> None:
    data = json.loads(json.dumps(RATES.to_dict()))
    assert CpuRates.from_dict(data) == RATES
    with pytest.raises(HotloopError, match="fault_s"):
        CpuRates.from_dict(data | {"fault_s": "slow"})


def test_probes_measure_what_a_prediction_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    few = [probe for probe in TRAFFIC_PROBES if probe.elements <= 200]
    monkeypatch.setattr(cpu_probe, "TRAFFIC_PROBES", few)
    monkeypatch.setattr(cpu_probe, "PRODUCT_PROBES", PRODUCT_PROBES[:3])
    monkeypatch.setattr(cpu_probe, "_FAULT_BYTES", 2**16)
    monkeypatch.setattr(cpu_probe, "_COLD_BYTES", 2**20)
    state = torch.get_rng_state()
    rates = cpu_probe.measure_cpu_rates(budget_s=0.0005)
    assert torch.equal(torch.get_rng_state(), state)
    assert {"aten.addmm/forward", "aten.mm/backward"} <= rates.products.keys()
    assert {"aten.relu", "aten.threshold_backward", "aten.lerp_"} <= rates.traffic.keys()
    batch = (torch.randn(4, 8), torch.zeros(4, dtype=torch.int64))
    time = cpu_step_time(trace_step(nn.Linear(8, 3), batch, loss=nn.CrossEntropyLoss()), rates)
    assert 0 < time.products < time.seconds


def test_a_probe_slower_than_a_larger_one_is_replaced() -> None:
    assert cpu_probe._increasing({10: 5.0, 20: 2.0, 40: 3.0}) == (((10.0,), 2.0), ((20.0,), 2.0), ((40.0,), 3.0))
