"""This process' part in a training: alone, or as one of the ranks that its plan is for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from hotloop.core.format import parse_seconds
from hotloop.core.hardware.devices import resolve_device
from hotloop.core.plan_request import PlanRequest
from hotloop.distributed.process_group import RankEnv, RankSession, join_process_group, threads_per_rank
from hotloop.distributed.world import rank_loss_error
from hotloop.errors import HotloopError, PlanError, RankLostError
from hotloop.plan import Plan


def plan_to_launch(plan: Plan | str | Path | None, axes: Mapping[str, Any], resume: Path | None = None) -> Plan | None:
    """The plan, where it is for ranks and this process isn't one of them yet; None where it can train as it is.

    Args:
        plan, axes: as asked for.
        resume: the run to go on with, whose plan counts where none was asked for.
    """
    if plan is None and resume is not None and (resume / "plan.toml").is_file():
        plan = resume / "plan.toml"
    wanted = PlanRequest.from_value(plan, axes).plan
    return None if not wanted.ranked or RankEnv.from_env() is not None else wanted


@contextmanager
def join_ranks(
    plan: Plan, say: Callable[[str], None], named: int | None, rank_timeout: str | None = None
) -> Iterator[RankSession]:
    """Joins the other ranks, if the plan is for some; what ends this rank is noted where its agent looks for it.

    Args:
        say: is told of ranks that give no sign of life.
        named: how many ranks the user asked for, if so.
        rank_timeout: how long ranks wait for each other in training, and the server of an asynchronous training for its
            workers, such as `5m`; None for 60 s, or 20 times the longest step if that is longer.

    Raises:
        PlanError: `rank_timeout` is no time, or as many ranks as the plan is for were not started.
    """
    seat = RankEnv.from_env()
    limit_s = None if rank_timeout is None else parse_seconds(rank_timeout, "rank-timeout")
    if not plan.ranked:
        if seat is not None and seat.ranks > 1 and plan.parallel == "async":
            raise PlanError(
                f"{seat.ranks} ranks were started, and parallel=async starts its workers by itself",
                expected="a single process",
                fix="start it without torchrun; --ranks says how many workers there are",
            )
        if seat is not None and seat.ranks > 1:
            raise PlanError(
                f"{seat.ranks} ranks were started, and nothing says how they share the training",
                expected="a plan for them",
                fix="use --set parallel=data",
            )
        yield RankSession(limit_s=limit_s)
        return
    if seat is None:
        raise PlanError(f"parallel={plan.parallel} in a process that is no rank", fix="start it with --ranks")
    if plan.workforce == "ray" and not seat.is_watched:
        raise PlanError(
            f"workforce=ray, and {seat.ranks} ranks were started already",
            expected="ranks that Ray starts",
            fix="use --set workforce=processes, or start it without torchrun",
        )
    if named is not None and named != seat.ranks:
        raise PlanError(f"ranks={named} in the plan, and {seat.ranks} were started", fix="make both the same")
    if plan.threads is None and (threads := threads_per_rank(seat)) is not None:
        torch.set_num_threads(threads)
    with (
        _record_rank_error(seat),
        join_process_group(seat, resolve_device(plan).device.partition(":")[0], say, limit_s) as ranks,
    ):
        yield ranks


_PATIENCE_S = 10.0


def _wait_for_the_agent() -> None:
    """It ends the ranks that only lost another: thus it finds the one that was killed, and can name it."""
    with suppress(KeyboardInterrupt):
        time.sleep(_PATIENCE_S)


@contextmanager
def _record_rank_error(seat: RankEnv) -> Iterator[None]:
    """Leaves an error to the agent, which tells it if it is hotloop's own."""
    try:
        yield
    except Exception as raised:
        error = rank_loss_error(raised, seat.rank) or raised
        get_error_handler().record_exception(error)
        if isinstance(error, RankLostError) and seat.is_watched:
            _wait_for_the_agent()
        if isinstance(error, HotloopError) and seat.is_watched:
            raise SystemExit(1) from raised
        raise error from raised
