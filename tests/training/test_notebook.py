"""Training in a real notebook kernel, with classes that exist only there."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.more

nbformat = pytest.importorskip("nbformat", reason="needs nbformat, nbclient and ipykernel (the dev extra)")
nbclient = pytest.importorskip("nbclient", reason="needs nbformat, nbclient and ipykernel (the dev extra)")
pytest.importorskip("ipykernel", reason="needs nbformat, nbclient and ipykernel (the dev extra)")

DEFINE = """
import torch
from torch import nn
import hotloop

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))
    def forward(self, x):
        return self.layers(x)

class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, i):
        return torch.randn(1, 28, 28), i % 10

def make(data, **more):
    return hotloop.Task(model=Net, loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.Adam(p, 1e-3),
                        data=data, batch_size=8, **more)
"""
ARRAYS = "run = hotloop.fit(make(hotloop.data.digits(), epochs=2), run='arrays')"
WORKERS = """
loader = torch.utils.data.DataLoader(Noise(), batch_size=8, num_workers=2, shuffle=True)
second = hotloop.fit(make(loader, epochs=1), run='workers')
"""
RANKS = """
def train():
    plan = hotloop.Plan(parallel='data', ranks=2)
    return hotloop.fit(make(hotloop.data.digits(), epochs=1), run='ranks', plan=plan)

third = train()
print(len(third.epochs), third.plan.brief(), type(hotloop.load_model(third)).__name__)
"""
SHOW = "print(len(run.epochs), len(second.epochs), sorted(run.final))\nrun"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[list]:
    folder = tmp_path_factory.mktemp("notebook")
    cells = (DEFINE, ARRAYS, WORKERS, SHOW, RANKS)
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(
        book, timeout=180, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTEST_CURRENT_TEST", raising=False)  # under which a kernel's streams are not those of a user's
        client.execute()
    assert Path(folder, "arrays", "curves.html").is_file()
    return [cell.outputs for cell in book.cells]


def _text(outputs: list) -> str:
    return "".join(o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in outputs)


def test_a_class_defined_in_the_notebook_trains_and_shows_a_line_per_epoch(outputs: list[list]) -> None:
    shown = _text(outputs[1])
    assert "epoch 1/2" in shown
    assert "epoch 2/2" in shown


def test_a_progress_bar_is_displayed(outputs: list[list]) -> None:
    assert any("application/vnd.jupyter.widget-view+json" in o.get("data", {}) for o in outputs[1])


def test_workers_load_a_data_set_defined_in_the_notebook(outputs: list[list]) -> None:
    assert "epoch 1/1" in _text(outputs[2])


def test_the_run_that_comes_back_says_what_it_is(outputs: list[list]) -> None:
    shown = _text(outputs[3])
    assert shown.startswith("2 1 ['epoch'")
    assert "arrays" in shown
    assert "test_accuracy" in shown


def test_ranks_train_a_class_defined_in_the_notebook_from_a_function(outputs: list[list]) -> None:
    shown = _text(outputs[4])
    assert "epoch 1/1" in shown
    assert "1 parallel=data ranks=2 Net" in shown
