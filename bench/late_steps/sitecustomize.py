"""Measures the CPU time between the updates of a script's optimizers; Python imports this file at its start.

The environment variable LATE_STEPS names a folder. Each process with updates writes a file: the number of updates, and the CPU
seconds of an update in the last third of them, without the slowest and the fastest tenth.
"""

import atexit
import importlib.util
import itertools
import json
import os
import sys
import time

_TIMES = []
_PROCESS = os.getpid()


class _Optimizers:
    """Registers a hook after the import of torch's optimizers."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch.optim.optimizer":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_register(module):
            execute(module)
            module.register_optimizer_step_post_hook(lambda *_: _TIMES.append(time.process_time()))

        spec.loader.exec_module = execute_and_register
        return spec


def _write():
    late = _TIMES[-(len(_TIMES) // 3) :]
    if os.getpid() != _PROCESS or len(late) < 20:
        return
    steps = sorted(after - before for before, after in itertools.pairwise(late))
    middle = steps[len(steps) // 10 : len(steps) - len(steps) // 10]
    with open(os.path.join(os.environ["LATE_STEPS"], f"{_PROCESS}.json"), "w", encoding="utf-8") as file:
        json.dump({"updates": len(_TIMES), "late_cpu_s": sum(middle) / len(middle)}, file)


if os.environ.get("LATE_STEPS"):
    sys.meta_path.insert(0, _Optimizers())
    atexit.register(_write)
