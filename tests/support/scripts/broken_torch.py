"""Imports the torch that lies in a folder."""

import sys

sys.path.insert(0, sys.argv[1])
import torch  # noqa: F401
