"""The report of a run in a real browser: each part is there and right, in light and dark, on a phone, with hostile names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from hotloop.core.files.run_folder import StoredRun
from hotloop.report.profile import write_charts
from hotloop.report.run_comparison import compare_runs, comparison_report
from hotloop.report.run_report import document_report, run_report
from hotloop.report.study import write_study
from hotloop.training.run import Run
from tests.support.processes.chromium import needs_browser
from tests.support.processes.chromium_session import CONTRAST, Page, browser_page
from tests.support.profiler.handmade_profiles import made
from tests.support.reported_run import HOSTILE, example_study, reported_run, trained

pytestmark = needs_browser

MOST_BYTES = 6e6


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Iterator[Page]:
    with browser_page(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return reported_run(tmp_path_factory.mktemp("runs") / "first")


@pytest.fixture(scope="module")
def report(run: Run, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(run_report(StoredRun.read(run.path), [made()]), encoding="utf-8")
    return path


def test_each_part_of_a_report_is_shown_and_right(page: Page, report: Path, run: Run) -> None:
    assert report.stat().st_size < MOST_BYTES
    page.errors.clear()
    page.requests.clear()
    page.open(report.as_uri())
    page.draw_all()
    text = page.text()
    titles = page.value("[...document.querySelectorAll('h2')].map(e => e.textContent)")
    expected = ["Summary", "Curves", "Layers", "Race", "Proof", "Evaluation", "Profile", "Journal", "Environment"]
    assert titles == expected  # a Task from Python has no source
    assert "finished" in text and "111 parameters" in text and "all numbers are equal" in text
    best = min(run.epochs, key=lambda row: row["validation_loss"])
    assert f"{best['validation_loss']:.4g}\nbest validation loss (epoch {best['epoch']})" in text
    drawn = page.value(
        "Object.fromEntries([...document.querySelectorAll('figure')].map(f => [f.querySelector('figcaption').textContent,"
        " f.querySelector('[data-figure]').data.map(t => [t.name, Array.from(t.y || [])])]))"
    )
    losses = dict(drawn["Loss"])
    for part in ("train", "validation"):
        assert losses[part] == pytest.approx([row[f"{part}_loss"] for row in run.epochs], rel=1e-4)
    assert losses[f"best epoch ({best['epoch']})"] == pytest.approx([best["validation_loss"]], rel=1e-4)
    assert {"Accuracy", "Learning rate", "Speed", "Where a step's time goes"} <= drawn.keys()
    assert len(dict(drawn["Accuracy"])["train"]) == 2  # of the sample, after the first and the last epoch
    widths = page.value("[...document.querySelectorAll('.errorbar')].map(e => e.getBBox().width)")
    assert max(widths) > 10, widths  # the interval of the raced plan
    assert page.value("document.querySelectorAll('.main-svg').length") >= len(drawn)
    mistakes = json.loads((run.path / "evaluation/pictures.json").read_text())
    assert page.value("document.querySelectorAll('.mistakes img').length") == len(mistakes) > 0
    assert page.value("[...document.querySelectorAll('.mistakes img')].every(i => i.naturalWidth === 6)")
    assert page.errors == [] and page.outside() == []


def test_hostile_names_stay_text(page: Page, report: Path) -> None:
    page.open(report.as_uri())
    page.draw_all()
    assert HOSTILE in page.value("document.querySelector('h1').textContent")
    assert page.value("window.hacked === undefined")
    assert page.value('document.querySelectorAll(\'img[src="x"], image[href="x"]\').length') == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 360])
def test_a_report_is_readable_in_light_and_dark_and_on_a_phone(
    page: Page, report: Path, scheme: str, width: int
) -> None:
    page.width(width)
    page.colours(scheme)
    page.open(report.as_uri())
    page.value("document.querySelectorAll('details').forEach(e => e.open = true)")
    page.draw_all()
    assert page.value(CONTRAST) == []
    assert page.value("document.documentElement.scrollWidth") <= width
    assert page.value(
        "[...document.querySelectorAll('[role=img], img')].every(e => (e.ariaLabel || e.alt || '').length > 3)"
    )
    ink, back = page.value("[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]")
    assert (sum(map(int, ink[4:-1].split(","))) > sum(map(int, back[4:-1].split(",")))) == (scheme == "dark")


def test_a_low_contrast_is_noticed(page: Page, tmp_path: Path) -> None:
    page.colours("light")
    (tmp_path / "pale.html").write_text("<body style='background: white'><p style='color: #999'>pale</p></body>")
    page.open((tmp_path / "pale.html").as_uri())
    assert len(page.value(CONTRAST)) == 1


def test_a_request_to_another_host_is_noticed(page: Page, tmp_path: Path) -> None:
    page.requests.clear()
    (tmp_path / "outside.html").write_text("<script src='https://example.invalid/plotly.js'></script>")
    page.open((tmp_path / "outside.html").as_uri())
    assert page.outside() == ["https://example.invalid/plotly.js"]


def test_a_run_of_5000_epochs_opens_quickly(page: Page, run: Run, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    row = run.epochs[-1]
    rows = [row | {"epoch": n, "step": 4 * n, "train_loss": float(rng.random())} for n in range(1, 5001)]
    stored = replace(StoredRun.read(run.path), epochs=rows)
    path = tmp_path / "long.html"
    path.write_text(run_report(stored), encoding="utf-8")
    assert path.stat().st_size < MOST_BYTES
    page.open("about:blank")
    began = monotonic()
    page.open(path.as_uri())
    page.until("document.querySelector('.main-svg')")
    print(f"a report of 5,000 epochs opened in {monotonic() - began:.2f} s")
    assert page.value("document.querySelector('[data-figure]').data[0].x.length") <= 2001


def test_a_failure_is_at_the_top_with_its_fix(page: Page, run: Run, tmp_path: Path) -> None:
    stored = StoredRun.read(run.path)
    failure = {
        "event": "failure",
        "time": 1.0,
        "kind": "NonFiniteError",
        "message": "the loss is nan at step 7. Lower the learning rate",
    }
    failed = replace(stored, events=[*stored.events[:1], failure])
    (tmp_path / "failed.html").write_text(run_report(failed), encoding="utf-8")
    page.open((tmp_path / "failed.html").as_uri())
    text = page.text()
    assert "Lower the learning rate" in text and text.index("Lower the learning rate") < text.index("Summary")
    assert "--resume" in text


def test_a_profile_has_a_report_of_its_own(page: Page, tmp_path: Path) -> None:
    page.errors.clear()
    (tmp_path / "profile.html").write_text(document_report([made()]), encoding="utf-8")
    page.open((tmp_path / "profile.html").as_uri())
    page.draw_all()
    assert "features.0" in page.text() and page.value("document.querySelectorAll('.main-svg').length") >= 2
    assert page.errors == []


def test_the_picture_of_modules_fills_its_page(page: Page, tmp_path: Path) -> None:
    page.width(1200, 900)
    write_charts(made(), tmp_path / "pictures")
    page.open((tmp_path / "pictures/modules.html").as_uri())
    page.until("document.querySelectorAll('.main-svg').length")
    shares = "[r.width / innerWidth, r.height / innerHeight]"
    width, height = page.value(
        f"(() => {{ const r = document.querySelector('.main-svg').getBoundingClientRect(); return {shares}; }})()"
    )
    assert 0.9 < width <= 1 and 0.9 < height <= 1


def test_runs_over_each_other(page: Page, run: Run, tmp_path: Path) -> None:
    other = trained(tmp_path / "second", epochs=2, batch_size=20)
    runs = [StoredRun.read(run.path), StoredRun.read(other.path)]
    (tmp_path / "compare.html").write_text(comparison_report(compare_runs(runs), runs), encoding="utf-8")
    page.errors.clear()
    page.open((tmp_path / "compare.html").as_uri())
    page.draw_all()
    text = page.text()
    assert "task.batch_size" in text and "Validation loss by time" in text
    assert page.value("document.querySelector('[data-figure]').data.map(t => t.x.length)") == [4, 2]
    assert page.errors == []


def test_a_study(page: Page, tmp_path: Path) -> None:
    result, study = example_study()
    write_study(tmp_path / "study.html", result, study)
    page.errors.clear()
    page.requests.clear()
    page.open((tmp_path / "study.html").as_uri())
    page.draw_all()
    captions = page.value("[...document.querySelectorAll('figcaption')].map(e => e.textContent)")
    assert captions == [
        "validation loss of each trial",
        "validation loss of each epoch",
        "Importance of the parameters",
        "Parallel coordinates",
        "Slices",
        "Contours",
    ]
    assert page.value("[...document.querySelectorAll('[data-figure]')].every(e => e.querySelector('.main-svg'))")
    names = page.value("document.querySelectorAll('[data-figure]')[1].data.map(trace => trace.name)")
    assert f"trial {study.best_trial.number} (winner)" in names
    assert page.value("document.querySelectorAll('tr.marked td')[0].textContent") == str(study.best_trial.number)
    assert HOSTILE in page.value("document.querySelector('h1').textContent") and page.value("!window.hacked")
    assert page.errors == [] and page.outside() == []
