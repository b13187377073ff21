"""The public path of the parameter server: `from hotloop.parallel.server import StalenessPolicy`."""

import sys

from hotloop.lowering.parameter_server import server

server.Policy = server.StalenessPolicy  # type: ignore[attr-defined]  # the former name
sys.modules[f"{__name__}.server"] = server  # import reads sys.modules first
