"""`python -m bench.gpu` with the checks and the machine that its first argument describes, a JSON document."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import bench.gpu.__main__ as entry
from bench.gpu.catalogue import Check, Part
from bench.gpu.facts import Facts

if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    checks = tuple(
        Check(name, f"of {name}", "tests.support.bench.fake_gpu_checks", tuple(Part(*part) for part in parts))
        for name, parts in given["checks"].items()
    )
    circumstances = {"taken": "2027-01-31T00:00:00+00:00", "versions": {"torch": given["torch"]}, "machine": {}}
    facts = Facts("cuda", given["chip"], given["source"], circumstances)
    entry.HOME = Path(given["home"])
    sys.exit(entry.main(sys.argv[2:], checks, lambda device: facts))
