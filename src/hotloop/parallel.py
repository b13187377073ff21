"""The public path of the parameter server: `from hotloop.parallel.server import Policy`."""

import sys

from hotloop.lowering.parameter_server import server

sys.modules[f"{__name__}.server"] = server  # importing a module looks here before it looks for a file
