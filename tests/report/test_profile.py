"""A profile in a terminal: readable at 80 columns, complete, and free of other people's markup."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from hotloop.core.format import (
    format_bytes,
    format_flops,
    format_milliseconds,
    format_percent,
    format_shape,
    format_time,
)
from hotloop.core.records.profile import Profile, RankTime, Remedy
from hotloop.report.profile import profile_page
from tests.support.profiler.handmade_profiles import made, module


def shown(profile: Profile, width: int = 80, module: str | None = None) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(profile_page(profile, module))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [60, 80, 140])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, shown(made(), width).splitlines())) <= width


def test_what_else_the_update_does_has_a_line() -> None:
    profile = made()
    whole = profile.model_copy(update={"phases": profile.phases | {"update": 3.0}})
    line = "The rest of the update (zero_grad, clipping, schedules): 1 ms a step."
    assert line in shown(whole)
    assert "The rest" not in shown(profile.model_copy(update={"phases": profile.phases | {"update": 2.0}}))


def test_everything_that_was_found_is_there() -> None:
    text = " ".join(shown(made()).split())
    for said in (
        "train[bold].py on cpu: a step takes 100 ms, 1,280 samples/s (median of 60)",
        "batch 128x3x9x9, 128",
        "Apart from steps: warm-up 1.2 s, evaluation 3.4 s.",
        "the model Net[red] 25 ms 60 ms 85 % 6 GFLOP 300 MB 25 %",
        "Update by Adam (forloop) at train.py:40: 2 ms a step.",
        "group 0: 3 tensors, 12,000 numbers, 1.5 ms",
        "group slow: 1 tensors, 9 numbers, in one call with the others",
        "convolution_backward 2 38 ms 38 % 3 GFLOP 100 MB backward in features.0 model.py:12",
        "Limit of the step: arithmetic. Of a step of 100 ms: arithmetic 70 %.",
        "1. an optimizer in for-loop mode: up to 31 % of the step at /far/away/train.py:40 take the fused one",
        "plan: --set optimizer=fused",
        "raced: 1.40 times as fast (1.30 to 1.50)",
        "Costs little here: .item() each step, at /far/away/train.py:41 (0.2 % of the step).",
        "1.0 % of the step is unattributed.",
        "Recording made a step 1.010 times as long",
        "Recording ended before the script: enough steps were recorded.",
        "Note: a note",
    ):
        assert said in text


def test_a_note_that_takes_long_is_no_small_one() -> None:
    large = Remedy(cause="memory is given back", where="train.py:9", remedy="keep it", gain=0.41, note=True)
    text = " ".join(shown(made().model_copy(update={"remedies": [large]})).split())
    assert "Perhaps: memory is given back, at train.py:9 (41 % of the step): keep it." in text
    assert "Costs little" not in text


def test_the_bars_of_the_phases_come_one_after_the_other() -> None:
    marks = "█▉▊▋▌▍▎▏▐▕"
    rows = [line for line in shown(made()).splitlines() if set(line) & set(marks)]
    assert [row.split()[0] for row in rows] == ["data", "forward", "backward", "python", "unattributed"]
    starts = [min(row.index(mark) for mark in marks if mark in row) for row in rows]
    assert starts == sorted(set(starts))


def test_modules_stand_below_those_that_they_are_inside_of() -> None:
    rows = {line.split()[0]: line for line in shown(made()).splitlines() if line.startswith("  ")}
    assert rows["features.0"].startswith("  features.0 Conv2d")  # `features` itself is never called
    assert "1 more, each below 0.5 %" in shown(made())


def test_an_update_now_and_then_is_told_of_with_the_phases_that_take_long() -> None:
    text = " ".join(shown(made()).split())
    assert "Every 5 steps Adam[rare] steps as well, at" in text
    assert "50 ms more, of which backward 30 ms, forward 19.5 ms." in text


def test_a_hundred_modules_are_not_a_hundred_rows() -> None:
    many = [module("", "Net", 50, 40)]
    many += [module(f"layers.{n}", "Linear", 0.4, 0.4) for n in range(100)]
    many += [module("layers.50.inner", "Linear", 9.0, 9.0)]
    text = shown(made(modules=many))
    assert "    inner Linear" in text  # with the one that it is inside of
    assert "  layers.50 Linear" in text
    assert text.count(" Linear") < 30
    assert "more, each below" in text


def test_operators_of_one_module() -> None:
    text = shown(made(), module="head")
    assert "operators in head" in text
    assert "mm " in text and "convolution_backward" not in text
    assert "No operator of 'nowhere' was recorded" in shown(made(), module="nowhere")
    assert "convolution_backward" in shown(made(), module="features")  # those inside as well


def test_no_note_is_hidden_behind_many_of_another_cause() -> None:
    many = [Remedy(cause=f".item(): {n}", where=f"t.py:{n}", remedy="", gain=0.01, note=True) for n in range(9)]
    other = Remedy(cause="a retained graph", where="t.py:99", remedy="", gain=0.0, note=True)
    text = shown(made(remedies=[*many, other]))
    assert "a retained graph" in text and text.count(".item()") < len(many)
    assert f"{len(many) + 1 - text.count('Costs little here')} more" in text


def test_how_many_remedies_are_not_shown_is_said() -> None:
    many = [Remedy(cause=f"cause {n}", where="", remedy="", gain=0.1) for n in range(10)]
    text = shown(made(remedies=many))
    assert f"{10 - text.count('cause ')} more: --json" in text and text.count("cause ") < 10
    assert "more: --json" not in shown(made(remedies=many[:2]))


def test_without_steps_it_says_so() -> None:
    text = shown(Profile(source="plain.py", steps=0, step_ms=None, notes=["it never imported torch"], exit_code=3))
    assert "no single training steps were found" in text
    assert "it never imported torch" in text
    assert "exit code 3" in text
    assert "Limit of the step" not in text and "would help" not in text


def test_a_script_that_a_signal_ended_says_which() -> None:
    assert "The script was ended by SIGINT." in " ".join(shown(made(exit_code=-2)).split())


def test_without_torch_lines_stand_in_for_operators() -> None:
    text = shown(made(operators=[], modules=[]))
    assert "/far/away/train.py:31" in text and "5 ms" in text


def test_numbers_have_three_digits_and_a_unit() -> None:
    assert [format_flops(value) for value in (None, 0, 12, 1.234e6, 999.6e9)] == [
        "",
        "0",
        "12 FLOP",
        "1.23 MFLOP",
        "1,000 GFLOP",
    ]
    assert [format_bytes(value) for value in (None, 5, 2.5e9)] == ["", "5 B", "2.5 GB"]
    assert [format_time(value) for value in (0.0456, 1.5, 12345.0)] == ["45.6 us", "1.5 ms", "12.3 s"]
    assert [format_milliseconds(value) for value in (0.0456, 99.94, 3040.4)] == ["0.0456 ms", "99.9 ms", "3,040 ms"]
    assert [format_percent(value) for value in (None, 0.0, 0.0004, 0.05, 0.5)] == [
        "",
        "0.0 %",
        "< 0.1 %",
        "5.0 %",
        "50 %",
    ]
    assert [format_shape([2, 3]), format_shape([])] == ["2x3", "()"]


def test_ranks_stand_one_below_the_other_and_the_slowest_is_marked() -> None:
    ranks = [
        RankTime(step_ms=100.0, phases={"waiting": 20.0, "forward": 50.0, "backward": 30.0}),
        RankTime(step_ms=100.0, phases={"communication": 1.0, "forward": 9.0, "data": 90.0}),
    ]
    text = shown(made(ranks=ranks, slowest=1), width=60)
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "0 20 ms 0 80 ms forward 50 ms" in rows
    assert "1 slowest 0 1 ms 99 ms data 90 ms" in rows
    assert max(map(len, text.splitlines())) <= 60
    assert "14 more" in shown(made(ranks=15 * ranks, slowest=1))
    assert "slowest" not in shown(made())
