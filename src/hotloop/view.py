"""The public path of the types of callbacks."""

from hotloop.core.callback import Callback, Event, View

__all__ = ["Callback", "Event", "View"]
