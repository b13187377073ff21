"""The work of a pack's process: forms the packs of a round, and trains the trials of a pack in lockstep."""

from __future__ import annotations

import hashlib
import json
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hotloop.core.files.atomic_files import write_atomic
from hotloop.core.records.study import PackMember, PackPlan, PackProof, StudyRecord, TrialProgress
from hotloop.errors import StudyError, describe_error
from hotloop.hyperparameters.packs.lockstep import train_in_lockstep
from hotloop.hyperparameters.packs.pack_members import Trial, build_pack, load_context, lower_member, prove_pack
from hotloop.hyperparameters.packs.packed_step import Pack
from hotloop.hyperparameters.packs.shape_keys import pack_shape, reason_against_pack
from hotloop.hyperparameters.trial import error_line, lock_run, trial_progress
from hotloop.training.early_stopping import RunOutcome

_SINGLE = "no other trial of the round has the same shape"
_LEFT = "the other trials of its pack train alone"


def plan_packs(
    folder: str, study: StudyRecord, make_task: bytes | None, members: Sequence[PackMember], plan_file: str
) -> PackPlan:
    """Forms packs of the runs of a round, in their order, and stores them in `plan_file`."""
    shapes: dict[str, list[PackMember]] = {}
    alone: list[tuple[PackMember, str]] = []
    for member in members:
        try:
            task = load_context(Path(folder), study, make_task, member, None).task
            reason, shape = reason_against_pack(task), pack_shape(task)
        except (Exception, SystemExit) as error:  # the run alone reports the error
            traceback.print_exc()
            reason, shape = error_line(error), ""
        if reason:
            alone.append((member, reason))
        else:
            shapes.setdefault(shape, []).append(member)
    chunks = [
        group[first : first + study.pack] for group in shapes.values() for first in range(0, len(group), study.pack)
    ]
    alone += [(chunk[0], _SINGLE) for chunk in chunks if len(chunk) == 1]
    plan = PackPlan(packs=[chunk for chunk in chunks if len(chunk) > 1], alone=alone)
    write_atomic(Path(plan_file), plan.model_dump_json())
    return plan


def train_pack(
    folder: str,
    study: StudyRecord,
    make_task: bytes | None,
    members: Sequence[PackMember],
    runs: Sequence[str],
    pause_after: int | None,
) -> list[TrialProgress] | StudyError:
    """Trains the runs of a pack up to an epoch, and returns the state of each, or an error of the study.

    Args:
        runs: the folder of each run.
        pause_after: the epoch after which to stop; None for the end of training.
    """
    with ExitStack() as locks:
        try:
            for member, run in zip(members, runs, strict=True):
                locks.enter_context(lock_run(Path(folder), member.number, member.repeat, Path(run)))
        except StudyError as error:
            return error
        paths = dict(zip(map(_key, members), map(Path, runs), strict=True))
        return _train_pack(Path(folder), study, make_task, members, paths, pause_after)


def _train_pack(
    root: Path,
    study: StudyRecord,
    make_task: bytes | None,
    members: Sequence[PackMember],
    paths: Mapping[tuple[int, int], Path],
    pause_after: int | None,
) -> list[TrialProgress]:
    began = time.monotonic()
    file = _proof_path(root, members)
    known = PackProof.model_validate_json(file.read_bytes()) if file.is_file() else None
    alone = [] if known is None else list(known.alone)
    left = {_key(member) for member, _ in alone}
    trials = []
    for member in members:
        if _key(member) in left:
            continue
        try:
            context = load_context(root, study, make_task, member, pause_after)
            trials.append(Trial(member, paths[_key(member)], context, lower_member(study, context)))
        except (Exception, SystemExit) as error:  # the run alone reports the error
            traceback.print_exc()
            alone.append((member, error_line(error)))
    pack, trials, refused = _proven_pack(trials, known)
    alone += refused
    if known is None:
        proof = PackProof(proofs=[(trial.member, trial.proof) for trial in trials], alone=alone)
        write_atomic(file, proof.model_dump_json())
    if pack is not None:
        train_in_lockstep(pack, trials)
    alone += [(trial.member, trial.leaves) for trial in trials if trial.leaves]
    share_s = (time.monotonic() - began) / len(members)
    numbers = [trial.member.number for trial in trials]
    found = [
        _progress(
            study, trial.member, trial.run, share_s, trial.outcome, trial.error, packed=numbers, proof=trial.proof
        )
        for trial in trials
        if not trial.leaves
    ]
    return found + [
        _progress(study, member, paths[_key(member)], share_s, None, "", alone=reason) for member, reason in alone
    ]


def _key(member: PackMember) -> tuple[int, int]:
    return member.number, member.repeat


def _proof_path(folder: Path, members: Sequence[PackMember]) -> Path:
    text = json.dumps([_key(member) for member in members])
    first = members[0].number
    return folder / "packs" / f"{first:04d}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"


def _progress(
    study: StudyRecord,
    member: PackMember,
    run: Path,
    seconds: float,
    outcome: RunOutcome | None,
    error: str,
    **fields: Any,
) -> TrialProgress:
    found = trial_progress(study, member.number, member.repeat, run, outcome, error, seconds)
    return found.model_copy(update=fields)


def _proven_pack(
    trials: list[Trial], known: PackProof | None
) -> tuple[Pack | None, list[Trial], list[tuple[PackMember, str]]]:
    """Returns the pack of the trials that are proven, these trials, and the others with the reasons."""
    refused: list[tuple[PackMember, str]] = []
    while len(trials) > 1:
        try:
            pack = build_pack([trial.program for trial in trials])
        except Exception as error:
            traceback.print_exc()
            return (
                None,
                [],
                refused + [(trial.member, f"the trials can't be stacked: {describe_error(error)}") for trial in trials],
            )
        if known is not None:
            for trial, (_, proof) in zip(trials, known.proofs, strict=True):
                trial.proof = proof
            return pack, trials, refused
        found = prove_pack(pack, [trial.context.task for trial in trials])
        for trial, (_, evidence) in zip(trials, found, strict=True):
            trial.proof = evidence
        lost = [trial for trial, (is_proven, _) in zip(trials, found, strict=True) if not is_proven]
        if not lost:
            return pack, trials, refused
        refused += [(trial.member, trial.proof) for trial in lost]
        trials = [trial for trial in trials if trial not in lost]
    return None, [], refused + [(trial.member, _LEFT) for trial in trials]
