"""Faults planted at random into what a step is lowered to, and whether parity sees them. Takes ten minutes.

    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive python -m bench.parity_faults                 460 mutants
    OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive python -m bench.parity_faults --each 2 --families mlp,gru

Half of the mutants are of the captured graph (bench/graph_mutations.py), half of the eager step and its feed
(bench/step_faults.py). What each does to a step is measured apart, against the same step without it
(bench/yardstick.py): that is what detection is drawn against, and it tells the mutants that do nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.claim import write_claim
from bench.graph_mutations import Graphs, Mutation
from bench.step_faults import planted
from bench.yardstick import Effect, Yardstick
from hotloop.core.records.race import TRUSTED_CLASSES, Parity
from hotloop.lowering.build import lower
from hotloop.lowering.program import Program
from hotloop.parity.proof import prove_programs
from hotloop.plan import BASELINE, Plan
from hotloop.report.html import style_figure
from tests.support.tasks.parity_families import MORE_FAMILIES, another_family

WAYS = {"eager": 12, "accumulated": 2, "forward": 5, "step": 6}
"""What is mutated, and how many mutants of it there are in a round of one family."""

IN_PIECES = ("mlp", "cnn", "gru", "tied", "residual", "lstm", "bag")
"""Families without draws and without layers that look at the whole batch."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(MORE_FAMILIES))
    parser.add_argument("--each", type=int, default=2, help="rounds of each family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--rows", type=Path, nargs="*", default=[], help="files to go on from; new mutants go to the first"
    )
    parser.add_argument("--no-record", action="store_true", help="print the figures, write no claim")
    options = parser.parse_args()
    rows = [json.loads(line) for path in options.rows if path.is_file() for line in path.open()]
    rows = [row for row in rows if row["round"] < options.each]
    done = {(row["family"], row["way"], row["round"]) for row in rows}
    for number in range(options.each):
        for name in options.families.split(","):
            for way, count in WAYS.items():
                if (name, way, number) in done or (way == "accumulated" and name not in IN_PIECES):
                    continue
                found = list(mutants(name, way, number, count, options.seed))
                rows += found
                _keep(options.rows[:1], found)
    figures = summary(rows) | {"seed": options.seed}
    print(json.dumps(figures, indent=2))
    if not options.no_record:
        command = f"python -m bench.parity_faults --each {options.each} --seed {options.seed}"
        folder = write_claim("parity-faults", command, BASELINE, {**figures, "mutants": rows})
        write_picture(figures, folder)
        print(folder)
    return 0


def _keep(paths: list[Path], rows: list[dict[str, Any]]) -> None:
    for path in paths:
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def mutants(name: str, way: str, number: int, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """So many mutants of one family, measured and judged together."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch speaks of what mutants do
        task = another_family(name)
        graphs = Graphs(task, way)
        plan = Plan(accumulation=2) if way == "accumulated" else BASELINE
        honest = graphs.program() if way in ("forward", "step") else lower(task, plan)
        yardstick = Yardstick(honest)
        made: list[tuple[Program, Mutation, Effect]] = []
        for which in range(count):
            draws = random.Random(f"{seed} {name} {way} {number} {which}")
            while True:
                try:
                    if way in ("forward", "step"):
                        program, mutation = graphs.mutant(draws)
                    else:
                        program = lower(task, plan)
                        mutation = planted(program, draws)
                    made.append((program, mutation, yardstick.of(program)))
                    break
                except Exception as error:  # what stops by itself needs no proof
                    print(f"{name} {way}: a mutant stopped with {type(error).__name__}", flush=True)
        verdicts = prove_programs(task, [program for program, _, _ in made])
    for (_, mutation, effect), verdict in zip(made, verdicts, strict=True):
        row = {"family": name, "way": way, "round": number} | row_of(mutation, effect, verdict)
        print(*(f"{key}={value}" for key, value in row.items()), flush=True)
        yield row


def row_of(mutation: Mutation, effect: Effect, verdict: Parity) -> dict[str, Any]:
    """All that is known of one mutant."""
    return {
        "kind": mutation.kind,
        "place": mutation.place,
        "magnitude": mutation.magnitude,
        "multiple": finite(effect.multiple),
        "relative": finite(effect.relative),
        "apart": finite(effect.apart),
        "spread": finite(effect.spread),
        "equivalent": effect.equivalent,
        "changed": len(effect.changed),
        "parity": verdict.parity,
        "reason": verdict.reason,
        "largest_ratio": finite(max((one.ratio for one in verdict.errors), default=0.0)),
        "first": verdict.first,
        "first_is_right": named_rightly(effect, verdict),
    }


def named_rightly(effect: Effect, verdict: Parity) -> bool | None:
    """Whether the tensor that is said to be wrong first is one that the fault changes.

    None where the fault shows in a free run alone.
    """
    free = verdict.first is not None and ", within " in verdict.first
    if verdict.first is None or free or "'" not in verdict.first or not effect.changed:
        return None
    what, name = verdict.first.split(" '")[0].removeprefix("size of "), verdict.first.split("'")[1]
    if what == "gradient":  # no part of a State: it shows in what is made of it
        return any(name == key[1] or f"/{name}/" in f"/{key[1]}/" for key in effect.changed)
    if what in ("count", "loss"):
        return any(key[0] in ("count", "loss") for key in effect.changed)
    return (what, name.removeprefix("state/")) in effect.changed or ("count", name) in effect.changed


def finite(number: float) -> float:
    """JSON knows no infinity."""
    return min(number, 1e30) if number == number else 1e30


# ---------------------------------------------------------------- figures


EDGES = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rates of detection, with Wilson intervals."""
    real = [row for row in rows if not row["equivalent"]]
    judged = [row for row in real if row["parity"] != "unproven"]
    named = [row["first_is_right"] for row in judged if row["first_is_right"] is not None]
    return {
        "n_mutants": len(rows),
        "n_families": len({row["family"] for row in rows}),
        "n_kinds": len({row["kind"] for row in rows}),
        "n_equivalent": len(rows) - len(real),
        "equivalent_by_class": counted(row["parity"] for row in rows if row["equivalent"]),
        "others_by_class": counted(row["parity"] for row in real),
        "detected": rate(real),
        "first_named_is_one_that_the_fault_changes": rate_of(sum(named), len(named)),
        "first_named_is_the_parameter_of_the_fault": rate_of(*named_exactly(judged)),
        "by_effect_in_multiples_of_rounding": binned(real, "multiple", EDGES),
        "by_magnitude": binned(
            [row for row in real if row["magnitude"] is not None], "magnitude", [10.0**power for power in range(-7, 1)]
        ),
        "by_kind": {kind: rate(found) for kind, found in sorted(grouped(real, "kind").items())},
        "by_way": {way: rate(found) for way, found in grouped(real, "way").items()},
        "missed": [row for row in real if row["parity"] in TRUSTED_CLASSES],
    }


OF_ONE_PARAMETER = (
    "gradient scaled",
    "gradient rounded",
    "gradient noisy",
    "gradient of the step before",
    "weights rounded",
    "parameter not updated",
)
"""Kinds whose place is the name of a parameter."""


def named_exactly(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """How often the very parameter is named that a fault was planted at, and of how many that were noticed."""
    rows = [row for row in rows if row["kind"] in OF_ONE_PARAMETER and row["first"]]
    return sum(row["place"].split(" each ")[0] in row["first"] for row in rows), len(rows)


def counted(values: Iterator[str]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for value in values:
        found[value] += 1
    return dict(found)


def grouped(rows: list[dict[str, Any]], key: str) -> dict[str, list[dict[str, Any]]]:
    found = defaultdict(list)
    for row in rows:
        found[row[key]].append(row)
    return found


def binned(rows: list[dict[str, Any]], key: str, edges: Any) -> list[dict[str, Any]]:
    """Rates from each edge to the next."""
    bounds = [0.0, *edges, float("inf")]
    return [
        {"from": low, "to": None if high == float("inf") else high, **rate(found)}
        for low, high in itertools.pairwise(bounds)
        if (found := [row for row in rows if low <= row[key] < high])
    ]


def rate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The share that isn't trusted."""
    return rate_of(sum(row["parity"] not in TRUSTED_CLASSES for row in rows), len(rows))


def rate_of(hits: int, count: int) -> dict[str, Any]:
    from scipy.stats import binomtest

    if not count:
        return {"n": 0}
    interval = binomtest(hits, count).proportion_ci(method="wilson")
    return {"n": count, "rate": round(hits / count, 4), "wilson_95": [round(interval.low, 4), round(interval.high, 4)]}


def write_picture(figures: dict[str, Any], folder: Path) -> None:
    """Detection against the size of the effect, and against the magnitude of the fault."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    titles = ("by what it does to a step, in multiples of rounding", "by its own relative magnitude")
    picture = make_subplots(rows=1, cols=2, shared_yaxes=True, subplot_titles=titles)
    for column, key in enumerate(("by_effect_in_multiples_of_rounding", "by_magnitude"), 1):
        bins = figures[key]
        middle = [((one["from"] or one["to"] / 10) * (one["to"] or one["from"] * 10)) ** 0.5 for one in bins]
        rates = [one["rate"] for one in bins]
        picture.add_trace(
            go.Scatter(
                x=middle,
                y=rates,
                mode="lines+markers",
                customdata=[one["n"] for one in bins],
                hovertemplate="%{y:.0%} of %{customdata} mutants<extra></extra>",
                error_y={
                    "array": [one["wilson_95"][1] - one["rate"] for one in bins],
                    "arrayminus": [one["rate"] - one["wilson_95"][0] for one in bins],
                },
            ),
            row=1,
            col=column,
        )
    picture.update_xaxes(type="log")
    picture.update_yaxes(range=[0, 1.02], tickformat=".0%")
    picture.update_yaxes(title_text="share that is seen, with 95 % intervals (Wilson)", col=1)
    picture.update_layout(showlegend=False)
    title = "Planted faults that parity sees"
    note = f"{figures['n_mutants']} mutants of {figures['n_families']} architectures, without those that do nothing"
    # Without the 5 MB of plotly itself, which a page of a claim needn't carry.
    style_figure(picture, title, note).write_html(folder / "detection.html", include_plotlyjs="cdn")


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sys.exit(main())
