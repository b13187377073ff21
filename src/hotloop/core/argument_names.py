"""Rewrites messages of commands for Python: flags become arguments, such as `--device cpu` -> `device='cpu'`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from hotloop.errors import HotloopError

_COMMAND = r"hotloop (?:train|race|tune|check|plan|profile|evaluate|predict|export|explain|summary|devices|advise|study)\b(?! --resume)[^;,`]*?(?=[;,`]|\. |$)"
"""A complete command, which `name_arguments` leaves unchanged: the user can enter the command in a shell."""

_PATH = r"[^\s;,]*[^\s;,.:]"
_PATTERNS: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
    (r"--[a-z-]+(?: \S+)? \((?:or )?([a-z_]+=[^)]*)\)", r"\1"),  # the message names the argument as well
    (rf"hotloop train --resume ({_PATH})", r"hotloop.fit(task, run='\1', resume=True)"),
    (rf"hotloop study --resume ({_PATH})", r"hotloop.study(make_task, resume='\1')"),
    (rf"--resume ({_PATH})", r"run='\1' and resume=True"),
    (r"--resume\b", "resume=True"),
    (r"--set ([a-z]+)=(\w+)((?: --set [a-z]+=\w+)+)", r"\1=\2\3 in the plan"),
    (r" --set ([a-z]+)=(\w+)(?= --set| in the plan)", r", \1=\2"),
    (r"--set ([a-z]+)=(\w+)", r"\1=\2 in the plan"),
    (r"--(ranks|workers) (\d+)", r"\1=\2 in the plan"),
    (r"--(ranks|workers)\b", r"\1 of the plan"),
    (r"--device ((?:cpu|cuda|mps|xpu)[\w:]*)", r"device='\1'"),
    (r"--(weights|plan) (last|best|auto)", r"\1='\2'"),
    (r"--steps (\d+)", r"steps=\1"),
    (r"--plans ([\w,./]+)", lambda match: f"plans={match[1].split(',')}"),
    (r"--batch-size (\w+)", r"batch_size=\1"),
    (r"(?:hotloop |train )*--tune\b", "hotloop.tune(task)"),
    (r"--try\b", "try_remedies=True"),
    (r"--without-prepare\b", "prepare=False"),
    (r"--(trust|refresh)\b", r"\1=True"),
    (r"--(trials|jobs|repeats|seed) (-?\d+)", r"\1=\2"),
    (r"--round (-?\d+)", r"round_size=\1"),
    (r"--sampler (\w+)", r"sampler='\1'"),
    (r"--prune (\w+)", r"pruner='\1'"),
    (r"--prune\b", "pruner="),
    (r"--round\b", "round_size="),
    (r"--study\b", "folder="),
    (r"--require\b", "constraints="),
    (r"--continue (-?\d+)", r"continue_trial(\1)"),
    (r"--jobs-on (\w+)", r"jobs_on='\1'"),
]
_NAMES = "trials|sampler|jobs|repeats|seed|chips|gpus|batch-sizes|deadline|budget|prices|precision|carbon|rank-timeout|run|out|epochs|device|devices|plan|plans|weights|steps|inputs|trace|stop-after|time-limit|checkpoint-every|batch-size"


def name_arguments(text: str) -> str:
    """Returns the message with Python arguments in place of flags."""
    commands = re.split(f"({_COMMAND})", text)
    commands[::2] = map(_translate, commands[::2])
    return "".join(commands)


def _translate(text: str) -> str:
    for pattern, form in _PATTERNS:
        text = re.sub(pattern, form, text)
    return re.sub(rf"--({_NAMES})\b(?!-)", lambda match: match[1].replace("-", "_") + "=", text)


def name_arguments_in_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a public function: its errors name Python arguments."""

    @wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except HotloopError as error:
            error.given, error.expected, error.fix = map(name_arguments, (error.given, error.expected, error.fix))
            error.args = tuple(name_arguments(value) if isinstance(value, str) else value for value in error.args)
            raise

    call.__module__ = "hotloop"  # pickle looks the function up there
    return call
