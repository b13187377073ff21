"""Says what a script can see of where it runs, and trains nothing."""

import os
import subprocess
import sys
import threading

import torch

print(sys.argv, __name__, __file__, sys.path, sys.flags.no_user_site, sorted(os.environ.items()))
print(type(torch.__spec__.loader), vars(torch.__spec__.loader))
print(subprocess.run([sys.executable, "-c", "import sys; print(sys.path, sys.modules.keys())"], capture_output=True))
print(threading.active_count(), torch.initial_seed() == torch.seed(), sys.stdin.read())
