"""Does a profile name what is planted? Each script of tests/planted, in all its variants.

OMP_NUM_THREADS=1 python -m bench.planted [CASE ...] [--variants plant,other,clean,decoy] [--record]

`plant` and `other` must be named with their place: by the first remedy where they take 5 % of the step or more, which is
measured beside `clean`; else by a note at least. `clean` and `decoy` must not be named.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from bench.claim import write_claim
from hotloop.core.records.profile import Profile
from hotloop.plan import BASELINE
from hotloop.profiler.base.steps import ProfileSettings
from hotloop.profiler.profile import profile_script
from tests.planted.cases import CASES, is_there, script

VARIANTS = ("clean", "decoy", "plant", "other")
PLANTED = ("plant", "other")


def profiled(case: str, variant: str, steps: int) -> Profile:
    return profile_script(script(case), [variant, "--steps", str(2 * steps + 30)], ProfileSettings(steps), stdout=2)


def judged(case: str, variant: str, profile: Profile, clean_ms: float | None) -> dict[str, Any]:
    """Whether a profile says what it should, and what it says."""
    planted, remedies = CASES[case], [one.model_dump() for one in profile.remedies]
    naming = [one for one in remedies if planted.is_named(one)]
    cost = None if not clean_ms or not profile.step_ms else 1 - clean_ms / profile.step_ms
    if variant not in PLANTED or planted.nothing:
        right = not naming
    elif variant in planted.light:
        right = any(is_there(case, variant, one["where"]) for one in naming)
    else:
        right = bool(naming) and naming[0] is remedies[0] and is_there(case, variant, remedies[0]["where"])
    return {
        "case": case,
        "variant": variant,
        "right": right,
        "step_ms": profile.step_ms,
        "cost": cost,
        "bound": profile.bound,
        "first": remedies[0] if remedies else None,
        "named": naming[0] if naming else None,
        "attributed": profile.attributed,
    }


def tried(cases: list[str], variants: list[str], steps: int) -> list[dict[str, Any]]:
    found = []
    for case in cases:
        clean_ms = None
        for variant in variants:
            began = time.monotonic()
            profile = profiled(case, variant, steps)
            one = judged(case, variant, profile, clean_ms if variant in PLANTED else None)
            clean_ms = profile.step_ms if variant == "clean" else clean_ms
            print(_line(one), f"({time.monotonic() - began:.0f} s)", flush=True)
            found.append(one)
    return found


def _line(one: dict[str, Any]) -> str:
    said = "nothing" if one["first"] is None else "{cause} @ {where} ({gain:.0%})".format(**one["first"])
    cost = "" if one["cost"] is None else f", costs {one['cost']:.0%}"
    return f"{'right' if one['right'] else 'WRONG'}: {one['case']} {one['variant']}{cost}: {said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--record", action="store_true", help="write a claim")
    given = parser.parse_args()
    found = tried(given.cases, [one for one in VARIANTS if one in given.variants.split(",")], given.steps)
    wrong = [one for one in found if not one["right"]]
    print(f"{len(found) - len(wrong)} of {len(found)} right")
    if given.record:
        print(write_claim("planted-bottlenecks", "python -m bench.planted --record", BASELINE, {"scripts": found}))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
