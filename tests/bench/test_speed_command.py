"""The bench's command: where it measures, what it refuses, what it exits with, and what its records say."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import claim, rewrites
from bench.peers import with_hotloop
from bench.speed import __main__ as bench
from bench.speed import readme
from bench.speed.job import Job
from bench.speed.journal import Journal
from bench.speed.lanes import OURS, PEERS, REDUCED, TUTORIAL, UNSEARCHED, default_plans, ours
from bench.speed.marks import Marks
from bench.speed.running import Failed, Marked, command
from bench.speed.sessions import Bench
from bench.speed.workloads import WORKLOADS
from hotloop.errors import HotloopError
from hotloop.lowering.rewrites import REWRITES
from hotloop.plan import Plan


@pytest.fixture
def claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(claim, "CLAIMS", tmp_path / "claims")
    return tmp_path / "claims"


def called(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["bench.speed", *arguments])
    return bench.main()


def journal_of(path: Path, failure: str | None = None) -> Path:
    measured = {
        "command": "python -m bench.speed W4",
        "taken": "2020-02-02T02:02:02+00:00",
        "machine": {"system": "another", "processor": {"model": "slow"}},
        "versions": {"hotloop": "0.0", "torch": "1.0"},
        "threads": "OMP_NUM_THREADS=7",
    }
    setup = {"device": "cuda", "processor": "slow", "cores": 7, "threads": "OMP_NUM_THREADS=7"}
    setup["accelerators"] = ["H200"]
    journal = Journal(path, resume=True, setup=setup, measured=measured)
    lanes = {name: asdict(Marked(1.0, [(10, 0.1)] * 8, 80, 10**9, 0.5, 0.9)) for name in (TUTORIAL, OURS)}
    lanes[OURS]["failure"] = failure
    key = {"kind": "session", "workload": "W4", "session": 0, "group": 0}
    journal.add(key, lanes=lanes, cores_of_others=0.0)
    limit = {"flops": 1e9, "bytes": 1e6, "data_bytes": 0, "least_ms": 5.0}
    journal.add({"kind": "workload", "workload": "W4"}, limit=limit, missing={"skorch": "it wasn't there"})
    return path


def test_every_lane_is_told_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: Any = None
    for asked, plan in (("auto", "auto"), ("baseline", "baseline"), ("threads=1", "baseline"), (*UNSEARCHED, None)):
        job = Job(WORKLOADS["W4"], 1, Marks(sys.stdout), (asked,), "cuda")
        given = with_hotloop.planned(job, loaded)
        assert given["plan"] == plan and given["axes"]["device"] == "cuda" and "is_live" not in given
    given = with_hotloop.planned(Job(WORKLOADS["W4"], 1, Marks(sys.stdout), ("train-auto",), "cpu"), loaded)
    assert given == {"plan": "auto", "axes": {"device": "cpu"}, "is_live": True}
    monkeypatch.setattr(with_hotloop, "cached_or_tuned_plan", lambda task, wanted: (wanted.plan, "found"))
    given = with_hotloop.planned(Job(WORKLOADS["W4"], 1, Marks(io.StringIO()), (REDUCED,), "cuda"), loaded)
    assert given["plan"] == Plan(device="cuda", precision="bf16")
    for peer in PEERS:
        assert command(peer.module, "W4", peer.options, 1, "cuda")[-2:] == ["--device", "cuda"]


def test_what_was_trained_is_read_back_after_memory_and_clock_were(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []
    read: list[bool] = []

    def started(context: object, run: Path) -> tuple[Any, None]:
        folders.append(run.parent)
        return SimpleNamespace(plan=Plan()), None

    monkeypatch.setattr(with_hotloop, "load_task", lambda *given: None)
    monkeypatch.setattr(with_hotloop, "start_run", started)
    monkeypatch.setattr(with_hotloop.hotloop, "load_model", lambda run: read.append(folders[0].is_dir()))
    monkeypatch.setattr(with_hotloop, "judged", lambda model, job: (0.5, 0.9))
    evaluate = with_hotloop.train(Job(WORKLOADS["W4"], 1, Marks(io.StringIO()), ("baseline",)))
    assert not read and evaluate() == (0.5, 0.9)
    assert read == [True] and not folders[0].exists()


def test_who_computes_on_the_cpu_alone_is_left_out_elsewhere_with_the_reason(tmp_path: Path) -> None:
    made = Bench([WORKLOADS["W4"]], PEERS, Journal(tmp_path / "j.jsonl", resume=True), print, device="cuda")
    why = {lane.name: made.missing(WORKLOADS["W4"], lane) for lane in PEERS}
    assert all("CPU alone" in why[name] for name in ("jax-scan", "jax-step", "keras-jax"))
    assert not why[TUTORIAL]
    assert not any(lane.cpu_alone and lane in made.able(WORKLOADS["W4"]) for lane in PEERS)


def test_fewer_bits_are_raced_on_an_accelerator_where_nobody_says_otherwise() -> None:
    assert [one.name for one in bench.own_lanes(default_plans("cuda").split("/"))] == [OURS, f"{OURS}:{REDUCED}"]
    assert bench.plans_of(bench.parsed(["W4"])) == ["tune"]


def test_what_compiles_nothing_gets_no_start_of_its_own() -> None:
    plans = ("tune", "tune,precision=bf16", "compile=step,threads=1", "compile=forward")
    compiles = {plan: ours(plan).compiles for plan in plans}
    assert all(compiles.values())
    assert not any(ours(plan).compiles for plan in ("baseline", "optimizer=fused,threads=1", "compile=none"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--plans", "auto/pakage"], "--plans pakage; expected auto, tune, baseline, axis=value"),
        (["--plans", "auto,precision"], "--plans auto,precision; expected auto"),
        (["--plans", "auto,precision=bf61"], "bf61"),
        (["--plans", "best,precision=bf16"], "--plans best,precision=bf16; expected auto"),
        (["--plans", "compil=step"], "compil"),
        (["--plans", "compile=step,threads"], "threads"),
        (["--plans", "tune,precision=bf16"], "Put another before it, as in tune/tune,precision=bf16"),
        (["--device", "warp"], "warp"),
        (["--device", "cuda:1"], "CUDA_VISIBLE_DEVICES"),
        (["--minutes", "-3"], "--minutes: -3; expected a number above 0"),
        (["--minutes", "0"], "--minutes: 0; expected"),
        (["--minutes", "nan"], "--minutes: nan; expected"),
        (["--rounds", "2.5"], "--rounds: 2.5; expected a whole number above 0"),
        (["--whole-run", "long"], "--whole-run: long; expected"),
    ],
)
def test_a_mistake_is_told_before_anything_is_measured(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.parsed(["W4", *arguments])
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("error", [HotloopError("no network"), Failed("tutorial: no network")])
def test_what_cannot_be_begun_is_one_line(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_network(kind: str) -> None:
        raise error

    monkeypatch.setattr(bench, "lay_down", no_network)
    assert called(monkeypatch, "W4", "--journal", str(tmp_path / "j.jsonl")) == 1
    assert capsys.readouterr().err == f"{error}\n"


@pytest.mark.parametrize(("failure", "code"), [(None, 0), ("it broke", 1)])
def test_the_exit_code_says_whether_hotloop_failed(
    failure: str | None, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = journal_of(tmp_path / "j.jsonl", failure)
    assert called(monkeypatch, "--table", str(path)) == code


def test_a_claim_says_where_and_with_what_its_rows_were_measured(
    tmp_path: Path, claims: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = journal_of(tmp_path / "j.jsonl")
    assert called(monkeypatch, "--table", str(path), "--record") == 0
    folder = claims / "2020-02-02_speed-cuda"
    record = json.loads((folder / "record.json").read_text())
    assert record["machine"]["system"] == "another" and record["versions"]["torch"] == "1.0"
    assert record["command"] == "python -m bench.speed W4" and record["threads"] == "OMP_NUM_THREADS=7"
    assert record["limits"]["W4"]["least_ms"] == 5.0 and record["targets"]
    text = capsys.readouterr().out
    assert text.startswith("# On cuda: H200, beside slow, 7 cores, OMP_NUM_THREADS=7\n") and "## Targets" in text
    assert "not run: skorch: it wasn't there" in text


def test_figures_stand_between_the_comments_of_a_readme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = journal_of(tmp_path / "j.jsonl"), tmp_path / "README.md"
    page.write_text(f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n")
    for _ in range(2):
        assert called(monkeypatch, "--table", str(path), "--readme", str(page)) == 0
        lines = page.read_text().splitlines()
        assert lines[:2] == ["before", readme.BEGIN] and lines[-2:] == [readme.END, "after"] and "old" not in lines
        assert "on cuda: H200, beside slow, 7 cores" in lines[2]
        fastest = "tutorial's loop, 1.00 (1.00 to 1.00)"
        assert lines[-3] == f"| W4 MLP 784-128-10, batch 64 | 10 ms | 1.00 (1.00 to 1.00) | not run | {fastest} |"
    page.write_text("nothing\n")
    assert called(monkeypatch, "--table", str(path), "--readme", str(page)) == 1
    assert "has no place for the figures" in capsys.readouterr().err and page.read_text() == "nothing\n"
    own = bench.parsed(["--readme"]).readme.read_text()
    assert own.count(readme.BEGIN) == 1 and f"| {' | '.join(readme.HEAD)} |" in own


def test_a_journal_that_does_not_say_where_it_was_measured_makes_no_claim(
    tmp_path: Path, claims: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = journal_of(tmp_path / "j.jsonl")
    path.write_text('{"setup": null}\n' + path.read_text().split("\n", 1)[1])
    assert called(monkeypatch, "--table", str(path), "--record") == 1
    assert "doesn't say where it was measured" in capsys.readouterr().err and not claims.exists()


def test_accelerators_and_their_driver_are_part_of_what_was_measured_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "device_names", lambda: ["cpu", "cuda:0"])
    monkeypatch.setattr(claim.machine, "describe_device", lambda name, vectors: SimpleNamespace(model="H200"))
    monkeypatch.setattr(claim.machine, "nvidia_gpus", lambda: (["H200"], "570"))
    found = claim.circumstances()
    assert found["machine"]["accelerators"] == ["H200"] and found["versions"]["nvidia_driver"] == "570"


def test_a_claim_says_of_which_sources_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    for text in ("one", "another", "one"):
        (tmp_path / "__init__.py").write_text(text)
        monkeypatch.setattr(claim.hotloop, "__file__", str(tmp_path / "__init__.py"))
        claim.sources.cache_clear()
        said.append(claim.circumstances()["versions"]["hotloop_sources"])
    claim.sources.cache_clear()
    assert said[0] == said[2] != said[1]
    monkeypatch.setattr(claim, "ROOT", tmp_path)
    assert claim.commit() is None
    for arguments in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a", "--allow-empty"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    head = subprocess.run(["git", "-C", str(tmp_path), "log", "--format=%H"], capture_output=True, text=True)
    assert claim.circumstances()["commit"] == head.stdout.strip()


def test_a_bench_with_other_threads_or_elsewhere_does_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = bench.parsed(["W4", "--full", "--journal", str(tmp_path / "j.jsonl")])
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    measured = bench.opened(asked).measured
    assert measured is not None and measured["threads"] == "OMP_NUM_THREADS=2" and measured["versions"]["hotloop"]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(HotloopError, match="OMP_NUM_THREADS=2"):
        bench.opened(asked)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    bench.opened(asked)
    asked.device = "cuda"
    with pytest.raises(HotloopError, match="device=cpu"):
        bench.opened(asked)


def test_what_was_measured_is_not_overwritten_by_a_short_bench(tmp_path: Path) -> None:
    path = journal_of(tmp_path / "full.jsonl")
    before = path.read_bytes()
    with pytest.raises(HotloopError, match="--fresh"):
        bench.opened(bench.parsed(["W4", "--journal", str(path)]))
    assert path.read_bytes() == before
    assert not bench.opened(bench.parsed(["W4", "--journal", str(path), "--fresh"])).rows


def test_a_file_that_is_no_journal_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not JSON\n")
    with pytest.raises(HotloopError, match="isn't a journal"):
        Journal(path, resume=True)
    assert path.read_text() == "not JSON\n"


@pytest.mark.more
def test_strangers_include_networks_of_timm() -> None:
    """In a process of its own, since a stand-in may take torchvision's place; nobody else finds that."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm isn't installed (pip install --no-deps timm)")
    script = """
import sys
from bench.zoo import FIRST, NAMES, TIMM, task
for name in TIMM:
    made = task(name)
    images, labels = made.data
    made.step(made.model(), (images[:2], labels[:2])).backward()
print(len(set(FIRST) & set(NAMES)), len(TIMM), sum(type(module).__name__ == "StandIn" for module in sys.modules.values()))
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["11", "5", "0"]


def raced(monkeypatch: pytest.MonkeyPatch, arguments: list[str], **row: object) -> int:
    """What `bench.rewrites` exits with where each race of a rewrite comes to such a row."""
    made = lambda name, which, *how: [{"network": name, "rewrites": one, **row} for one in which]  # noqa: E731
    monkeypatch.setattr(rewrites, "measured", made)
    monkeypatch.setattr(sys, "argv", ["rewrites", *arguments])
    return rewrites.main()


def test_the_record_of_rewrites_says_what_was_asked_for(claims: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["--networks", "lenet,tabular", "--rewrites", "pool_as_max", "--seconds", "5"]
    assert raced(monkeypatch, asked) == 0 and not claims.exists()
    assert raced(monkeypatch, [*asked, "--record"]) == 0
    (path,) = claims.rglob("record.json")
    record = json.loads(path.read_text())
    assert (
        record["command"]
        == "python -m bench.rewrites --networks lenet,tabular --rewrites pool_as_max --seconds 5 --record"
    )
    assert [row["network"] for row in record["rows"]] == ["lenet"]  # the other has nothing for it


def test_a_network_that_all_of_them_leave_alone_is_not_raced_with_them() -> None:
    stem, digits = (rewrites.NETWORKS[name] for name in ("stem", "digits"))
    assert stem.asked(["conv_in_pool", "all", "pool_as_max"]) == []
    assert digits.asked(["mm_by_onednn", "all", "pool_as_max"]) == ["all", "pool_as_max"]
    assert stem.asked(["mm_as_sum", "all"]) == [] and stem.asked(["mm_as_sum", "all"], "cuda") == ["mm_as_sum", "all"]
    assert digits.asked(["draw_by_words", "conv_in_pool"], "cuda") == ["conv_in_pool"]


def test_rewrites_on_a_device_that_is_not_there_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(SystemExit) as caught:
        raced(monkeypatch, ["--device", "cuda"])
    assert caught.value.code == 2 and "isn't on this machine" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("row", "code"), [({"parity": "broken"}, 1), ({"failure": "it broke"}, 1), ({"parity": "bitwise"}, 0)]
)
def test_the_bench_of_rewrites_fails_where_one_is_broken(
    row: dict[str, str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert raced(monkeypatch, ["--networks", "lenet"], **row) == code


def test_a_rewrite_that_there_is_not_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as ended:
        raced(monkeypatch, ["--rewrites", "all,pool"])
    assert (
        ended.value.code == 2
        and f"pool is no rewrite; expected some of {', '.join(REWRITES)}" in capsys.readouterr().err
    )
