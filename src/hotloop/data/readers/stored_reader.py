"""Restores the reader of a run's inputs from its run folder."""

from __future__ import annotations

from typing import Any

from hotloop.data.bundle import InputReader
from hotloop.data.readers.csv_table import CsvReader
from hotloop.data.readers.images import ImageReader
from hotloop.errors import RunError

_READERS: dict[str, Any] = {reader.kind: reader for reader in (CsvReader, ImageReader)}


def reader_from_json(document: dict[str, Any]) -> InputReader | None:
    """Returns the reader of `RunRecord.reader`; None without one.

    Raises:
        RunError: the document is not what a reader's `to_json` returns.
    """
    if not document:
        return None
    try:
        return _READERS[document["kind"]].from_json(document)
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"the run's record of its input files is damaged ({error!r})",
            expected="what training wrote",
            fix="restore run.json from a copy",
        ) from error
