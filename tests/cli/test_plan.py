"""`hotloop plan`, and `--plan` and `--set` of `hotloop train`: what runs, what is refused, and what is said of it."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from hotloop import api
from hotloop.core.hardware.machine import machine_name, speed_versions
from hotloop.core.records.race import Timing, Verdict
from hotloop.plan import Plan
from hotloop.task_file import load_task
from hotloop.training.run import Run
from hotloop.tuning.auto import facts_with_fingerprint
from hotloop.tuning.race_cache import save_races
from hotloop.tuning.run_context import RunContext
from tests.conftest import RunCli
from tests.support.auto_plans import BY_RULES, FUSED, KEPT
from tests.support.processes.in_process_command import SMALL, Hotloop


@pytest.fixture
def task(tmp_path: Path) -> Path:
    path = tmp_path / "task.py"
    path.write_text(f"{SMALL}task = make(epochs=1)\n")
    return path


@pytest.fixture
def no_compiler(tmp_path: Path) -> dict[str, str]:
    """An environment with a PATH that leads to no program at all."""
    (tmp_path / "bin").mkdir()
    return {**{key: value for key, value in os.environ.items() if key != "CXX"}, "PATH": str(tmp_path / "bin")}


CPU = ("--device", "cpu")


def plan_of(run: Path) -> dict[str, Any]:
    plan = tomllib.loads((run / "plan.toml").read_text())
    return {axis: value for axis, value in plan.items() if value != getattr(Plan(), axis)}


# --- what runs

RUNS = {
    "nothing said": ((), FUSED),
    "baseline": (("--plan", "baseline"), {}),
    "auto": (("--plan", "auto"), FUSED),
    "auto, and an axis": (("--plan", "auto", "--set", "optimizer=foreach"), {"optimizer": "foreach", **KEPT}),
    "axes": (("--set", "optimizer=foreach", "--set", "threads=1"), {"optimizer": "foreach", "threads": 1}),
    "a file": (("--plan", "mine.toml"), {"optimizer": "forloop", "threads": 1}),
    "a file, and an axis": (("--plan", "mine.toml", "--set", "threads=none"), {"optimizer": "forloop"}),
    "an axis by two names": (("--set", "workers=0", "--workers", "0"), {"workers": 0, **FUSED}),
}


@pytest.mark.few("auto, and an axis", "a file, and an axis", "axes")
@pytest.mark.parametrize("name", RUNS)
def test_train_runs_the_plan_asked_for(name: str, task: Path, hotloop: Hotloop) -> None:
    args, plan = RUNS[name]
    Path("mine.toml").write_text('optimizer = "forloop"\nthreads = 1\n')
    done = hotloop("train", task, "--run", "run", *CPU, *args, "--json")
    assert done.code == 0, done.err
    assert plan_of(Path("run")) == plan
    assert done.document["plan"] == Plan(**plan).model_dump()
    [start] = [event for event in Run.open(Path("run")).journal() if event["event"] == "start"]
    assert start["plan"] == Plan(**plan).brief()
    assert ("auto: " in done.err) == ("auto" in args)
    by_default = name in ("nothing said", "an axis by two names")
    origin = " (default)" if by_default else " (--plan auto)" if "auto" in args else ""
    assert f"plan: {Plan(**plan).brief()}{origin}   learning curves" in done.err


def test_a_resumed_run_changes_its_plan_from_there_on(task: Path, hotloop: Hotloop) -> None:
    assert hotloop("train", task, "--run", "run", *CPU, "--set", "threads=1").code == 0
    assert hotloop("train", "--resume", "run", "--epochs", "2", "--set", "optimizer=foreach").code == 0
    assert plan_of(Path("run")) == {"threads": 1, "optimizer": "foreach"}
    assert hotloop("train", "--resume", "run", "--epochs", "3").code == 0
    assert plan_of(Path("run")) == {"threads": 1, "optimizer": "foreach"}
    assert hotloop("train", "--resume", "run", "--epochs", "4", "--plan", "baseline", *CPU).code == 0
    assert plan_of(Path("run")) == {}
    assert hotloop("train", "--resume", "run", "--epochs", "5", "--plan", "auto", *CPU).code == 0
    assert plan_of(Path("run")) == FUSED
    began = [(e["step"], e["plan"]) for e in Run.open(Path("run")).journal() if e["event"] in ("start", "resume")]
    assert began == [
        (0, "threads=1"),
        (4, "optimizer=foreach threads=1"),
        (8, "optimizer=foreach threads=1"),
        (12, "baseline"),
        (16, BY_RULES.brief()),
    ]


def test_a_plan_that_cannot_be_run_leaves_the_run_as_it_was(task: Path, hotloop: Hotloop) -> None:
    assert hotloop("train", task, "--run", "run", *CPU).code == 0
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    done = hotloop("train", "--resume", "run", "--epochs", "2", "--set", "layout=channels_last")
    assert done.code == 1 and "layout=channels_last can't be run here" in done.err
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before


# --- what is refused

WRONG = {
    "an axis": (("--set", "compiel=step"), 1, ("unknown axis 'compiel'", "one of device, precision")),
    "a value": (("--set", "compile=all"), 1, ("compile='all'", "'none', 'forward', 'step' or 'package'")),
    "a removed value": (("--set", "rewrites=pool_first"), 1, ("rewrites='pool_first' was removed", "Use rewrites=all")),
    "a number": (("--set", "accumulation=0"), 1, ("accumulation=0", "1 or more")),
    "no number": (("--set", "threads=many"), 1, ("threads='many'", "a whole number")),
    "a key of a file": (("--plan", "odd.toml"), 1, ("odd.toml: unknown axis 'precison'", "one of device, precision")),
    "a value of a file": (("--plan", "bad.toml"), 1, ("bad.toml: precision='fp8'", "'fp32', 'tf32'")),
    "a file that is no TOML": (("--plan", "torn.toml"), 1, ("torn.toml is not TOML",)),
    "a file that isn't there": (
        ("--plan", "mien.toml"),
        1,
        ("no plan at 'mien.toml'", "auto, baseline, or a TOML"),
    ),
    "a name": (
        ("--plan", "atuo"),
        1,
        ("no plan at 'atuo'", "auto, baseline, or a TOML file", "did you mean 'auto'?"),
    ),
    "live": (("--plan", "live"), 1, ("no plan at 'live'", "auto, baseline, or a TOML file")),
    "no value": (("--set", "compile"), 2, ("'compile' is not of the form name=value",)),
    "a device": (("--set", "device=tpu"), 1, ("'tpu'", "cpu")),
    "a plan for hardware elsewhere": (("--plan", "far.toml"), 1, ("'xpu:7' isn't on this machine", "cpu")),
    "a device elsewhere, and auto": (("--plan", "auto", "--device", "xpu:7"), 1, ("'xpu:7' isn't on this machine",)),
    "fp16 on a CPU": (("--set", "precision=fp16", *CPU), 1, ("precision=fp16 with device=cpu", "no loss scaling")),
    "fp16 on a CPU, and auto": (("--plan", "auto", "--set", "precision=fp16", *CPU), 1, ("no loss scaling",)),
    "graphs on a CPU": (
        ("--set", "graphs=step", *CPU),
        1,
        ("graphs=step with device=cpu", "CUDA devices", "graphs=none"),
    ),
    "pieces": (("--set", "accumulation=6", *CPU), 1, ("a batch of 5 can't be cut into 6 pieces",)),
    "images": (("--set", "layout=channels_last", *CPU), 1, ("4 or 5 dimensions",)),
    "a removed axis": (
        ("--set", "engine=arrays"),
        1,
        ("engine='arrays' was removed from plans", "hotloop.arrays.Network"),
    ),
    "a removed axis of a file": (
        ("--plan", "eager.toml"),
        1,
        ("eager.toml: engine='eager'", "was removed from plans. Leave engine out"),
    ),
    "a removed plan": (("--plan", "arrays"), 1, ("the plan 'arrays' was removed", "hotloop.arrays.Network")),
    "a placement without a module": (("--set", "placement=cuda:0", *CPU), 1, ("'cuda:0'", "such as encoder=cuda:0")),
    "a placement nowhere": (("--set", "placement=head=cuda:7", *CPU), 1, ("no cuda:7 for 'head'", "cpu")),
    "a module that isn't there": (("--set", "placement=head=cpu", *CPU), 1, ("'head'", "no such module")),
    "a placement, compiled": (
        ("--set", "placement=head=cpu", "--set", "compile=step", *CPU),
        1,
        ("compile=step with placement=head=cpu", "one device"),
    ),
    "an axis twice": (("--set", "workers=1", "--workers", "2"), 2, ("workers is given as 1 and as 2",)),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_plan_is_one_clear_line_and_no_run(name: str, task: Path, hotloop: Hotloop) -> None:
    args, code, says = WRONG[name]
    files = {"odd": 'precison = "bf16"', "bad": 'precision = "fp8"', "torn": "device = ", "far": 'device = "xpu:7"'}
    files["eager"] = 'engine = "eager"'
    for file, text in files.items():
        Path(f"{file}.toml").write_text(text)
    done = hotloop("train", task, "--run", "run", *args)
    assert done.code == code
    assert done.err.count("\n") == 1 and done.err.startswith("error: "), done.err
    for words in says:
        assert words in done.err
    assert done.out == "" and not Path("run").exists()


def test_with_json_a_wrong_plan_is_the_one_document(task: Path, hotloop: Hotloop) -> None:
    done = hotloop("train", task, "--set", "precision=fp16", *CPU, "--json")
    assert done.code == 1 and done.document["error"]["kind"] == "PlanError"


# --- without a compiler


def test_without_a_compiler_compile_by_name_is_an_error(task: Path, run_cli: RunCli, no_compiler) -> None:
    done = run_cli("train", task, "--run", "run", "--set", "compile=step", *CPU, env=no_compiler)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "compile=step can't be run here" in done.stderr and "C++ compiler" in done.stderr
    assert not (task.parent / "run").exists()


@pytest.mark.more
def test_without_a_compiler_auto_goes_on_eagerly_and_says_so_once(task: Path, run_cli: RunCli, no_compiler) -> None:
    args = ("--epochs", "9999", "--plan", "auto", "--stop-after", "1s", *CPU)
    done = run_cli("train", task, "--run", "run", *args, env=no_compiler)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("auto leaves out compile=package: compiling for the CPU needs a C++ compiler") == 1
    assert plan_of(task.parent / "run") == FUSED


@pytest.mark.more
def test_without_a_compiler_auto_says_so_in_a_short_run_too(task: Path, run_cli: RunCli, no_compiler) -> None:
    done = run_cli("train", task, "--run", "run", "--plan", "auto", *CPU, env=no_compiler)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("auto goes on eagerly: compiling for the CPU needs a C++ compiler") == 1
    assert "goes on eagerly" not in run_cli("train", task, "--run", "other", "--plan", "auto", *CPU).stderr


@pytest.mark.more
def test_without_a_compiler_plan_names_it_among_the_refused(task: Path, run_cli: RunCli, no_compiler) -> None:
    done = run_cli("plan", task, "--epochs", "9999", "--json", *CPU, env=no_compiler)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["plan"] == BY_RULES.model_dump()
    refused = {(one["axis"], one["value"]): one for one in document["refused"]}
    for value in ("forward", "step", "package"):
        assert "C++ compiler" in refused["compile", value]["reason"]
        assert "install" in refused["compile", value]["fix"]
    assert any("compile=package" in line for line in document["passed_over"])


# --- hotloop plan

RANDOM = """
class Random(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return X[index] + torch.randn(4), int(Y[index])


plain = make(epochs=1)
task = make(data=Random(), epochs=2)
"""


@pytest.mark.more
def test_plan_says_what_auto_would_run_and_trains_nothing(task: Path, run_cli: RunCli) -> None:
    before = sorted(task.parent.iterdir())
    done = run_cli("plan", task, *CPU, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document["plan"] == BY_RULES.model_dump()
    assert document["device"]["name"] == "cpu" and "fp32" in document["device"]["precisions"]
    assert any(line.startswith("optimizer=fused: ") for line in document["why"])
    values = {(one["axis"], one["value"]) for one in document["refused"]}
    assert {("precision", "fp16"), ("layout", "channels_last"), ("graphs", "step")} <= values
    assert ("optimizer", "foreach") not in values
    assert all(one["reason"] and one["fix"] for one in document["refused"])
    assert [path for path in sorted(task.parent.iterdir()) if path.name != "__pycache__"] == before


def test_plan_shows_it_to_a_person(task: Path, hotloop: Hotloop) -> None:
    done = hotloop("plan", task, *CPU, "--set", "threads=1")
    assert done.code == 0 and done.out == ""
    assert f"auto runs: {BY_RULES.with_axes(threads=1).brief()}" in done.err
    assert "as set: device=cpu, threads=1" in done.err
    assert "graphs=step" in done.err and "Can't be run here" in done.err


def test_plan_shows_a_file_of_the_axes_that_matter(task: Path, hotloop: Hotloop) -> None:
    def file_in(*args: str) -> dict[str, Any]:
        lines = hotloop("plan", task, *CPU, *args).err.partition("as a file for --plan FILE")[2].splitlines()[1:]
        own = [line.strip() for line in lines if line.startswith("  ") and " = " in line]
        return tomllib.loads("\n".join(own))

    assert file_in() == {"device": "cpu", **FUSED}
    assert file_in("--set", "precision=default") == {"device": "cpu", "precision": "default", **FUSED}
    every = file_in("--all")
    assert every == {axis: value for axis, value in BY_RULES.model_dump().items() if value is not None}
    assert every["pipeline"] == "1f1b" and "pipeline" not in file_in()
    assert hotloop("plan", task, *CPU, "--json").document["plan"] == BY_RULES.model_dump()


def test_the_file_that_plan_shows_is_a_plan_for_train(task: Path, hotloop: Hotloop) -> None:
    shown = hotloop("plan", task, *CPU).err.partition("shows the other axes):\n")[2]
    Path("mine.toml").write_text(
        "\n".join(line for line in shown.splitlines() if line.startswith("  ")).replace("  ", "")
    )
    done = hotloop("train", task, "--run", "run", "--plan", "mine.toml", "--json")
    assert done.document["plan"] == BY_RULES.model_dump()
    assert 'pipeline = "1f1b"' in Path("run/plan.toml").read_text()  # a resume reads every axis


@pytest.mark.more
def test_plan_says_what_only_training_finds_out(tmp_path: Path, hotloop: Hotloop) -> None:
    """A data set that is random looks like any other before it is asked: plan says so, and train then passes it over."""
    Path("task.py").write_text(SMALL + RANDOM)
    done = hotloop("plan", "task.py", *CPU)
    assert "auto runs: residency=host" in done.err
    assert "train finds out about residency=host: " in done.err
    trained = hotloop("train", "task.py", *CPU, "--plan", "auto", "--run", "run")
    assert "auto leaves out residency=host" in trained.err and "random generator" in trained.err
    assert plan_of(Path("run")) == FUSED

    open_questions = hotloop("plan", "task.py", *CPU, "--set", "accumulation=2", "--json").document["left_open"]
    assert [line.split(":")[0] for line in open_questions] == ["residency=host", "accumulation=2"]
    assert hotloop("plan", "task.py:plain", *CPU, "--json").document["left_open"] == []


def test_pieces_of_a_batch_normalisation_are_refused_by_its_name(tmp_path: Path, hotloop: Hotloop) -> None:
    """Whether the pieces give another gradient, or are too small to be normalised at all."""
    body = "task = make(model=lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))\n"
    Path("task.py").write_text(SMALL + body)
    for pieces in (2, 5):
        done = hotloop("train", "task.py", "--run", "run", *CPU, "--set", f"accumulation={pieces}")
        assert done.code == 1 and done.err.count("\n") == 1 and not Path("run").exists()
        assert f"accumulation={pieces} " in done.err and "the layer '1' (BatchNorm1d) normalises over" in done.err


def test_plan_is_what_train_then_runs(task: Path, hotloop: Hotloop) -> None:
    for options in ((), ("--set", "optimizer=forloop"), ("--batch-size", "10")):
        planned = hotloop("plan", task, *CPU, *options, "--json").document["plan"]
        trained = hotloop("train", task, *CPU, "--plan", "auto", *options, "--json").document["plan"]
        assert planned == trained


def found_before(task: Path, plan: Plan, ratio: float) -> None:
    """Leaves what a race of the Task would."""
    loaded, base = load_task(str(task)), Plan(device="cpu")
    figures: dict[str, Any] = dict(windows=20, startup_s=0.0, compile_s=0.0, run_s=1.0)
    raced = dict(ratio=ratio, ratio_low=ratio, ratio_high=ratio, verdict="faster" if ratio > 1 else "slower")
    plans = [
        Timing(name="baseline", plan=base.model_dump(), step_ms=10.0, ratio=1.0, verdict="no difference", **figures),
        Timing(
            name="raced", plan=plan.model_dump(), step_ms=10.0 / ratio, parity="bitwise", states=16, **raced, **figures
        ),
    ]
    kept = dict(
        fingerprint=facts_with_fingerprint(loaded).fingerprint, machine=machine_name(), versions=speed_versions()
    )
    save_races(Verdict(task="task", plans=plans, baseline="baseline", winner="raced", steps=4, seconds=1.0, **kept))


@pytest.mark.parametrize(("plan", "ratio"), [(Plan(threads=1), 2.0), (BY_RULES, 0.5)])
def test_plan_counts_what_was_found_before(
    plan: Plan, ratio: float, task: Path, tmp_path: Path, hotloop: Hotloop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: tmp_path / "cache")
    found_before(task, plan, ratio)
    done, document = hotloop("plan", task, *CPU), hotloop("plan", task, *CPU, "--json").document
    if ratio > 1:
        assert "auto runs: threads=1, stored as the fastest" in done.err
        assert f"without that it would run: {BY_RULES.brief()}" in done.err
    else:
        assert f"auto runs: {Plan(**KEPT).brief()}\n" in done.err
        why = f"auto leaves out {BY_RULES.brief()}: it was found slower than the baseline"
        assert why in " ".join(done.err.split())
    assert document["plan"] == (plan if ratio > 1 else Plan(**KEPT)).model_dump() and document["remembered"] is (
        ratio > 1
    )
    trained = hotloop("train", task, *CPU, "--plan", "auto", "--run", "run", "--json")
    assert trained.document["plan"] == document["plan"]


def test_plan_says_what_is_raced_and_proven_before_it_runs(
    task: Path, tmp_path: Path, hotloop: Hotloop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: tmp_path / "cache")
    monkeypatch.setattr("hotloop.core.hardware.machine.find_compiler", lambda: "/usr/bin/g++")
    long = ("plan", task, *CPU, "--epochs", "9999")
    done, document = hotloop(*long), hotloop(*long, "--json").document
    assert f"auto runs: {BY_RULES.brief()}\n" in done.err
    way = Plan(compile="package", **KEPT)
    told = " ".join(done.err.split())
    assert "unless compiled it is faster and proven: --plan auto tries" in told and f" {way.brief()} " in told
    assert document["plan"] == BY_RULES.model_dump()
    assert way.model_dump() in document["compiled"]
    assert any(line.startswith("compile=package: whether") for line in document["left_open"])

    for one in document["compiled"]:
        found_before(task, Plan(**one), 0.5)
    assert hotloop(*long, "--json").document["compiled"] == []


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--set", "compile=all"), "compile='all'"),
        (("--set", "precision=fp16", *CPU), "no loss scaling"),
        (("--device", "xpu:7"), "'xpu:7' isn't on this machine"),
        (("-p", "width=3"), "holds its Task as a value"),
    ],
)
def test_plan_fails_in_one_line(args: tuple[str, ...], says: str, task: Path, hotloop: Hotloop) -> None:
    done = hotloop("plan", task, *args)
    assert done.code == 1 and says in done.err and done.err.count("\n") == 1


def test_plan_takes_the_parameters_of_a_task(tmp_path: Path, hotloop: Hotloop) -> None:
    body = "def task(adam=True):\n    return make(optimizer=torch.optim.Adam if adam else torch.optim.RMSprop)\n"
    Path("task.py").write_text(SMALL + body)
    assert hotloop("plan", "task.py", *CPU, "--json").document["plan"]["optimizer"] == "fused"
    assert hotloop("plan", "task.py", *CPU, "-p", "adam=false", "--json").document["plan"]["optimizer"] == "default"


# --- live and replay

REFUSED_REPLAYS = {
    "no run": (("--plan", "replay:nowhere"), "no run at 'nowhere'"),
    "an axis": (("--plan", "replay:plain", "--set", "threads=1"), "replay:plain together with threads"),
    "one plan": (("--plan", "replay:plain"), "plain used one plan throughout"),
}


def test_a_replay_that_is_not_possible_is_one_line(hotloop: Hotloop, task: Path) -> None:
    assert hotloop("train", "task.py", *CPU, "--run", "plain").code == 0
    for arguments, expected in REFUSED_REPLAYS.values():
        done = hotloop("train", "task.py", "--run", "other", *arguments)
        assert done.code == 1 and expected in done.err and "Traceback" not in done.err
    done = hotloop("train", "--resume", "plain", "--plan", "replay:plain")
    assert done.code == 2 and "follows its own journal" in done.err.replace("\n", " ")


@pytest.mark.parametrize("options, is_live", [((), True), (("--tune",), False)], ids=["auto", "tune"])
def test_tune_searches_before_the_first_step_alone(
    options: tuple[str, ...], is_live: bool, task: Path, hotloop: Hotloop, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts: list[RunContext] = []
    real = api.start_run

    def noting(context: RunContext, *arguments: Any) -> Any:
        contexts.append(context)
        return real(context, *arguments)

    monkeypatch.setattr(api, "start_run", noting)
    assert hotloop("train", "task.py", *CPU, "--plan", "auto", *options, "--run", "run").code == 0
    assert [context.is_live for context in contexts] == [is_live]


def test_auto_begins_with_the_plan_of_the_rules(hotloop: Hotloop, task: Path) -> None:
    done = hotloop("train", "task.py", *CPU, "--plan", "auto", "--run", "run")
    assert done.code == 0 and "from the first step on" in done.err
    assert "before the first step" not in done.err
