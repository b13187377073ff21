"""Python imports this file at the start of a script's process: the file's folder comes first in PYTHONPATH.

The module removes itself from the environment, so that the script's child processes run alone, runs the machine's own
`sitecustomize`, and calls hotloop's function.
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


_settings = os.environ.pop("HOTLOOP_SCRIPT", None)
_leave_no_trace()
try:
    _run_own()
finally:
    if _settings:
        _begin(json.loads(_settings))
