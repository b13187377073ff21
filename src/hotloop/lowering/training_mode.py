"""Training modes of the modules, as set by the model factory or by a callback."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from hotloop.core.task_parts.models import modules_in_eval, set_training
from hotloop.errors import PlanError


class TrainingMode:
    """The modes of a model's modules during training.

    Attributes:
        in_eval: names of the modules that stay in evaluation mode.
    """

    def __init__(self, model: nn.Module, in_eval: Collection[str]) -> None:
        self.in_eval = frozenset(in_eval)
        self._model = model

    def set(self) -> None:
        """Switches the model to training mode, except for the modules that stay in evaluation mode."""
        set_training(self._model, self.in_eval)

    def enter_with(self, parallel: str) -> bool:
        """Adopts the modes of single modules that a callback switched; returns whether there are any.

        A switch of the whole model, such as for an evaluation, has no effect.

        Raises:
            PlanError: the plan has several processes, and the callback runs in one of them.
        """
        modes = {module.training for module in self._model.modules()}
        if len(modes) == 1 or (found := modules_in_eval(self._model)) == self.in_eval:
            return False
        if parallel != "none":
            raise PlanError(
                f"parallel={parallel}, and a callback switches the mode of {min(found ^ self.in_eval)!r}",
                expected="modules that stay in the mode in which the model factory returned them",
                fix="use parallel=none",
            )
        self.in_eval = found
        return True
