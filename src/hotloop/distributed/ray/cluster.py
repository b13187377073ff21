"""Connects to a running Ray cluster, or starts a cluster on this machine."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hotloop.errors import PlanError, TrainingError, describe_error

_ANSWER_TIMEOUT_S = 10.0
"""Longest wait for a connection to the cluster."""


def check_installed(given: str = "workforce=ray", other: str = "workforce=processes") -> None:
    """Raises PlanError if Ray isn't installed; the message names the given setting and the other one."""
    if importlib.util.find_spec("ray") is None:
        raise PlanError(
            f"{given}, and Ray isn't installed",
            expected="its package",
            fix=f"run: pip install 'hotloop[ray]', or use {other}",
        )


def ray_module() -> Any:
    """Imports Ray, which takes a second; raises PlanError if Ray isn't installed."""
    check_installed()
    import ray

    return ray


def connect(cores: int = 1) -> Any:
    """Connects Ray to the cluster at `RAY_ADDRESS`, else to a cluster on this machine, which it starts if needed.

    Args:
        cores: least number of cores of a started cluster; on a machine with fewer cores processes share them.

    Raises:
        PlanError: Ray isn't installed, or can't be reached.
    """
    ray = ray_module()
    _check_answers(os.environ.get("RAY_ADDRESS", ""))
    quiet: dict[str, Any] = dict(include_dashboard=False, log_to_driver=False, logging_level="error")
    with _keep_sigterm_handler():
        try:
            try:
                ray.init(**quiet, num_cpus=max(cores, os.cpu_count() or 1), _node_ip_address="127.0.0.1")
            except ValueError:  # a running cluster refuses `num_cpus`
                ray.init(**quiet)
        except (ValueError, ConnectionError, RuntimeError) as error:
            raise _unreachable_error(error) from None
    return ray


@contextmanager
def translate_ray_errors(ray: Any) -> Iterator[None]:
    """Raises TrainingError with one line for errors of Ray itself, such as a full object store."""
    try:
        yield
    except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
        raise TrainingError(
            f"Ray's object store and the disk to which it spills are full ({type(error).__name__})",
            expected="memory or disk space for the parameters, and for a gradient of each worker",
            fix="start the cluster with more, such as ray start --head --object-store-memory=8000000000, or end other jobs; "
            "`ray memory` lists the stored objects",
        ) from error
    except ray.exceptions.RayError as error:
        raise TrainingError(
            f"Ray failed: {describe_error(error)}", fix="go on from the last checkpoint with --resume"
        ) from error


def _check_answers(address: str) -> None:
    """Connects once: Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "://" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWER_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise _unreachable_error(error) from None


def _unreachable_error(error: Exception) -> PlanError:
    return PlanError(
        f"Ray can't be reached: {' '.join(str(error).split())}",
        expected="a cluster where RAY_ADDRESS says, or none",
        fix="check RAY_ADDRESS, or unset it",
    )


@contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Restores the SIGTERM handler: Ray's own ends the process without saving."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
