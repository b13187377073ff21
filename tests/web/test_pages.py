"""The pages that hotloop writes, drawn by a real browser: the pictures are there, and nothing fails."""

from __future__ import annotations

import base64
import re
import struct
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from hotloop.core.records.advice import HardwareAdvice, MachineAdvice, StepCurve
from hotloop.core.records.race import Crossover, RaceScaling, Timing, Verdict
from hotloop.core.records.training import Evaluation, Mistake, Picture
from hotloop.report.advice import cost_front, write_advice
from hotloop.report.evaluation import most_frequent, write_confusion, write_mistakes
from hotloop.report.learning_curves import write_curves
from hotloop.report.profile import write_charts
from hotloop.report.race import write_scaling
from tests.support.processes.chromium import Drawn, draw, needs_browser
from tests.support.profiler.handmade_profiles import made

NAMES = ["T-shirt", "<b>Coat & hat</b>", "Bag"]
CONFUSION = [[91, 7, 0], [13, 80, 0], [0, 2, 57]]


def picture(number: int, channels: int = 1) -> Picture:
    pixels = np.random.default_rng(number).integers(0, 256, (12, 10, channels), np.uint8)
    return Picture(height=12, width=10, channels=channels, pixels=pixels.tobytes())


def evaluation(mistakes: int = 8, *, channels: int = 0, classes: int = 3) -> Evaluation:
    found = [
        Mistake(
            index=100 + place,
            true=place % 3,
            predicted=(place + 1) % 3,
            confidence=0.99 - place / 50,
            picture=picture(place, channels) if channels else None,
        )
        for place in range(mistakes)
    ]
    many = classes > 3
    return Evaluation(
        run="runs/first",
        on="test",
        weights="best",
        epoch=3,
        samples=250,
        loss=0.25,
        metrics={"accuracy": 0.912},
        classes=[f"class {place}" for place in range(classes)] if many else NAMES,
        confusion=np.eye(classes, dtype=int).tolist() if many else CONFUSION,
        mistakes=found,
    )


def epochs(count: int) -> list[dict]:
    return [
        {
            "epoch": number,
            "train_loss": 1 / number,
            "validation_loss": 1.1 / number,
            "validation_accuracy": 1 - 0.5 / number,
        }
        for number in range(1, count + 1)
    ]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory) -> Callable[[Path], Drawn]:
    profile = tmp_path_factory.mktemp("browser")
    return lambda page: draw(page, profile)


def pixels_of(address: str) -> np.ndarray:
    """The rows of an unfiltered PNG of bytes in a data URI."""
    content = base64.b64decode(address.partition("base64,")[2])
    parts, place = {}, 8
    while place < len(content):
        (length,), kind = struct.unpack(">I", content[place : place + 4]), content[place + 4 : place + 8]
        parts[kind] = parts.get(kind, b"") + content[place + 8 : place + 8 + length]
        place += 12 + length
    width, height, _, colours = struct.unpack(">IIBB", parts[b"IHDR"][:10])
    channels = {0: 1, 2: 3}[colours]
    rows = np.frombuffer(zlib.decompress(parts[b"IDAT"]), np.uint8).reshape(height, 1 + width * channels)
    assert not rows[:, 0].any(), "the rows are filtered"
    return rows[:, 1:].reshape(height, width, channels)


@needs_browser
def test_a_script_that_fails_would_be_seen(drawn, tmp_path) -> None:
    page = tmp_path / "broken.html"
    page.write_text(
        "<html><body><svg class='main-svg'><text>a</text></svg><script>nothing.at.all()</script></body></html>"
    )
    found = drawn(page)
    assert found.texts == ["a"] and found.shapes["main-svg"] == 1
    assert any("nothing is not defined" in line for line in found.errors)


@needs_browser
def test_learning_curves(drawn, tmp_path) -> None:
    write_curves(epochs(5), tmp_path / "curves.html")
    found = drawn(tmp_path / "curves.html")
    assert found.errors == []
    assert found.shapes["js-line"] == 3 + 2  # loss of both parts and accuracy of one; two in the legend
    assert found.shapes["point"] == 3 * 5
    for words in ("Learning curves", "loss", "accuracy", "train", "validation", "epoch"):
        assert words in found.texts
    assert [text for text in found.texts if text.isdigit()][:5] == ["1", "2", "3", "4", "5"]


@pytest.mark.more
@needs_browser
def test_learning_curves_of_one_epoch_have_points(drawn, tmp_path) -> None:
    write_curves(epochs(1), tmp_path / "curves.html")
    found = drawn(tmp_path / "curves.html")
    assert found.errors == [] and found.shapes["point"] == 3


@pytest.mark.more
@needs_browser
def test_a_confusion_matrix(drawn, tmp_path) -> None:
    write_confusion(evaluation(), tmp_path / "confusion.html")
    found = drawn(tmp_path / "confusion.html")
    assert found.errors == []
    assert found.shapes["heatmaplayer"] >= 1
    assert any(address.startswith("data:image/png") for address in found.pictures)
    for name in NAMES:  # markup in a name is text
        assert found.texts.count(name) == 2, found.texts
    for row in CONFUSION:
        for count in row:
            assert not count or str(count) in found.texts
    below = "91.20% right, 250 samples; a row is one true class, its colours are shares of it"
    assert f"Confusions on test data{below}" in found.texts


@pytest.mark.more
@needs_browser
def test_a_large_confusion_matrix_is_drawn_without_numbers(drawn, tmp_path) -> None:
    write_confusion(evaluation(classes=150), tmp_path / "confusion.html")
    found = drawn(tmp_path / "confusion.html")
    assert found.errors == [] and any(address.startswith("data:image/png") for address in found.pictures)
    assert "1" not in found.texts and "class 7" not in found.texts


@pytest.mark.more
@needs_browser
@pytest.mark.parametrize("channels", [1, 3], ids=["grey", "colour"])
def test_mistakes_are_the_pictures_themselves(drawn, tmp_path, channels) -> None:
    shown = evaluation(channels=channels)
    write_mistakes(shown, tmp_path / "mistakes.html")
    found = drawn(tmp_path / "mistakes.html")
    assert found.errors == []
    assert len(found.pictures) == len(shown.mistakes)
    for address, mistake in zip(found.pictures, shown.mistakes, strict=True):
        assert pixels_of(address).tobytes() == mistake.picture.pixels
    assert "T-shirt<b>Coat & hat</b> 99.0%" in found.texts
    assert "Bag" + "T-shirt 95.0%" in found.texts


@pytest.mark.more
@needs_browser
def test_mistakes_without_pictures_are_a_table(drawn, tmp_path) -> None:
    write_mistakes(evaluation(), tmp_path / "mistakes.html")
    found = drawn(tmp_path / "mistakes.html")
    assert found.errors == [] and found.pictures == []
    for words in ("sample", "confidence", "107", "99.0%", "<b>Coat & hat</b>"):
        assert words in found.texts, found.texts


@pytest.mark.more
@needs_browser
def test_no_mistakes(drawn, tmp_path) -> None:
    write_mistakes(evaluation(0), tmp_path / "mistakes.html")
    found = drawn(tmp_path / "mistakes.html")
    assert found.errors == []
    assert any("No mistakes on test data" in text for text in found.texts)


class Outside(HTMLParser):
    """Addresses that a page would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "img", "iframe"):
            self.found += [value or "" for name, value in attributes if name in ("src", "href")]


def test_pages_need_nothing_but_themselves(tmp_path) -> None:
    write_curves(epochs(2), tmp_path / "curves.html")
    write_confusion(evaluation(), tmp_path / "confusion.html")
    write_mistakes(evaluation(channels=1), tmp_path / "mistakes.html")
    for page in tmp_path.iterdir():
        outside = Outside()
        text = page.read_text(encoding="utf-8")
        outside.feed(text)
        assert outside.found == []
        assert re.search(r"<title>(Learning curves|(Confusions|Mistakes): runs/first)</title>", text)


def test_the_most_frequent_confusions_come_first() -> None:
    found = most_frequent(evaluation(), 2)
    assert [(c.true, c.predicted, c.samples) for c in found] == [(NAMES[1], NAMES[0], 13), (NAMES[0], NAMES[1], 7)]
    assert found[0].share == 13 / 93
    assert len(most_frequent(evaluation(), 10)) == 3


@pytest.mark.more
@needs_browser
def test_a_profile_has_its_phases_its_modules_and_the_roofline(tmp_path, drawn) -> None:
    written = write_charts(made(), tmp_path / "seen")
    assert [path.name for path in written] == ["phases.html", "modules.html", "roofline.html"]
    phases, modules, roofline = map(drawn, written)
    assert phases.errors == modules.errors == roofline.errors == []
    assert any(text.startswith("backward") and "60 ms" in text for text in phases.texts)
    assert phases.shapes["point"] == 5  # a piece of the bar for each phase
    shown = " ".join(modules.texts)
    assert modules.shapes["slice"] == 5 and "Net[red]" in shown and "<b>Odd</b>" in shown
    assert roofline.shapes["point"] == 3  # modules without others inside, of known counts
    assert {"limit, fp32", "limit, bf16", "features.0", "head"} <= set(roofline.texts)


MARGIN = 60
"""Pixels left of where points are counted from."""


def scaled(at: float) -> RaceScaling:
    """Two plans at widths of 100 and 1000 that overtake each other in between."""
    figures = dict(
        task="t", fingerprint="", baseline="baseline", winner=None, steps=1, machine="", versions={}, seconds=0
    )
    races = [
        Verdict(plans=[Timing(name="baseline", step_ms=1.0), Timing(name="<i>", step_ms=step_ms)], **figures)
        for step_ms in (2.0, 0.5)
    ]
    crossing = Crossover(name="<i>", at=at, low=200, high=500, faster="above", reason="arithmetic decides")
    return RaceScaling(parameter="width", values=["100", "1000"], races=races, crossings=[crossing])


@pytest.mark.more
@needs_browser
def test_a_crossing_is_named_beside_its_line_between_the_sizes(tmp_path, drawn) -> None:
    write_scaling(scaled(316), tmp_path / "sizes.html")
    found = drawn(tmp_path / "sizes.html")
    assert found.errors == [] and "<i>: 316" in found.texts
    left, right = (float(x) for x in re.findall(r'class="point" transform="translate\(([\d.]+),', found.html)[:2])
    (line,) = map(float, re.findall(r'<path data-index="0"[^>]* d="M([\d.]+),', found.html))
    (text,) = map(float, re.findall(r'class="cursor-pointer" transform="translate\(([\d.]+),', found.html))
    assert right - left > 500  # of 1200 pixels
    assert line == pytest.approx(MARGIN + (left + right) / 2, abs=2)  # 316 is halfway in powers of ten
    assert text == pytest.approx(line, abs=2)


def test_pictures_without_anything_to_show_are_not_written(tmp_path) -> None:
    assert write_charts(made(phases={}, modules=[]), tmp_path / "seen") == []


def advised() -> HardwareAdvice:
    """Four machines, of which one is slower and dearer than another."""
    figures = dict(
        gpus=1, form="workstation", batch_size=32, step_ms=1.0, low_ms=0.8, high_ms=1.2, memory_bytes=1, fits="fits",
        memory_there_bytes=10.0, accumulation=1, way="none", cost_per_1000_steps=1.0, energy_kwh=None, bound="memory",
        parts={}, source="", meets=True,
    )  # fmt: skip
    given = (("<i>", 36e3, 0.0), ("slow", 7200.0, 9.0), ("middle", 3600.0, 4.0), ("fast", 360.0, 20.0))
    rows = [MachineAdvice(name=name, chip=name, run_s=run_s, cost=cost, **figures) for name, run_s, cost in given]
    curves = [
        StepCurve(name="CPU", is_cpu=True, batch_sizes=[1, 100], step_ms=[1, 100]),
        StepCurve(name="fast", is_cpu=False, batch_sizes=[1, 100], step_ms=[10, 10]),
    ]
    return HardwareAdvice(
        subject="t", stage=1, reason="enough", pays_from=10, pays="A GPU pays.", batch_size=32, steps=9, epochs=1,
        precision="fp32", plan="baseline", parameters=1, flops=1, memory={}, machines=rows, curves=curves,
    )  # fmt: skip


def test_the_front_leaves_out_what_is_slower_and_dearer() -> None:
    assert [row.name for row in cost_front(advised().machines)] == ["fast", "middle", "<i>"]


@pytest.mark.more
@needs_browser
def test_advice_has_its_machines_its_front_and_the_crossing(drawn, tmp_path) -> None:
    write_advice(advised(), tmp_path / "advice.html")
    found = drawn(tmp_path / "advice.html")
    assert found.errors == []
    assert found.shapes["point"] == 4
    assert {"<i>", "slow", "middle", "fast", "a GPU probably pays from batch 10 on"} <= set(found.texts)
    assert any("Stage 1 of 4: enough. A GPU pays." in text for text in found.texts)
