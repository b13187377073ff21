"""What notebooks show of results: a table and a picture, with names as text."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import hotloop
from hotloop.core.records.race import Timing, Verdict
from tests.support.profiler.handmade_profiles import made
from tests.support.programs import a_task

HOSTILE = "<script>alert(1)</script>"


class Tags(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.names.append(tag)


def shown(value: object) -> str:
    html = value._repr_html_()  # type: ignore[attr-defined]
    assert {"table", "svg"} <= set(Tags(html).names) and "script" not in Tags(html).names
    return html


def test_a_run_and_its_evaluation(tmp_path: Path) -> None:
    task = a_task(epochs=3, validation=0.25, classes=["a", HOSTILE, "c"], name=HOSTILE)
    run = hotloop.fit(task, run=tmp_path / "run", progress=False)
    assert "finished" in shown(run) and "polyline" in Tags(shown(run)).names
    found = hotloop.evaluate(run, on="validation")
    assert f"{found.loss:.4f}" in shown(found) and "&lt;script&gt;" in shown(found)


def test_the_history_is_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = pytest.importorskip("pandas")
    run = hotloop.fit(a_task(epochs=3), run=tmp_path / "run", progress=False)
    assert isinstance(run.history, pandas.DataFrame)
    assert list(run.history["train_loss"]) == [row["train_loss"] for row in run.epochs]
    monkeypatch.setattr("hotloop.report.notebook.importlib.util.find_spec", lambda name: None)
    assert run.history == run.epochs


def example_race() -> Verdict:
    plans = [
        Timing(name="baseline", step_ms=2.0, ratio=1.0),
        Timing(name=HOSTILE, step_ms=1.0, ratio=2.0, ratio_low=1.8, ratio_high=2.2, verdict="faster"),
    ]
    return Verdict(
        task="t",
        fingerprint="",
        plans=plans,
        baseline="baseline",
        winner="baseline",
        steps=1,
        machine="",
        versions={},
        seconds=0,
    )


def test_a_race_has_error_bars() -> None:
    html = shown(example_race())
    assert Tags(html).names.count("path") == 2 and "1.80 to 2.20" in html


def test_a_result_has_its_view_in_a_process_that_imported_nothing_else() -> None:
    """`hotloop.race`, `profile` and `explain` import no module of runs, which would import the views."""
    code = (
        "import sys\nfrom hotloop.core.records.race import Verdict\nassert 'hotloop.report.notebook' not in sys.modules\n"
        "print(Verdict.model_validate_json(sys.stdin.read())._repr_html_())"
    )
    given = example_race().model_dump_json()
    done = subprocess.run([sys.executable, "-c", code], input=given, capture_output=True, text=True, check=True)
    assert {"table", "svg"} <= set(Tags(done.stdout).names)


def test_a_profile_and_an_explanation() -> None:
    assert "backward" in shown(made())
    assert "yes" in shown(hotloop.explain(a_task()))


def test_a_record_without_a_view_has_none() -> None:
    assert Timing(name="x")._repr_html_() is None
