"""The public path of the types that callbacks name."""

from hotloop.core.callback import Callback, Event, View

__all__ = ["Callback", "Event", "View"]
