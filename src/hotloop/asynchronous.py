"""The public path of the simulation of workers: `from hotloop.asynchronous.simulation import Uneven, simulated`."""

import sys

from hotloop.lowering.parameter_server.workers import simulation

sys.modules[f"{__name__}.simulation"] = simulation  # importing a module looks here before it looks for a file
