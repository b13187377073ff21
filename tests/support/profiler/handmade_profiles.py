"""A Profile made by hand, with a bit of everything."""

from __future__ import annotations

from typing import Any

from hotloop.core.records.profile import (
    GroupTime,
    HardwareLimits,
    LineTime,
    ModuleTime,
    OperatorTime,
    OptimizerUse,
    Overhead,
    Profile,
    RareUpdate,
    Remedy,
    TimeOutsideSteps,
)


def module(name: str, kind: str, forward: float, backward: float, **fields: Any) -> ModuleTime:
    share = (forward + backward) / 100
    return ModuleTime(name=name, kind=kind, calls=1, forward_ms=forward, backward_ms=backward, share=share, **fields)


def operator(name: str, ms: float, module: str, **fields: Any) -> OperatorTime:
    given = {
        "phase": "backward",
        "calls": 2,
        "where": "/far/away/model.py:12",
        "shapes": ["8x3x9x9", "4x3x3x3"],
    } | fields
    return OperatorTime(name=name, ms=ms, module=module, **given)


def seldom() -> RareUpdate:
    phases = {"backward": 30.0, "forward": 19.5, "update": 0.5}
    return RareUpdate(kind="Adam[rare]", where="/far/away/train.py:50", every=5.0, ms=50.0, phases=phases)


def made(**fields: Any) -> Profile:
    """100 ms a step; `[brackets]` and angles stand where a terminal's or a page's markup would read them."""
    given: dict[str, Any] = dict(
        source="train[bold].py",
        steps=60,
        step_ms=100.0,
        step_where="/far/away/train.py:40",
        phases={"data": 10.0, "forward": 25.0, "backward": 60.0, "python": 4.0, "unattributed": 1.0},
        attributed=0.99,
        samples_per_step=128,
        batch=["128x3x9x9", "128"],
        modules=[
            module("", "Net[red]", 25, 60, flops=6e9, bytes=3e8, limit_share=0.25),
            module(
                "features.0",
                "Conv2d",
                10,
                40,
                own_forward_ms=10,
                own_backward_ms=40,
                flops=5e9,
                bytes=1e8,
                limit_share=0.4,
            ),
            module("features.1", "<b>Odd</b>", 5, 4, flops=1e7, bytes=1e8, limit_share=0.1),
            module("features.2", "ReLU", 0.1, 0.1),
            module("head", "Linear", 9, 15, flops=1e9, bytes=1e8, fused_with=["features.1"]),
        ],
        operators=[
            operator("aten::convolution_backward", 38.0, "features.0", flops=3e9, bytes=1e8, dtype="float32"),
            operator("aten::mm", 12.0, "head", flops=6e8, bytes=1e7, dtype="float32"),
        ],
        lines=[LineTime(where="/far/away/train.py:31", function="step", phase="forward", ms=30, own_ms=5)],
        optimizers=[
            OptimizerUse(
                kind="Adam",
                where="/far/away/train.py:40",
                implementation="forloop",
                groups=[
                    GroupTime(name="0", tensors=3, numbers=12000, ms=1.5),
                    GroupTime(name="slow", tensors=1, numbers=9, ms=None),
                ],
                steps=1,
                ms=2.0,
            )
        ],
        apart=TimeOutsideSteps(warm_up_s=1.2, evaluation_s=3.4, updates=[seldom()]),
        limits=HardwareLimits(flop_per_s={"fp32": 1e11, "bf16": 2e11}, bytes_per_s=1e10),
        overhead=Overhead(ratio=1.01, low=0.99, high=1.03, instrumented=30, clean=30),
        bound="arithmetic",
        bound_evidence=["Of a step of 100 ms: arithmetic 70 %.", "The step reaches 25 % of this machine's limit."],
        remedies=[
            Remedy(
                cause="an optimizer in for-loop mode",
                where="/far/away/train.py:40",
                remedy="take the fused one",
                gain=0.31,
                evidence="31 of 100 ms",
                axes={"optimizer": "fused"},
                won=(1.4, 1.3, 1.5),
            ),
            Remedy(
                cause=".item() each step",
                where="/far/away/train.py:41",
                remedy="sum on the device",
                gain=0.002,
                note=True,
            ),
        ],
        trace="/far/away/trace.json",
        stopped="enough steps were recorded",
        notes=["a note"],
    )
    return Profile(**(given | fields))
