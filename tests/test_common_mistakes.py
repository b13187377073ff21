"""Common mistakes: the error says the line of code that fixes them; and what is known in Python as on the command line."""

from __future__ import annotations

import re
from pathlib import Path

import plotly.graph_objects as go
import pytest
import torch
from plotly.offline import get_plotlyjs
from torch import nn

import hotloop
from hotloop.core.records.race import Timing
from hotloop.errors import HotloopError, PlanError, TaskError, did_you_mean
from hotloop.plan import Plan
from hotloop.report.html import CONFIG, write_page
from hotloop.training.run import Run
from hotloop.tuning import race_cache
from tests.support.killed_training import at_step, train
from tests.support.programs import a_task, trained

IMAGES = torch.zeros(20, 1, 4, 4), torch.arange(20) % 3


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(6, 3), nn.ReLU()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def said(tmp_path: Path, **fields: object) -> str:
    with pytest.raises(HotloopError) as caught:
        trained(a_task(**fields), tmp_path / "run")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_forgotten_flatten(tmp_path: Path) -> None:
    message = said(tmp_path, model=lambda: nn.Sequential(nn.Linear(16, 3)), data=IMAGES)
    assert "nn.Flatten()" in message
    trained(a_task(model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), data=IMAGES), tmp_path / "flat")


def test_a_linear_layer_of_another_width_is_not_taken_for_one(tmp_path: Path) -> None:
    assert "Flatten" not in said(tmp_path, model=lambda: nn.Sequential(nn.Linear(17, 3)), data=IMAGES)


def test_an_optimizer_that_is_made_already() -> None:
    with pytest.raises(TaskError) as caught:
        a_task(optimizer=torch.optim.SGD(nn.Linear(6, 3).parameters(), lr=0.1))
    assert "optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)" in str(caught.value)


def test_layers_in_a_plain_list(tmp_path: Path) -> None:
    assert "self.layers = nn.ModuleList(...)" in said(tmp_path, model=Listed)


def test_typos_name_what_is_meant() -> None:
    for make, near in (
        (lambda: a_task(epoch=3), "epochs"),
        (lambda: a_task(batchsize=3), "batch_size"),
        (lambda: Plan(threds=1), "threads"),
        (lambda: Plan(compile="stepp"), "step"),
    ):
        with pytest.raises((TaskError, PlanError), match=f"Did you mean '{near}'"):
            make()
    assert did_you_mean("qqqq", ["epochs"]) == ""


def test_a_verdict_without_an_interval_is_not_remembered() -> None:
    dropped = Timing(name="fused", plan={"optimizer": "fused"}, ratio=0.4, verdict="slower", left_out=True)
    assert not race_cache._is_worth_caching(race_cache._with_interval(dropped))
    known = dropped.model_copy(update={"ratio_low": 0.3, "ratio_high": 0.5})
    assert race_cache._is_worth_caching(race_cache._with_interval(known))
    assert race_cache._with_interval(known).verdict == "slower"


def test_no_page_has_an_outside_address(tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", "title", go.Figure(go.Scatter(x=[1], y=[2])))
    page = (tmp_path / "page.html").read_text()
    library = get_plotlyjs()
    assert library in page
    own = page.replace(library, "")
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+", own))
    assert addresses == set()
    assert '"showSendToCloud": false' in own
    assert CONFIG["showSendToCloud"] is False


def test_a_notebook_shows_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    shells = pytest.importorskip("IPython.core.interactiveshell", reason="needs IPython (the dev extra)")
    shell = shells.InteractiveShell()
    shell.run_cell("import hotloop\nhotloop.Plan(threds=1)")
    shown = capsys.readouterr()
    lines = [line for line in (shown.out + shown.err).splitlines() if line.strip()]
    assert len(lines) == 1
    assert "PlanError: unknown axis 'threds'" in lines[0]


def test_devices_and_the_chosen_plan_are_known_in_python(tmp_path: Path) -> None:
    assert hotloop.devices("cpu").devices[0].name == "cpu"
    found = hotloop.choose_plan(a_task(), device="cpu")
    assert isinstance(found.plan, Plan)
    trained(a_task(), tmp_path / "run", plan=found.plan)


def test_a_run_says_why_it_stopped_and_fit_ends_with_a_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import signal

    run = train(tmp_path / "run", callbacks=[at_step(5, lambda: signal.raise_signal(signal.SIGINT))], progress=True)
    assert run is not None
    assert run.reason == "SIGINT"
    assert "reason='SIGINT'" in repr(run)
    train(tmp_path / "run", progress=True)
    assert Run.open(tmp_path / "run").reason == "finished"
    shown = " ".join(capsys.readouterr().err.split())
    assert "learning curves:" in shown
    assert "test loss" in shown
