"""`hotloop race` of the baseline against `auto`, and `hotloop tune`: both end with a proven plan."""

from __future__ import annotations

from bench.gpu.commands import within
from bench.gpu.setting import Result, Setting


def run(part: str, setting: Setting) -> Result:
    from hotloop.core.records.race import TRUSTED_CLASSES, Verdict

    command, name = part.split("-")
    limits = {"race": ("10s", "60s"), "tune": ("3s", "30s")}  # a race's is for preparing and proving as well
    limit = limits[command][0 if setting.is_rehearsal else 1]
    options = ["--plans", "baseline,auto"] if command == "race" else []
    options += ["--set", f"device={setting.device}", "--time-limit", limit, "--json"]
    if setting.is_rehearsal:  # compiling takes the CPU longer than all else
        options += ["--set", "compile=none"]
    document = within(command, *setting.task(name, epochs=2 if setting.is_rehearsal else 1000), *options).document
    found = Verdict(**document)
    winner = None if found.winner is None else found.plan(found.winner)
    rows = [
        f"{one.name} {one.step_ms or 0:.3g} ms" + ("" if one.ratio is None else f" ({one.ratio:.3g})")
        for one in found.plans
    ]
    figure = f"{found.winner or 'nothing'} wins: {', '.join(rows[:6])}"
    wrong = ""
    if winner is None and setting.judges_times:
        wrong = f"no plan wins: {'; '.join(found.notes) or figure}"
    elif winner is not None and winner.name != found.baseline and winner.parity not in TRUSTED_CLASSES:
        wrong = f"{winner.name} wins and is {winner.parity}: {winner.parity_reason}"
    elif broken := [one for one in found.plans if one.parity == "broken"]:
        wrong = f"{broken[0].name} is broken: {broken[0].parity_reason}"
    return Result(figure, {"verdict": document}, wrong)
