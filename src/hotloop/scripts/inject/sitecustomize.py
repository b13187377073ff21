"""Python imports this file when the process of a script starts, since the file's folder comes first in PYTHONPATH.

It takes all traces of itself out of the environment, so that processes started by the script run alone, runs the
machine's own `sitecustomize`, and calls hotloop's function.
"""

from __future__ import annotations

import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def _leave_no_trace() -> None:
    rest = os.environ.get("PYTHONPATH", "")[len(HERE) :]
    if rest:
        os.environ["PYTHONPATH"] = rest.removeprefix(os.pathsep)
    else:
        os.environ.pop("PYTHONPATH", None)
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != HERE]
    sys.path_importer_cache.pop(HERE, None)


def _run_own() -> None:
    """Runs the machine's own file of this name, as Python would have done."""
    own = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    sys.modules.setdefault("sitecustomize", own)


def _begin(settings: dict) -> None:
    sys.path.insert(0, settings["root"])
    try:
        from hotloop.scripts.child import begin
    finally:
        sys.path.remove(settings["root"])
    begin(settings)


_given = os.environ.pop("HOTLOOP_SCRIPT", None)
_leave_no_trace()
try:
    _run_own()
finally:
    if _given:
        _begin(json.loads(_given))
