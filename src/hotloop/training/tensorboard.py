"""Scalars and the model's graph for TensorBoard, if TensorBoard is installed."""

from __future__ import annotations

import copy
import gc
import importlib.util
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import TYPE_CHECKING, Any

from hotloop.core.callback import Callback, View
from hotloop.core.records.training import EpochRecord
from hotloop.core.reporter import Say
from hotloop.data.batch_tree import batch_inputs
from hotloop.data.feeds.feed import first_batch
from hotloop.lowering.program import Program
from hotloop.task import Task

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.tensorboard import SummaryWriter


def is_installed() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


class TensorBoard:
    """A callback that writes a run's metrics below `<run>/tensorboard`.

    Args:
        graph: returns a separate model and example inputs for the graph; None draws no graph.
    """

    def __init__(self, graph: Callable[[], tuple[nn.Module, Any]] | None, say: Callable[[str], None]) -> None:
        self._graph, self._say = graph, say
        self._writer: SummaryWriter | None = None
        self._has_failed = False

    def __call__(self, view: View) -> None:
        try:
            self._handle(view)
        except Exception as error:  # a full disk, or a TensorBoard that doesn't fit the other packages
            if not self._has_failed:
                self._has_failed = True
                reason = f"{type(error).__name__}: {''.join(str(error).strip().splitlines()[:1])[:200]}"
                self._say(f"tensorboard failed ({reason}); training goes on, and later figures are tried again")

    def _handle(self, view: View) -> None:
        if view.event == "start":
            # Hides what a killed run wrote after its checkpoint; these steps are repeated.
            self._open(view, view.step if view.history or view.step else None)
        elif (
            self._graph is not None and view.step and self._writer is not None
        ):  # after the first step, which reports a failing model better
            self._write_graph(self._graph)
        if view.event == "epoch":
            is_late = self._writer is None  # the first attempt failed
            if is_late:
                self._open(view, 0)
            for record in view.history if is_late else view.history[-1:]:
                self._write(record)
        if view.event == "stop" and self._writer is not None:
            self._writer.close()

    def _open(self, view: View, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(view.run / "tensorboard"), purge_step=purge_step)
        if purge_step is not None:
            self._graph = None  # drawn when the run began

    def _write_graph(self, graph: Callable[[], tuple[nn.Module, Any]]) -> None:
        self._graph = None
        assert self._writer is not None
        try:
            model, inputs = graph()
            with warnings.catch_warnings(), redirect_stdout(StringIO()):  # torch also prints its errors
                warnings.simplefilter("ignore")  # tracing warns of each Python branch
                self._writer.add_graph(model.eval(), inputs)
            del model, inputs
        except Exception as error:  # tracing fails in many ways, and training needs no graph
            self._say(f"TensorBoard gets no graph of this model, since it can't be traced ({type(error).__name__})")
        gc.collect()  # a traced model is a reference cycle

    def _write(self, record: EpochRecord) -> None:
        assert self._writer is not None
        for part, figures in (("train", record.train), ("validation", record.validation)):
            for name, value in figures.items():
                self._writer.add_scalar(f"{name}/{part}", value, record.step)
        self._writer.add_scalar("learning_rate", record.learning_rate, record.step)
        self._writer.add_scalar("samples_per_s", record.samples_per_s, record.step)
        self._writer.flush()


def callbacks_for(task: Task, program: Program, say: Say) -> list[Callback]:
    """Returns a writer for TensorBoard if it is installed; models that take a batch's inputs get a graph.

    The graph is of a copy, since a user's callback may use the model that the factory returned last. With several ranks
    the graph is of a new model, since the trained model can't run on a single rank.
    """
    if not is_installed():
        return []

    def graph() -> tuple[nn.Module, Any]:
        alone = program.parts.world.is_single
        return copy.deepcopy(program.model).cpu() if alone else task.build_model(), batch_inputs(
            first_batch(task.roles)
        )

    return [TensorBoard(graph if task.loss is not None else None, say)]
