"""Who wins a race, from its figures alone; and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from hotloop.core.records.race import Timing, Verdict, best_plan_name
from hotloop.report.race import race_page, race_table, winner_sentence


def timing(name: str, step_ms: float | None, verdict: Any = None, parity: Any = None, **more: Any) -> Timing:
    given: dict[str, Any] = dict(ratio_low=0.9, ratio_high=1.1, windows=20) if step_ms else {}
    if step_ms:
        given |= dict(ratio=10 / step_ms, run_s=step_ms, compile_s=0.0, startup_s=0.0)
    return Timing(name=name, step_ms=step_ms, verdict=verdict, parity=parity, **given | more)


BASE = timing("baseline", 10.0, "no difference", "bitwise")
FAST = timing("fast", 5.0, "faster", "fp32-equivalent")
RACES: dict[str, tuple[list[Timing], str | None, str]] = {
    "faster and trusted": ([BASE, FAST], "fast", "fast wins: 2.00 times as fast as baseline"),
    "bitwise, and faster still": ([BASE, FAST, timing("best", 4.0, "faster", "bitwise")], "best", "best wins"),
    "the first to finish, not the quickest step": (
        [BASE, FAST, timing("best", 1.0, "faster", "bitwise", run_s=7.0)],
        "fast",
        "fast wins",
    ),
    "faster, but its compilation never pays": (
        [BASE, timing("late", 5.0, "faster", "bitwise", run_s=40.0, pays_after=7000)],
        "baseline",
        "late is 2.00 times as fast, but takes longer to start and compile, which pays after 7,000 steps",
    ),
    "faster, but its looks at each epoch cost more": (
        [BASE, timing("busy", 5.0, "faster", "bitwise", looking_ms=6.0, run_s=11.0)],
        "baseline",
        "busy is 2.00 times as fast, but takes longer to start, compile and check what callbacks change",
    ),
    "reduced precision": (
        [BASE, timing("bf16", 2.0, "faster", "reduced-precision")],
        "baseline",
        "bf16 is 5.00 times as fast, but reduced-precision",
    ),
    "broken": ([BASE, timing("b", 2.0, "faster", "broken")], "baseline", "b is 5.00 times as fast, but broken"),
    "quicker by chance": ([BASE, timing("c", 9.0, "no difference", "bitwise")], "baseline", "no difference was found"),
    "slower": ([BASE, timing("s", 20.0, "slower", "bitwise")], "baseline", "s takes 2.00 times as long"),
    "left out early": (
        [BASE, timing("l", 25.0, windows=2, left_out=True, ratio_low=None, ratio_high=None)],
        "baseline",
        "l was left out after 2 pairs: behind.",
    ),
    "left out behind a rival": (
        [BASE, timing("l", 9.0, windows=4, left_out=True, ratio_low=None, ratio_high=None)],
        "baseline",
        "l was left out after 4 pairs: another plan is faster.",
    ),
    "faster, and nobody proved it": (
        [BASE, timing("u", 9.0, "faster", pays_after=0)],
        "baseline",
        "u is 1.11 times as fast, but it wasn't proven.",
    ),
    "failed": ([BASE, timing("f", None, failure="no such graph")], "baseline", "f can't be run"),
    "all failed, and little time": (
        [timing("baseline", 10.0, ratio_low=None, ratio_high=None), timing("f", None, failure="no such graph")],
        "baseline",
        "f can't be run",
    ),
    "too little": (
        [timing("baseline", 10.0, ratio_low=None, ratio_high=None), timing("t", 5.0, ratio_low=None, ratio_high=None)],
        None,
        "No winner: too little was measured",
    ),
}


def verdict(plans: list[Timing], winner: str | None) -> Verdict:
    figures: dict[str, Any] = dict(task="t", fingerprint="", machine="", versions={}, seconds=0.0, steps=1000)
    return Verdict(plans=plans, baseline="baseline", winner=winner, **figures)


@pytest.mark.parametrize("name", RACES)
def test_who_wins_and_why(name: str) -> None:
    plans, winner, says = RACES[name]
    assert best_plan_name(plans, "baseline", proven=True) == winner
    assert says in winner_sentence(verdict(plans, winner))
    assert race_table(verdict(plans, winner)).row_count == len(plans)


def test_in_a_terminal_of_80_columns_each_verdict_can_be_read() -> None:
    long = "layout=channels_last compile=package allocator=keep"
    plans = [
        BASE,
        timing("optimizer=fused", 123.4, "no difference", compile_s=1234.0, run_s=400.0),
        timing("threads=1", 123.4, left_out=True),
        timing(long, 123.4, windows=3),
    ]
    verdict = Verdict(
        task="t", fingerprint="f", plans=plans, baseline="baseline", winner="baseline",
        steps=100, machine="", versions={}, seconds=1.0,
    )  # fmt: skip
    console = Console(width=80)
    with console.capture() as shown:
        console.print(race_table(verdict))
    said = shown.get()
    for words in (
        "the baseline",
        "no difference",
        "left out",
        "too few pairs",
        "0.08 (0.90 to 1.10)",
        *long.split(),
    ):
        assert words in said


def test_without_proofs_any_plan_may_win() -> None:
    assert best_plan_name([BASE, timing("b", 2.0, "faster")], "baseline", proven=False) == "b"


def test_without_a_number_of_steps_the_quickest_step_wins() -> None:
    plans = [plan.model_copy(update={"run_s": None}) for plan in (BASE, FAST)]
    assert best_plan_name(plans, "baseline", proven=True) == "fast"


def test_a_verdict_goes_to_json_and_back() -> None:
    one = verdict([BASE, FAST], "fast")
    assert Verdict.model_validate_json(one.model_dump_json()) == one


def test_on_another_device_a_plan_is_proven_against_the_baseline_there() -> None:
    def on(device: str, one: Timing) -> Timing:
        return one.model_copy(update={"plan": {"device": device}, "parity_reason": "each bit is the baseline's"})

    base, gpu = on("cpu", BASE), on("cuda:0", timing("gpu", 5.0, "faster", "bitwise"))
    assert "and proven bitwise against the baseline on cuda:0" in winner_sentence(verdict([base, gpu], "gpu"))
    assert _page(verdict([base, gpu], "gpu")).count("gpu is bitwise against the baseline on cuda:0: each bit") == 1
    broken = on("cuda:0", timing("gpu", 5.0, "faster", "broken"))
    assert "but broken against the baseline on cuda:0." in winner_sentence(verdict([base, broken], "baseline"))
    same = on("cpu", FAST)
    assert "against the baseline" not in _page(verdict([base, same], "fast"))


def _page(one: Verdict) -> str:
    console = Console(width=400)
    with console.capture() as captured:
        console.print(race_page(one))
    return captured.get()
