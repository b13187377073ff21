"""The mode of each module while the model trains, as the model factory made it or a callback changed it."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from hotloop.errors import PlanError
from hotloop.modes import set_training, stays_in_eval


class TrainingMode:
    """Puts a model into training mode.

    Attributes:
        in_eval: names of the modules that stay in evaluation mode.
    """

    def __init__(self, model: nn.Module, in_eval: Collection[str]) -> None:
        self.in_eval = frozenset(in_eval)
        self._model = model

    def set(self) -> None:
        """Puts the model into training mode, but for the modules that stay in evaluation mode."""
        set_training(self._model, self.in_eval)

    def follow(self, parallel: str) -> bool:
        """Takes over the modes of single modules that a callback has switched; whether it has switched some.

        A callback that switched the whole model, to evaluate it say, changes nothing.

        Raises:
            PlanError: the callback runs in one of several processes alone.
        """
        modes = {module.training for module in self._model.modules()}
        if len(modes) == 1 or (found := stays_in_eval(self._model)) == self.in_eval:
            return False
        if parallel != "none":
            raise PlanError(
                f"parallel={parallel}, and a callback switches the mode of {min(found ^ self.in_eval)!r}",
                expected="modules that stay in the mode in which the model factory returned them",
                fix="use parallel=none",
            )
        self.in_eval = found
        return True
