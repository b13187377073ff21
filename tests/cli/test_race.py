"""`hotloop race`: what it prints, for people and for programs, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hotloop.core.records.race import Parity
from hotloop.plan import Plan
from hotloop.tuning.races.statistics import ENOUGH_PAIRS
from tests.conftest import RunCli
from tests.support.processes.in_process_command import SMALL, Hotloop, commands


@pytest.fixture
def hotloop(tmp_path: Path, monkeypatch, capfd) -> Iterator[Hotloop]:
    monkeypatch.setattr("hotloop.tuning.race_cache.races_folder", lambda: tmp_path / "kept")
    monkeypatch.setattr("hotloop.tuning.races.measure.WARM_UP_S", 0.01)
    monkeypatch.setattr("hotloop.tuning.races.rounds._WINDOW_S", {"cpu": 0.0005})
    # So many pairs and no more, on a busy machine too: what they come to is for tests of races.
    monkeypatch.setattr("hotloop.tuning.races.rounds.is_precise", lambda ratio: ratio.pairs >= ENOUGH_PAIRS)
    with commands(tmp_path, monkeypatch, capfd) as run:
        yield run


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "task.py"
    path.write_text(
        f"{SMALL}def task(width: int = 4):\n"
        "    model = lambda: nn.Sequential(nn.Linear(4, width), nn.Linear(width, 3))\n"
        "    return make(model=model, epochs=50)\n"
    )
    return path


FIELDS = {"name", "step_ms", "ratio", "ratio_low", "ratio_high", "parity", "compile_s", "run_s", "verdict", "failure"}
SHORT = ("--time-limit", "5m")


def proves(patch: pytest.MonkeyPatch, **parity: Any) -> list[Plan]:
    """Proofs that answer by the plan's optimizer; the plans asked for."""
    asked: list[Plan] = []

    def prove(task: Any, plans: Sequence[Plan], progress: Any) -> list[Parity]:
        asked.extend(plans)
        return [Parity(plan=plan.brief(), parity=parity[plan.optimizer], reason="planted", states=16) for plan in plans]

    patch.setattr("hotloop.tuning.race.PROVE", prove)
    return asked


def test_a_race_as_json(task: Path, hotloop: Hotloop, monkeypatch) -> None:
    proves(monkeypatch, fused="bitwise", forloop="broken")
    Path("mine.toml").write_text('optimizer = "forloop"\n')
    done = hotloop("race", task, "--plans", "baseline,auto,mine.toml", *SHORT, "--json")
    assert done.code == 0, done.err
    found = done.document
    assert [plan["name"] for plan in found["plans"]] == ["baseline", "auto", "mine.toml"]
    assert all(plan.keys() >= FIELDS for plan in found["plans"])
    assert [plan["parity"] for plan in found["plans"]] == ["bitwise", "bitwise", "broken"]
    assert [plan["plan"]["optimizer"] for plan in found["plans"]] == ["default", "fused", "forloop"]
    assert found["baseline"] == "baseline" and found["winner"] in ("baseline", "auto")
    assert found["steps"] == 200
    for plan in found["plans"]:
        assert plan["ratio_low"] <= plan["ratio"] <= plan["ratio_high"]
        assert plan["run_s"] == pytest.approx(plan["startup_s"] + plan["compile_s"] + 0.2 * plan["step_ms"])


def test_a_race_as_a_table_and_a_sentence(task: Path, hotloop: Hotloop, monkeypatch) -> None:
    asked = proves(monkeypatch, fused="bitwise")
    done = hotloop("race", task, *SHORT)
    assert done.code == 0 and done.out == ""
    for words in ("baseline", "auto", "times as", "auto is bitwise", " wins: "):
        assert words in done.err
    assert len(asked) == 1


def test_without_parity_nothing_is_proven(task: Path, hotloop: Hotloop, monkeypatch) -> None:
    asked = proves(monkeypatch, fused="bitwise")
    done = hotloop("race", task, "--no-parity", *SHORT, "--json")
    assert asked == [] and {plan["parity"] for plan in done.document["plans"]} == {None}


def test_axes_are_set_on_all_but_the_baseline(task: Path, hotloop: Hotloop) -> None:
    done = hotloop("race", task, "--plans", "baseline,baseline", "--set", "threads=1", "--no-parity", *SHORT, "--json")
    plans = {plan["name"]: plan["plan"]["threads"] for plan in done.document["plans"]}
    assert plans == {"baseline": None, "baseline threads=1": 1}


@pytest.mark.more
def test_a_plan_that_cannot_be_run_is_shown_as_such(task: Path, hotloop: Hotloop) -> None:
    Path("graphs.toml").write_text('graphs = "step"\ndevice = "cpu"\n')
    args = ("race", task, "--plans", "baseline,graphs.toml", "--no-parity", *SHORT)
    done = hotloop(*args, "--json")
    assert done.code == 0
    [_, failed] = done.document["plans"]
    assert (
        "graphs are for CUDA devices" in failed["failure"] and failed["verdict"] is None and failed["step_ms"] is None
    )
    assert done.document["winner"] == "baseline"
    assert "graphs.toml: graphs=step with device=cpu can't be run here" in hotloop(*args).err.replace("\n", " ")


def test_a_time_too_short_to_say_anything(task: Path, hotloop: Hotloop) -> None:
    done = hotloop("race", task, "--no-parity", "--time-limit", "0.001s", "--json")
    assert done.code == 0 and done.document["winner"] is None
    assert {plan["verdict"] for plan in done.document["plans"]} == {None}
    assert any("the time limit was too short to measure auto" in note for note in done.document["notes"])
    assert "No winner: too little was measured" in hotloop("race", task, "--no-parity", "--time-limit", "0.001s").err


def test_a_device_is_raced(task: Path, hotloop: Hotloop) -> None:
    done = hotloop("race", task, "--devices", "cpu", "--plans", "baseline,auto", "--no-parity", *SHORT, "--json")
    assert [plan["plan"]["device"] for plan in done.document["plans"]] == ["cpu", "cpu"]


def test_sizes(task: Path, hotloop: Hotloop) -> None:
    args = ("--scale", "width=2,200", "--plans", "baseline,auto", "--save", "sizes.html", *SHORT)
    done = hotloop("race", task, *args, "--json")
    assert done.code == 0, done.err
    found = done.document
    assert (found["parameter"], found["values"], found["page"]) == ("width", ["2", "200"], "sizes.html")
    assert [[plan["name"] for plan in race["plans"]] for race in found["races"]] == [["baseline", "auto"]] * 2
    assert len({race["fingerprint"] for race in found["races"]}) == 2
    assert [(plan["scale"], plan["name"]) for plan in found["plans"]] == [
        (size, name) for size in ("2", "200") for name in ("baseline", "auto")
    ]
    assert found["baseline"] == "baseline" and "winner" in found
    [crossing] = found["crossings"]
    assert crossing["name"] == "auto" and "decide" in crossing["reason"]
    drawn = Path("sizes.html").read_text()
    assert "<title>Step time against width</title>" in drawn and "milliseconds of a step" in drawn


@pytest.mark.few("TaskError-1")
@pytest.mark.parametrize(("ends", "code"), [("TaskError", 1), ("KeyboardInterrupt", 130)])
def test_sizes_that_were_raced_are_shown_where_the_next_one_fails(
    ends: str, code: int, hotloop: Hotloop, tmp_path: Path
) -> None:
    Path("task.py").write_text(
        f"""{SMALL}
class Odd(nn.Linear):
    def forward(self, x):
        if self.out_features == 7:
            {"raise KeyboardInterrupt" if ends == "KeyboardInterrupt" else 'raise ValueError("planted")'}
        return super().forward(x)


def task(width: int = 4):
    return make(model=lambda: nn.Sequential(Odd(4, width), nn.Linear(width, 3)), epochs=50)
"""
    )
    args = ("race", "task.py", "--scale", "width=3,5,7,9", "--plans", "baseline,auto", *SHORT)
    done = hotloop(*args, "--json")
    assert done.code == code, done.err
    found = done.document
    assert found["values"] == ["3", "5"] and [len(race["plans"]) for race in found["races"]] == [2, 2]
    assert found["ended_by"] == ("SIGINT" if code == 130 else "failure") and "width=7" in found["ended"]
    assert "width=7" in done.err.splitlines()[-1] and Path("race-width.html").is_file()


@pytest.mark.more
def test_sizes_as_a_table_with_the_path_of_the_picture(task: Path, hotloop: Hotloop) -> None:
    done = hotloop("race", task, "--scale", "width=2,200", *SHORT)  # without --plans it's these two
    assert done.code == 0 and "picture: race-width.html" in done.err and Path("race-width.html").is_file()
    assert "200" in done.err and "auto" in done.err and "decide" in done.err


def test_a_picture_that_can_t_be_written_shows_before_anything_is_raced(task: Path, hotloop: Hotloop) -> None:
    Path("file").touch()
    Path("race-width.html").mkdir()
    for save in (("--save", "file/x.html"), ("--save", "/proc/none/x.html"), ()):
        done = hotloop("race", task, "--scale", "width=2,200", "--plans", "baseline,auto", *save)
        assert done.code == 1 and done.err.count("\n") == 1
        assert f"{save[1] if save else 'race-width.html'} can't be written" in done.err


@pytest.mark.more
def test_a_picture_that_can_t_be_written_at_the_end_costs_nothing_but_itself(
    task: Path, hotloop: Hotloop, monkeypatch
) -> None:
    monkeypatch.setattr("hotloop.cli.race.check_writable", lambda path, option: Path("file").touch())
    args = ("race", task, "--scale", "width=2,200", "--plans", "baseline,auto", "--save", "file/x.html", *SHORT)
    done = hotloop(*args)
    assert done.code == 1 and "200" in done.err and "picture:" not in done.err
    assert done.err.splitlines()[-1].startswith("error: file/x.html can't be written")
    done = hotloop(*args, "--json")
    assert done.code == 1 and done.document["page"] is None and len(done.document["races"]) == 2


def test_what_a_race_found_is_kept(task: Path, hotloop: Hotloop, tmp_path: Path) -> None:
    assert hotloop("race", task, "--no-parity", *SHORT).code == 0
    kept = [json.loads(path.read_text()) for path in (tmp_path / "kept").rglob("*.json")]
    assert sorted(one["timing"]["name"] for one in kept) == ["auto", "baseline"]


def test_times_are_kept_though_the_proof_is_stopped(task: Path, hotloop: Hotloop, tmp_path: Path, monkeypatch) -> None:
    def stopped(*given: Any) -> list[Parity]:
        raise KeyboardInterrupt

    monkeypatch.setattr("hotloop.tuning.race.PROVE", stopped)
    assert hotloop("race", task, *SHORT).code == 130
    kept = [json.loads(path.read_text())["timing"] for path in (tmp_path / "kept").rglob("*.json")]
    assert sorted((one["name"], one["parity"]) for one in kept) == [("auto", None), ("baseline", None)]


def test_where_the_proof_itself_fails_what_was_raced_is_shown(task: Path, hotloop: Hotloop, monkeypatch) -> None:
    def failing(*given: Any) -> list[Parity]:
        raise ValueError("planted")

    monkeypatch.setattr("hotloop.tuning.race.PROVE", failing)
    done = hotloop("race", task, "--plans", "baseline,auto", "--set", "threads=1", *SHORT, "--json")
    assert done.code == 0, done.err
    _, auto = done.document["plans"]
    assert auto["step_ms"] and auto["parity"] == "unproven" and "planted" in auto["parity_reason"]


WRONG: dict[str, tuple[tuple[str, ...], int, tuple[str, ...]]] = {
    "one plan alone": (("--plans", "baseline"), 1, ("one plan alone to race: baseline", "--plans baseline,auto")),
    "one device alone": (("--devices", "cpu"), 1, ("one plan alone to race",)),
    "an axis for no plan": (
        ("--devices", "cpu,cuda", "--set", "threads=1"),
        1,
        ("threads=1, and no plan to set it on: baseline", "--plans baseline,auto"),
    ),
    "a size alone": (("--scale", "width=1,2", "--plans", "baseline"), 1, ("one plan alone to race",)),
    "a file that isn't there": (("--plans", "baseline,mien.toml"), 1, ("no plan at 'mien.toml'",)),
    "a file that is no plan": (("--plans", "bad.toml"), 1, ("bad.toml: precision='fp8'",)),
    "a device that isn't there": (
        ("--devices", "cpu,cuda:9"),
        1,
        ("'cuda:9' isn't on this machine", "Use --devices cpu"),
    ),
    "a plan without steps of its own": (("--set", "parallel=async", "--set", "ranks=2"), 1, ("parallel=async",)),
    "the baseline's axes": (("--set", "compiel=step"), 1, ("unknown axis 'compiel'",)),
    "no time": (("--time-limit", "0s"), 1, ("time-limit='0s'", "a time above zero")),
    "no such size": (("--scale", "depth=1,2", "--plans", "auto"), 1, ("no parameter 'depth'", "width")),
    "one size": (("--scale", "width=1", "--plans", "auto"), 1, ("--scale width=1", "two or more numbers")),
    "the same size again": (("--scale", "width=1,1,2", "--plans", "auto"), 1, ("none of them twice",)),
    "a size that is no number": (("--scale", "width=1,big", "--plans", "auto"), 1, ("two or more numbers",)),
    "a size below zero": (("--scale", "width=-1,1", "--plans", "auto"), 1, ("above zero",)),
    "a size twice": (("--scale", "width=1,2", "-p", "width=3"), 2, ("width is given by --scale and by --param",)),
    "no sizes": (("--scale", "width"), 2, ("'width' is not of the form name=value",)),
    "a picture of nothing": (("--save", "x.html"), 2, ("--save names the file for the picture of --scale",)),
    "a device twice": (("--devices", "cpu", "--set", "device=cpu"), 2, ("by --devices and by --set",)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_one_clear_line(name: str, task: Path, hotloop: Hotloop) -> None:
    args, code, says = WRONG[name]
    Path("bad.toml").write_text('precision = "fp8"')
    done = hotloop("race", task, *args)
    assert done.code == code and done.err.count("\n") == 1 and done.err.startswith("error: "), done.err
    for words in says:
        assert words in done.err


def test_a_size_for_a_plain_value(hotloop: Hotloop) -> None:
    Path("value.py").write_text(f"{SMALL}task = make()\n")
    done = hotloop("race", "value.py", "--scale", "width=1,2", "--plans", "baseline,auto")
    assert done.code == 1 and done.err.count("\n") == 1
    assert "holds its Task as a value, but width was given" in done.err and "def task(width=...)" in done.err


def test_a_baseline_that_cannot_be_run_is_an_error(hotloop: Hotloop) -> None:
    Path("value.py").write_text(f"{SMALL}task = make(model=lambda: nn.Linear(5, 3))\n")
    done = hotloop("race", "value.py", "--json")
    assert done.code == 1 and "mat1 and mat2" in done.document["error"]["message"]


@pytest.mark.more
def test_a_wrong_plan_shows_before_torch_is_imported(run_cli: RunCli, tmp_path: Path) -> None:
    (tmp_path / "task.py").touch()
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    assert "torch was imported" in run_cli("race", "task.py", fresh=True).stderr
    done = run_cli("race", "task.py", "--plans", "baseline,mien.toml", fresh=True)
    assert done.returncode == 1 and "no plan at 'mien.toml'" in done.stderr
