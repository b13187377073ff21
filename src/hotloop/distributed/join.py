"""Joins this process to the ranks of its plan, or lets the process train alone."""

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
    """Returns the plan if it needs ranks and this process is no rank yet; None if this process can train.

    Args:
        plan, axes: the requested plan.
        resume: the run to resume; its plan counts if `plan` is None.
    """
    if plan is None and resume is not None and (resume / "plan.toml").is_file():
        plan = resume / "plan.toml"
    wanted = PlanRequest.from_value(plan, axes).plan
    return None if not wanted.ranked or RankEnv.from_env() is not None else wanted


@contextmanager
def join_ranks(
    plan: Plan, say: Callable[[str], None], named: int | None, rank_timeout: str | None = None
) -> Iterator[RankSession]:
    """Joins the ranks if the plan needs ranks; records an error of this rank for torch's agent.

    Args:
        say: reports ranks without heartbeat.
        named: number of ranks that the user requested, or None.
        rank_timeout: longest wait of ranks for each other in training, and of an asynchronous server for its workers,
            such as `5m`; None for 60 s, or 20 times the longest step if that is longer.

    Raises:
        PlanError: `rank_timeout` is no time, or the number of started ranks differs from the plan's.
    """
    env = RankEnv.from_env()
    limit_s = None if rank_timeout is None else parse_seconds(rank_timeout, "rank-timeout")
    if not plan.ranked:
        if env is not None and env.ranks > 1 and plan.parallel == "async":
            raise PlanError(
                f"{env.ranks} ranks were started, and parallel=async starts its workers by itself",
                expected="a single process",
                fix="start it without torchrun; --ranks says how many workers there are",
            )
        if env is not None and env.ranks > 1:
            raise PlanError(
                f"{env.ranks} ranks were started, and nothing says how they share the training",
                expected="a plan for them",
                fix="use --set parallel=data",
            )
        yield RankSession(limit_s=limit_s)
        return
    if env is None:
        raise PlanError(f"parallel={plan.parallel} in a process that is no rank", fix="start it with --ranks")
    if plan.workforce == "ray" and not env.is_watched:
        raise PlanError(
            f"workforce=ray, and {env.ranks} ranks were started already",
            expected="ranks that Ray starts",
            fix="use --set workforce=processes, or start it without torchrun",
        )
    if named is not None and named != env.ranks:
        raise PlanError(f"ranks={named} in the plan, and {env.ranks} were started", fix="make both the same")
    if plan.threads is None and (threads := threads_per_rank(env)) is not None:
        torch.set_num_threads(threads)
    with (
        _record_rank_error(env),
        join_process_group(env, resolve_device(plan).device.partition(":")[0], say, limit_s) as ranks,
    ):
        yield ranks


_PATIENCE_S = 10.0


def _wait_for_agent() -> None:
    """Leaves the agent time to end this rank: the agent then finds the killed rank and names that."""
    with suppress(KeyboardInterrupt):
        time.sleep(_PATIENCE_S)


@contextmanager
def _record_rank_error(env: RankEnv) -> Iterator[None]:
    """Records an error for the agent, which reports errors of hotloop itself."""
    try:
        yield
    except Exception as raised:
        error = rank_loss_error(raised, env.rank) or raised
        get_error_handler().record_exception(error)
        if isinstance(error, RankLostError) and env.is_watched:
            _wait_for_agent()
        if isinstance(error, HotloopError) and env.is_watched:
            raise SystemExit(1) from raised
        raise error from raised
