"""TaskFacts: what is known of a Task without running it for long."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from hotloop.data.feed import peek
from hotloop.data.source import Stream
from hotloop.lowering import Program
from hotloop.lowering.ingredients import count_parameters, input_shapes
from hotloop.records import TaskFacts


def facts_of(program: Program, source_digest: str = "") -> TaskFacts:
    """Facts of the Task that `program` runs; `source_digest` is the hash of its source, where there is one."""
    roles, model = program.parts.task.roles, program.model  # as given, wherever the plan puts them
    parameters, trainable = count_parameters(model)
    known: dict[str, Any] = {
        "parameters": parameters,
        "trainable": trainable,
        "samples": None if isinstance(roles.train, Stream) else len(roles.train),
        "batches": program.feed.batches,
        "batch_size": roles.batch_size,
        "inputs": input_shapes(peek(roles)),
        "data": type(roles.train).__name__,
        "exact": roles.exact,
        "order": roles.digest,
    }
    shapes = [(name, list(value.shape), str(value.dtype)) for name, value in model.named_parameters()]
    text = json.dumps([known, shapes, source_digest], sort_keys=True)
    return TaskFacts(**known, fingerprint=hashlib.sha256(text.encode()).hexdigest())
