"""The proof finds faults that are planted on this device, and refuses no honest plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from bench.gpu.setting import Result, Setting, Skipped

HONEST = {
    "cuda": ("optimizer=foreach", "graphs=step", "residency=device graphs=2", "compile=step"),
    "cpu": ("optimizer=foreach", "residency=host", "threads=1", "residency=device"),
}
"""Plans that compute what the baseline computes: four of each of five networks are twenty."""


def run(part: str, setting: Setting) -> Result:
    with graphs_on_cpu() if setting.is_rehearsal else nullcontext():
        if part.startswith("honest-"):
            return honest(part.removeprefix("honest-"), setting)
        return FAULTS[part](setting)


@contextmanager
def graphs_on_cpu() -> Iterator[None]:
    """The stand-in for CUDA graphs that the tests have, so that a rehearsal runs the same lines."""
    from unittest import mock

    from tests.support.fake_graph_recorder import FakeRecorder

    with (
        mock.patch("hotloop.lowering.build._check_plan", lambda parts: None),
        mock.patch("hotloop.lowering.steps.cuda_graph.GraphRecorder", FakeRecorder),
    ):
        yield


def has_graphs(setting: Setting) -> bool:
    return setting.device == "cuda" or setting.is_rehearsal


def honest(name: str, setting: Setting) -> Result:
    from tests.support.tasks.model_families import family

    task = family(name)
    plans = HONEST["cuda"][:3] if setting.is_rehearsal else HONEST[setting.device]
    found = {asked: proof_of(task, task, asked, setting) for asked in plans}
    refused = {asked: one.reason for asked, one in found.items() if not is_trusted(one)}
    figure = f"{len(found) - len(refused)} of {len(found)} honest plans trusted"
    wrong = "; ".join(f"{asked} is {found[asked].parity}: {why}" for asked, why in refused.items())
    return Result(figure, {"proofs": {asked: record_of(one) for asked, one in found.items()}}, wrong)


def proof_of(
    task: Any, planted: Any, asked: str, setting: Setting, change: Callable[[Any], None] = lambda program: None
) -> Any:
    """The verdict on a plan of `planted`, a Task that should be `task`, whose Program `change` may change, too."""
    from bench.gpu.loops import program_of
    from hotloop.parity.proof import prove_programs

    program = program_of(planted, setting.device, dict(pair.split("=") for pair in asked.split()))
    change(program)
    try:
        return prove_programs(task, [program])[0]
    finally:
        program.close()


def is_trusted(parity: Any) -> bool:
    from hotloop.core.records.race import TRUSTED_CLASSES

    return parity.parity in TRUSTED_CLASSES


def record_of(parity: Any) -> dict[str, Any]:
    return {"parity": parity.parity, "reason": parity.reason, "first": parity.first, "seconds": parity.seconds}


def judged(found: dict[str, Any]) -> Result:
    """Passed if no proof trusts a faulty plan."""
    trusted = [asked for asked, one in found.items() if is_trusted(one)]
    told = [f"{asked}: {one.parity}" for asked, one in found.items()]
    wrong = f"not found under {', '.join(trusted)}" if trusted else ""
    return Result(
        f"found: {', '.join(told)}", {"proofs": {asked: record_of(one) for asked, one in found.items()}}, wrong
    )


# ---------------------------------------------------------------- precision


def convolutional(setting: Setting, **fields: Any) -> Any:
    """A network with a convolution and wide matrix products, so that a library takes the reduced kernel for both."""
    import torch
    from torch import nn

    import hotloop

    side, width, dense, batch = (4, 8, 32, 8) if setting.is_rehearsal else (8, 32, 256, 64)
    draws = torch.Generator().manual_seed(1)
    images, labels = torch.randn(4 * batch, 8, side, side, generator=draws), torch.arange(4 * batch) % 10
    given: dict[str, Any] = dict(
        model=lambda: nn.Sequential(
            nn.Conv2d(8, width, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(width * side * side, dense),
            nn.ReLU(),
            nn.Linear(dense, 10),
        ),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        data=(images, labels),
        batch_size=batch,
        epochs=8,
    )
    return hotloop.Task(**given | fields)


@contextmanager
def tf32_products() -> Iterator[None]:
    """Matrix products in TF32, whatever was chosen for them; convolutions as they were."""
    import torch

    switch: Any = torch.backends.cuda.matmul
    before = switch.fp32_precision
    switch.fp32_precision = "tf32"
    try:
        yield
    finally:
        switch.fp32_precision = before


def tf32_left_on(program: Any) -> None:
    """All of the Program's steps run with matrix products in TF32."""
    from dataclasses import replace

    program.parts = replace(program.parts, around=(*program.parts.around, tf32_products))


def tf32_rounded(program: Any) -> None:
    """A stand-in where there is no TF32: the operands of the model's matrix products lose the 13 bits that TF32 lacks."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    def rounded(value: Any) -> Any:
        bits = (value.detach().view(torch.int32) + 0x1000) & ~0x1FFF
        return value + (bits.view(torch.float32) - value).detach()

    for module in program.model.modules():
        if isinstance(module, nn.Linear):
            module.forward = lambda x, own=module: F.linear(rounded(x), rounded(own.weight), own.bias)


def tf32_product(setting: Setting) -> Result:
    """A matrix product in TF32 under a baseline that has it off."""
    if setting.device == "cuda" and not has_tf32():
        raise Skipped("this GPU has no TF32")
    change = tf32_left_on if setting.device == "cuda" else tf32_rounded
    task = convolutional(setting)
    plans = ["optimizer=foreach", *(["graphs=step"] if has_graphs(setting) else [])]
    return judged({asked: proof_of(task, task, asked, setting, change) for asked in plans})


def has_tf32() -> bool:
    """Whether a product in TF32 differs here from one that isn't."""
    import torch

    one, other = (torch.randn(256, 256, device="cuda") for _ in range(2))
    exact = one @ other
    with tf32_products():
        return not torch.equal(exact, one @ other)


def bf16_convolution(setting: Setting) -> Result:
    """A convolution in bf16 in a step that should be fp32."""
    import torch
    from torch import nn

    def narrow(program: Any) -> None:
        for module in program.model.modules():
            if isinstance(module, nn.Conv2d):
                module.forward = lambda x, own=module: own._conv_forward(
                    x.to(torch.bfloat16), own.weight.to(torch.bfloat16), own.bias.to(torch.bfloat16)
                ).float()

    task = convolutional(setting)
    plans = ["optimizer=foreach", *(["graphs=step"] if has_graphs(setting) else [])]
    return judged({asked: proof_of(task, task, asked, setting, narrow) for asked in plans})


# ---------------------------------------------------------------- steps


def plans_of_faults(setting: Setting) -> list[str]:
    """The update over lists, the step as a graph, and compiled, which takes the CPU too long for a rehearsal."""
    compiled = ["compile=step"] if setting.device == "cuda" else []
    return ["optimizer=foreach", *(["graphs=step"] if has_graphs(setting) else []), *compiled]


def wrong_reduction(setting: Setting) -> Result:
    """The mean over a batch leaves out its last sample."""
    import torch
    from torch import nn

    class Shorter(nn.Module):
        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(output[:-1], target[:-1])

    planted = convolutional(setting, loss=Shorter())
    return judged(
        {asked: proof_of(convolutional(setting), planted, asked, setting) for asked in plans_of_faults(setting)}
    )


def dropped_gradient(setting: Setting) -> Result:
    """The gradient of one bias never comes back."""
    from torch import nn

    honest_task = convolutional(setting)

    class Detached(nn.Linear):
        def forward(self, x: Any) -> Any:
            return nn.functional.linear(x, self.weight, self.bias.detach() + 0 * self.bias)

    def model() -> nn.Module:
        made = honest_task.model()  # type: ignore[operator]
        made[3].__class__ = Detached
        return made

    planted = convolutional(setting, model=model)
    return judged({asked: proof_of(honest_task, planted, asked, setting) for asked in plans_of_faults(setting)})


def stale_input(setting: Setting) -> Result:
    """At every other step the input of a graph isn't filled, so that the graph reads the batch of the step before."""
    from unittest import mock

    from hotloop.lowering.steps.cuda_graph import StaticBatches

    task = convolutional(setting)
    found = {}
    for asked, method in {"graphs=step": "fill", "residency=device graphs=2": "split_rows"}.items():
        real, calls = getattr(StaticBatches, method), [0]

        def stale(self: Any, *given: Any, real: Any = real, calls: list[int] = calls) -> Any:
            calls[0] += 1
            return self.batches if calls[0] % 2 else real(self, *given)

        with mock.patch.object(StaticBatches, method, stale):
            found[asked] = proof_of(task, task, asked, setting)
        if not calls[0]:
            raise RuntimeError(f"{asked} never filled its input: the fault wasn't planted")
    return judged(found)


FAULTS: dict[str, Callable[[Setting], Result]] = {
    "tf32-product": tf32_product,
    "bf16-convolution": bf16_convolution,
    "wrong-reduction": wrong_reduction,
    "dropped-gradient": dropped_gradient,
    "stale-input": stale_input,
}
