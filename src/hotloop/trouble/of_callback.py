"""What a callback raised."""

from __future__ import annotations

from hotloop.errors import HotloopError, TaskError, blame
from hotloop.view import Callback, View


def explained_of_callback(error: Exception, callback: Callback, view: View, saved: int | None) -> Exception:
    """The error in one line that names the callback; one of hotloop's own stays as it is.

    Args:
        saved: the step of the last checkpoint, if there is one.
    """
    if isinstance(error, HotloopError) or str(callback.__module__).startswith("hotloop."):
        return error
    name = getattr(callback, "__name__", type(callback).__name__)
    trained = "what was trained is saved" if view.step else "nothing was trained yet"
    if view.step != (saved or 0):
        trained = "no checkpoint was written yet" if saved is None else f"the last checkpoint is of step {saved}"
    return TaskError(
        f"the callback {name} raised {blame(error)} at the event {view.event!r} after step {view.step}",
        fix=f"correct that line; {trained}",
    )
