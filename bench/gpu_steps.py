"""What a step takes on a CUDA device under several plans: all of it, the host's part, and each kernel's.

    python -m bench.gpu_steps                           W1 to W5, eager, recorded, and recorded and rewritten
    python -m bench.gpu_steps W6 --plans baseline/residency=device,graphs=step
    python -m bench.gpu_steps W1 --kernels 30           the longest kernels of each
    python -m bench.gpu_steps --record                  writes the figures to claims/ as well

One process, one plan after the other: this is to see where the time goes. Which plan is faster, and by how much, is what
races and `bench.speed` tell.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench.claim import write_claim
from bench.speed.data import lay_down
from bench.speed.lanes import axes_of
from bench.speed.tasks import task
from bench.speed.workloads import WORKLOADS
from hotloop.errors import HotloopError
from hotloop.lowering import Program, lower
from hotloop.probe import check_device
from hotloop.wanted import Wanted

RECORDED = "residency=device,graphs=32,compile=step"
PLANS = ("baseline", RECORDED, f"{RECORDED},rewrites=all")
STEPS, SEEN, WARM, ROUNDS = 512, 128, 64, 4
"""Timed in a round, seen kernel by kernel, and before both: multiples of what one replay takes."""


def advance(program: Program, steps: int) -> None:
    while steps:
        outcome = program.advance(steps)
        steps -= outcome.steps
        if outcome.ended:
            program.end_epoch(0.0)


def wait(program: Program) -> None:
    torch.cuda.synchronize(program.device)


def timed(program: Program, steps: int) -> tuple[float, float]:
    """Microseconds of a step, and of the host's part of it."""
    began = time.perf_counter()
    advance(program, steps)
    called = time.perf_counter()
    wait(program)
    return 1e6 * (time.perf_counter() - began) / steps, 1e6 * (called - began) / steps


def kernels_of(program: Program, steps: int) -> dict[str, tuple[float, float]]:
    """By name: how many in a step, and their microseconds; the longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        advance(program, steps)
        wait(program)
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in seen.events() or ():
        if event.device_type == DeviceType.CUDA:
            found[event.name][0] += 1 / steps
            found[event.name][1] += event.self_device_time_total / steps
    return {name: (count, us) for name, (count, us) in sorted(found.items(), key=lambda one: -one[1][1])}


def looked_at(workload: str, asked: str, device: str, share: float) -> dict[str, Any]:
    """One plan of a workload; `share` of the usual steps, where these are long."""
    steps, seen, warm = (max(4, int(count * share)) for count in (STEPS, SEEN, WARM))
    plan = Wanted.of("baseline", {"device": device, **axes_of(asked)}).plan
    program = lower(task(workload, epochs=1000), plan)
    try:
        advance(program, warm)
        wait(program)
        step_us, host_us = min(timed(program, steps) for _ in range(ROUNDS))
        kernels = kernels_of(program, seen)
    finally:
        program.close()
    return {
        "workload": workload,
        "plan": asked,
        "step_us": step_us,
        "host_us": host_us,
        "kernels": sum(count for count, _ in kernels.values()),
        "busy_us": sum(us for _, us in kernels.values()),
        "longest": {name[:120]: {"count": count, "us": us} for name, (count, us) in list(kernels.items())[:20]},
    }


def shown(row: dict[str, Any], kernels: int) -> None:
    if "failure" in row:
        print(f"{row['workload']} {row['plan']}: {row['failure']}", flush=True)
        return
    print(
        f"{row['workload']} {row['plan']}: a step {row['step_us']:.1f} us, the host {row['host_us']:.1f} us, "
        f"{row['kernels']:.1f} kernels of {row['busy_us']:.1f} us",
        flush=True,
    )
    for name, one in list(row["longest"].items())[:kernels]:
        print(f"  {one['us']:8.2f} us  {one['count']:6.2f} x  {name}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", help="some of " + ", ".join(WORKLOADS))
    parser.add_argument("--plans", default="/".join(PLANS), help="axis=value,... separated by /; baseline is eager")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kernels", type=int, default=0, help="how many of the longest to show; up to 20")
    parser.add_argument("--record", action="store_true", help="write a claim")
    given = parser.parse_args()
    if unknown := [name for name in given.workloads if name not in WORKLOADS]:
        parser.error(f"{', '.join(unknown)}: expected some of {', '.join(WORKLOADS)}")
    if not given.device.startswith("cuda"):
        parser.error(f"--device {given.device}: expected cuda or one of its numbers, whose kernels are looked at")
    try:
        check_device(given.device)
    except HotloopError as error:
        parser.error(str(error))
    rows = []
    for name in given.workloads or [name for name, one in WORKLOADS.items() if one.grey]:
        lay_down(WORKLOADS[name].data)
        for asked in given.plans.split("/"):
            try:
                rows.append(looked_at(name, asked, given.device, 1.0 if WORKLOADS[name].grey else 1 / 32))
            except HotloopError as error:
                rows.append({"workload": name, "plan": asked, "failure": str(error)})
            shown(rows[-1], given.kernels)
    if given.record:
        print(write_claim("gpu-steps", " ".join(["python -m bench.gpu_steps", *sys.argv[1:]]), None, {"rows": rows}))
    return int(any("failure" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
