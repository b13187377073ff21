"""The public path of the simulation of workers: `from hotloop.asynchronous.simulation import UniformTimes`."""

import sys

from hotloop.lowering.parameter_server.workers import simulation

_FORMER_NAMES = {
    "Steady": "SteadyTimes",
    "Uneven": "UniformTimes",
    "Exponential": "ExponentialTimes",
    "simulated": "simulate_training",
}
for former, name in _FORMER_NAMES.items():
    setattr(simulation, former, getattr(simulation, name))
sys.modules[f"{__name__}.simulation"] = simulation  # import reads sys.modules first
