"""The rates of this machine's CPU, measured once for each number of threads and stored in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.files.user_folders import cache_folder, key_digest
from hotloop.core.hardware.machine import read_processor
from hotloop.core.hardware.machine_load import LoadMeter, wait_until_quiet
from hotloop.core.records.step_costs import CpuRates
from hotloop.errors import HotloopError
from hotloop.profiler.step_costs import cpu_probe


def cpu_rates_here(
    tick: Callable[[str], None] = lambda _: None, *, measures: bool = True
) -> tuple[CpuRates | None, list[str], str]:
    """Returns this CPU's rates with torch's current number of threads, notes, and a remark on a busy machine, else empty.

    Args:
        tick: called with the name of each probe; never if the rates are stored.
        measures: whether rates that aren't stored are measured; else they are None.
    """
    key = _key()
    notes: list[str] = []
    path = cache_folder() / "cpu-rates" / f"{key_digest(key)}.json"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(stored, dict) or stored.get("key") != key:
            raise ValueError("its content does not match its name")
        return CpuRates.from_dict(stored.get("rates")), notes, ""
    except FileNotFoundError:
        pass
    except (OSError, ValueError, HotloopError) as error:
        notes.append(f"the stored rates in {path} can't be used ({error}), so they were measured anew")
    if not measures:
        return None, notes, ""
    wait_until_quiet()
    load = LoadMeter()
    rates = cpu_probe.measure_cpu_rates(tick=tick)
    busy = load.busy()
    return rates, notes if busy else notes + _store(path, key, rates), busy


def _key() -> dict[str, Any]:
    """Returns everything that the rates depend on; the host's name, for shared homes, as a hash."""
    processor = read_processor()
    return {
        "method": cpu_probe.METHOD,
        "host": hashlib.sha256(platform.node().encode()).hexdigest()[:16],
        "processor": processor.model,
        "vectors": list(processor.vectors),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _store(path: Path, key: dict[str, Any], rates: CpuRates) -> list[str]:
    """Returns a note after a failure."""
    try:
        write_atomic(path, json.dumps({"key": key, "rates": rates.to_dict()}))
    except HotloopError as error:
        return [f"the measured rates couldn't be stored: {error.given}"]
    return []
