"""Sections of a report for records: a profile, a race, a proof, an evaluation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from hotloop.core.format import format_flops, format_milliseconds, format_percent, format_time
from hotloop.core.records.profile import Profile, Remedy
from hotloop.core.records.race import Parity, Timing, Verdict
from hotloop.core.records.training import Evaluation
from hotloop.report.blocks import Block, Section, facts, figure_of, figures, heading, lines, table, text, tiles
from hotloop.report.plan import describe_convergence
from hotloop.report.profile import headline, modules_figure, phases_figure
from hotloop.report.race import winner_sentence
from hotloop.report.run_curves import COLOURS

_MAX_MODULES = 60

_MAX_OPERATORS = 25

_PNG = re.compile(r"data:image/png;base64,[A-Za-z0-9+/=]+")


def profile_section(profile: Profile) -> Section:
    """Returns the phases of a step, what bounds the step, the remedies, the modules and the operators."""
    return Section("profile", "Profile", list(_profile_blocks(profile)))


def _profile_blocks(profile: Profile) -> Iterator[Block]:
    yield text(headline(profile))
    if profile.bound != "unknown":
        yield text(f"Bound by {profile.bound}.")
    yield from lines([*profile.bound_evidence, *profile.notes, *filter(None, [profile.busy, profile.stopped])])
    if profile.phases:
        yield from figures([phases_figure(profile)], "low")
    yield from _remedies("Remedies", profile.remedies)
    yield from _remedies("To be measured", profile.candidates)
    yield from lines(profile.advice)
    if profile.modules:
        yield from figures([modules_figure(profile)], "tall")
        rows = sorted(profile.modules, key=lambda one: -one.share)[:_MAX_MODULES]
        yield table(
            "Modules by time",
            ("module", "kind", "share", "forward", "backward", "FLOPs"),
            [
                (
                    one.name or "the model",
                    one.kind,
                    format_percent(one.share),
                    format_time(one.forward_ms),
                    format_time(one.backward_ms),
                    format_flops(one.flops),
                )
                for one in rows
            ],
            numbers=(2, 3, 4, 5),
        )
    if profile.operators:
        yield heading("Operators")
        yield table(
            "Operators by time",
            ("operator", "phase", "module", "line", "time"),
            [
                (one.name, one.phase, one.module, one.where, format_time(one.ms))
                for one in sorted(profile.operators, key=lambda one: -one.ms)[:_MAX_OPERATORS]
            ],
            numbers=(4,),
        )


def _remedies(title: str, remedies: Sequence[Remedy]) -> list[Block]:
    return [heading(title), remedies_table(title, remedies)] if remedies else []


def remedies_table(title: str, remedies: Sequence[Remedy]) -> Block:
    rows = [(one.cause, one.where, one.remedy, format_percent(one.gain), one.evidence) for one in remedies]
    return table(title, ("cause", "where", "remedy", "at most", "evidence"), rows, numbers=(3,))


def race_section(verdict: Verdict) -> Section:
    """Returns the plans' speeds with their intervals, and why the winner won."""
    reasons = [f"{timing.name}: {timing.parity_reason}" for timing in verdict.plans if timing.parity_reason]
    failures = [f"{timing.name}: {timing.failure}" for timing in verdict.plans if timing.failure]
    blocks = [text(winner_sentence(verdict)), *race_figures(verdict), plans_table(verdict)]
    return Section("race", "Race", [*blocks, *lines([*reasons, *failures, *verdict.remarks])])


def plans_table(verdict: Verdict) -> Block:
    """Returns a row for each plan."""
    return table(
        "Plans",
        ("plan", "step", "times as fast", "99 % interval", "proof", "verdict"),
        [_race_row(timing, verdict) for timing in verdict.plans],
        numbers=(1, 2, 3),
        marked=[number for number, timing in enumerate(verdict.plans) if timing.name == verdict.winner],
    )


def race_figures(verdict: Verdict) -> list[Block]:
    """Returns a bar for each plan with the error bars of its 99 % interval."""
    timed = [timing for timing in verdict.plans if timing.ratio is not None]
    if not timed:
        return []
    ratios = [timing.ratio or 1.0 for timing in timed]
    above = [max(0.0, (one.ratio_high or ratio) - ratio) for one, ratio in zip(timed, ratios, strict=True)]
    below = [max(0.0, ratio - (one.ratio_low or ratio)) for one, ratio in zip(timed, ratios, strict=True)]
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "y": list(range(len(timed))),
            "x": ratios,
            "error_x": {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "color": COLOURS[7]},
            "marker": {"color": [COLOURS[2] if one.name == verdict.winner else COLOURS[0] for one in timed]},
            "hovertemplate": "%{x:.3f} times as fast<extra></extra>",
        }
    ]
    names = [escape(one.name, quote=False) for one in timed]
    layout = {
        "xaxis": {
            "title": {"text": f"times as fast as {escape(verdict.baseline, quote=False)}"},
            "rangemode": "tozero",
        },
        "yaxis": {"tickvals": list(range(len(timed))), "ticktext": names, "autorange": "reversed"},
        "showlegend": False,
    }
    label = "; ".join(f"{one.name} {ratio:.2f} times as fast" for one, ratio in zip(timed, ratios, strict=True))
    shown = {"title": "Speed against the baseline, with 99 % intervals", "label": label, "data": data, "layout": layout}
    return figures([shown])


def _race_row(timing: Timing, verdict: Verdict) -> tuple[str, ...]:
    step = "-" if timing.step_ms is None else format_milliseconds(timing.step_ms)
    ratio = "-" if timing.ratio is None else f"{timing.ratio:.2f}"
    interval = "-" if timing.ratio_low is None else f"{timing.ratio_low:.2f} to {timing.ratio_high:.2f}"
    said = "the baseline" if timing.name == verdict.baseline else "failed" if timing.failure else timing.verdict or "-"
    return timing.name, step, ratio, interval, timing.parity or "-", said


def proof_section(proof: Parity) -> Section:
    """Returns the class of a plan's agreement with the baseline, and its largest errors."""
    rows = [(e.what, e.name, f"{e.error:.2e}", f"{e.floor:.2e}", f"{e.ratio:.2f}") for e in proof.errors[:30]]
    blocks = [
        *tiles([("agreement with the baseline", proof.parity)]),
        text(proof.reason),
        facts(
            [
                ("Plan", proof.plan),
                ("Compared states", f"{proof.states:,}"),
                ("Steps of the free run", f"{proof.free_steps:,}"),
                ("First wrong tensor", proof.first),
                ("Convergence", "" if proof.convergence is None else describe_convergence(proof.convergence)),
            ]
        ),
        *lines(proof.reductions),
    ]
    if rows:
        columns = ("tensor", "name", "error", "noise floor", "error / floor")
        blocks.append(table("Largest errors", columns, rows, numbers=(2, 3, 4)))
    return Section("proof", "Proof", blocks)


def evaluation_section(evaluation: Evaluation, pictures: Mapping[int, str]) -> Section:
    """Returns the figures, the classes, the confusion matrix and the worst mistakes.

    Args:
        pictures: data addresses of PNG images by a sample's index.
    """
    named = [("loss", f"{evaluation.loss:.4f}"), *((name, f"{v:.4f}") for name, v in evaluation.metrics.items())]
    what = f"{evaluation.samples:,} samples of the {evaluation.on} data, {evaluation.weights} weights"
    blocks = [text(f"{what} (epoch {evaluation.epoch})."), *tiles(named)]
    blocks += [text(evaluation.note)] if evaluation.note else []
    if evaluation.confusion:
        blocks += [heading("Classes"), _class_table(evaluation), heading("Confusion matrix"), *_confusion(evaluation)]
    blocks += _regression(evaluation)
    if evaluation.mistakes:
        blocks += [heading("Worst mistakes"), *_mistakes(evaluation, pictures)]
    return Section("evaluation", "Evaluation", blocks)


def _class_table(evaluation: Evaluation) -> Block:
    columns: dict[str, list[float | None]] = {
        "accuracy": evaluation.accuracy_per_class,
        "precision": evaluation.precision_per_class,
        "recall": evaluation.recall_per_class,
        "F1": evaluation.f1_per_class,
    }
    known = {name: values for name, values in columns.items() if len(values) == len(evaluation.classes)}
    rows = [
        (
            name,
            f"{sum(evaluation.confusion[place]):,}",
            *("-" if values[place] is None else f"{values[place]:.1%}" for values in known.values()),
        )
        for place, name in enumerate(evaluation.classes)
    ]
    return table("Classes", ("class", "samples", *known), rows, numbers=range(1, 2 + len(known)))


def _regression(evaluation: Evaluation) -> list[Block]:
    if evaluation.regression is None:
        return []
    rows = [
        (one.name, f"{one.mae:.4g}", f"{one.rmse:.4g}", "-" if one.r2 is None else f"{one.r2:.4f}")
        for one in evaluation.regression.targets
    ]
    columns = ("target", "mean absolute error", "root mean squared error", "R²")
    return [heading("Errors"), table("Errors", columns, rows, numbers=(1, 2, 3))]


def _confusion(evaluation: Evaluation) -> list[Block]:
    from hotloop.report.evaluation import confusion_figure, most_frequent

    worst = "; ".join(f"{one.true} taken for {one.predicted} {one.samples} times" for one in most_frequent(evaluation))
    shown = figure_of(
        confusion_figure(evaluation), "Rows: true class. Columns: predicted class.", f"Confusions: {worst}"
    )
    return figures([shown], "tall")


def _mistakes(evaluation: Evaluation, pictures: Mapping[int, str]) -> list[Block]:
    named = [
        {
            "index": one.index,
            "true": _class_name(evaluation, one.true),
            "predicted": _class_name(evaluation, one.predicted),
            "confidence": f"{one.confidence:.1%}",
            "address": pictures.get(one.index, ""),
        }
        for one in evaluation.mistakes
    ]
    pictured = [one for one in named if _PNG.fullmatch(str(one["address"]))]
    for one in pictured:
        one["alt"] = f"sample {one['index']}: {one['true']}, taken for {one['predicted']}"
    blocks: list[Block] = [{"kind": "mistakes", "mistakes": pictured}] if pictured else []
    rest = [one for one in named if one not in pictured]
    rows = [(one["index"], one["true"], one["predicted"], one["confidence"]) for one in rest]
    return (
        [*blocks, table("Mistakes", ("sample", "true", "predicted", "confidence"), rows, numbers=(0, 3))]
        if rows
        else blocks
    )


def _class_name(evaluation: Evaluation, number: int) -> str:
    return evaluation.classes[number] if 0 <= number < len(evaluation.classes) else str(number)
