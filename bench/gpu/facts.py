"""What this machine is, asked in a process of its own: the runner itself imports no torch.

python -m bench.gpu.facts [--device cuda]        prints one JSON document
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from bench.gpu.setting import ROOT
from hotloop.errors import DeviceError

_LIMIT_S = 120
"""What a driver may take to answer at the first call."""


@dataclass(frozen=True)
class Facts:
    """The device and all that a record says of its circumstances.

    Attributes:
        device: `cuda`, `mps` or `cpu`.
        chip: its name, as the driver gives it.
        source: SHA-256 of the files of hotloop and of these checks.
        circumstances: date, machine, commit and versions; see `bench.claim.circumstances`.
    """

    device: str
    chip: str
    source: str
    circumstances: dict[str, Any] = field(default_factory=dict)

    @property
    def slug(self) -> str:
        """The chip's name in a folder's name, such as `h200`."""
        words = re.sub(r"[^a-z0-9]+", "-", self.chip.lower()).strip("-")
        return words.removeprefix("nvidia-").removeprefix("geforce-") or self.device


def facts(device: str | None) -> Facts:
    """The facts of a device; without a name, of the accelerator that torch finds.

    Raises:
        DeviceError: there is no such device, or torch can't be imported.
    """
    asked = [] if device is None else ["--device", device]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "bench.gpu.facts", *asked],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(f"the driver of the device didn't answer within {_LIMIT_S} s") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise DeviceError(f"torch can't be asked for its devices: {lines[-1] if lines else 'no message'}")
    found = json.loads(done.stdout.splitlines()[-1])
    if "lacking" in found:
        raise DeviceError(found["lacking"], fix="try the list on the CPU with --rehearse")
    return Facts(**found)


def found_here(device: str | None) -> dict[str, Any]:
    """What `facts` gets from the process that asks."""
    import torch

    from bench.claim import circumstances
    from bench.gpu.source import source
    from hotloop.core.hardware import machine
    from hotloop.core.hardware.devices import device_names

    names = device_names()
    kinds = {name.partition(":")[0] for name in names}
    kind = device or next((one for one in ("cuda", "mps") if one in kinds), None)
    if kind is None or kind not in kinds:
        wanted = "no GPU" if kind is None else f"no device {kind}"
        return {"lacking": f"{wanted}: torch {torch.__version__} on this machine finds only {', '.join(names)}"}
    name = next(name for name in names if name.partition(":")[0] == kind)
    described = machine.describe_device(name, machine.read_processor().vectors)
    return {
        "device": kind,
        "chip": described.model or kind,
        "source": source(),
        "circumstances": circumstances(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device")
    print(json.dumps(found_here(parser.parse_args().device)))


if __name__ == "__main__":
    main()
