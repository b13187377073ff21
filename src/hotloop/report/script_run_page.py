"""The lines about a script's run with exchanges."""

from __future__ import annotations

from hotloop.core.records.race import ExchangedPart, ScriptRun, SpeedRatio

_PROOFS = {
    "": "without a proof",
    "bitwise": "bitwise equal",
    "fp32-equivalent": "equal within rounding",
    "reduced-precision": "in reduced precision, as accepted",
}

_SHOWN_S, _SHOWN_SHARE = 0.1, 0.01
"""Least seconds of hotloop's own work that are shown, and least share of the run by which it was slower."""


def script_run_page(run: ScriptRun) -> str:
    """Returns the summary that `hotloop run` prints: gain, exchanges with their proofs, and what stays as it is."""
    used = [part for part in run.parts if part.used]
    others = [part for part in run.parts if not part.used]
    if not used and not run.dry_run:
        others = [part for part in others if _changed_bits(part)]  # the reasons of the rest are in the record
    lines = [f"hotloop: {_headline(run, used)}"]
    if used and run.own_work_s >= _SHOWN_S:
        lines.append(
            f"  hotloop's start, comparisons and lost races took {run.own_work_s:.1f} s of {run.seconds:.0f} s"
        )
    lines += [f"  exchanged {_title(part)}: {part.exchange}, {_figures(part)}{more}" for part, more in _alike(used)]
    lines += [f"  {_label(run, part)} {_title(part)}: {_unused(part)}{more}" for part, more in _alike(others)]
    if busy := sum(part.was_busy for part in run.parts):
        lines.append(
            f"  the machine was busy in {busy} race{'s' * (busy > 1)}: not sure, and not stored for the next run"
        )
    lines += [f"  {note}" for note in dict.fromkeys(run.notes)]
    return "\n".join(lines)


def _alike(parts: list[ExchangedPart]) -> list[tuple[ExchangedPart, str]]:
    """Returns the first of all parts with the same name and end, such as those of ten folds, and how many others follow."""
    found: dict[tuple[str, ...], list[ExchangedPart]] = {}
    for part in parts:
        end = part.reason.partition(":")[0]
        found.setdefault((_title(part), part.exchange, part.proof, end), []).append(part)
    return [(same[0], f"; {len(same) - 1} more alike" if len(same) > 1 else "") for same in found.values()]


def _headline(run: ScriptRun, used: list[ExchangedPart]) -> str:
    if run.dry_run:
        return f"a dry run, {_gain(run.ratio)}" if run.ratio else "a dry run"
    return "; ".join(filter(None, [_result(run, used), _loss(run, used)]))


def _result(run: ScriptRun, used: list[ExchangedPart]) -> str:
    if used:
        return (
            _gain(run.ratio)
            if run.ratio
            else "the gain of a whole step is unknown: too few steps followed the exchanges"
        )
    if any(map(_changed_bits, run.parts)):
        return "no exchange was in use at the script's end, and steps of a race were equal to python's within rounding"
    if run.parts and run.notes:  # such as an exchange that was taken back
        return "no exchange was in use at the script's end"
    return "nothing was exchanged, and the script ran as under python"


def _loss(run: ScriptRun, used: list[ExchangedPart]) -> str:
    """Returns by how much the whole run was slower; empty if it wasn't, or if the gain is unknown."""
    lost_s = run.own_work_s - run.gained_s
    if (used and run.ratio is None) or lost_s < max(_SHOWN_S, _SHOWN_SHARE * run.seconds):
        return ""
    next_run = f"; the next run starts {'with the exchanges' if used else 'without it'}" if run.is_stored else ""
    return f"the run took about {lost_s:.1f} s longer: too short for what was tried{next_run}"


def _changed_bits(part: ExchangedPart) -> bool:
    """Whether a part that isn't used has changed results within rounding, in the pairs of its race."""
    return bool(part.pairs) and part.proof != "bitwise"


def _gain(ratio: SpeedRatio) -> str:
    line = f"a step is {_times(ratio)} with the exchanges, in {ratio.pairs} pairs of windows"
    is_certain = ratio.low is not None and ratio.high is not None and not ratio.low <= 1 <= ratio.high
    return line if is_certain else f"{line}, which shows no certain gain"


def _times(ratio: SpeedRatio) -> str:
    if ratio.low is None or ratio.high is None:
        return f"{ratio.median:.2f} times as fast"
    return f"{ratio.median:.2f} times as fast (99 %: {ratio.low:.2f} to {ratio.high:.2f})"


def _title(part: ExchangedPart) -> str:
    return f"{part.kind}: {part.name}"


def _figures(part: ExchangedPart) -> str:
    speed = f"{_times(part.ratio)}, " if part.ratio else ""
    calls = f" in {part.proven} compared calls" if part.proven else ""
    return f"{speed}{_PROOFS[part.proof]}{calls}"


def _label(run: ScriptRun, part: ExchangedPart) -> str:
    return "would be exchanged" if run.dry_run and not part.reason else "not exchanged"


def _unused(part: ExchangedPart) -> str:
    return part.reason or f"{part.exchange}, {_figures(part)}"
