"""Tasks with several optimizers: each yielded loss updates one of them, as in a loop that is written by hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, RMSprop
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau

import hotloop
from hotloop.core.plan_request import PlanRequest
from hotloop.core.state import differing_paths
from hotloop.errors import CheckpointError, HotloopError, PlanError, TaskError
from hotloop.plan import Plan
from tests.support.programs import advance, assert_resumes, last_state, state_after, through_file, trained
from tests.support.runs import lower_requested

SAMPLES, BATCH = 40, 8
DRAWN = torch.Generator().manual_seed(7)
REAL = torch.randn(SAMPLES, 6, generator=DRAWN)
NOISE = torch.randn(SAMPLES, 3, 4, generator=DRAWN)
MIX = torch.rand(SAMPLES, 3, 1, generator=DRAWN)


class Pair(nn.Module):
    """A generator with a BatchNorm, and a discriminator with one if asked for."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.g = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
        normed = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.d = nn.Sequential(nn.Linear(6, 8), normed, nn.LeakyReLU(0.2), nn.Linear(8, 1))


def of(part: str) -> Callable[[str, nn.Parameter], bool]:
    return lambda name, value: name.startswith(f"{part}.")


def adams(p: Any) -> dict[str, torch.optim.Optimizer]:
    betas = (0.5, 0.999)
    return {"d": Adam(p.where(of("d")), lr=2e-2, betas=betas), "g": Adam(p.where(of("g")), lr=1e-2, betas=betas)}


def plain(p: Any) -> dict[str, torch.optim.Optimizer]:
    return {"d": SGD(p.where(of("d")), lr=5e-3, momentum=0.9), "g": RMSprop(p.where(of("g")), lr=1e-2)}


def like(value: float, logits: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, value))


def alternate(model: Any, batch: Any) -> Iterator[Any]:
    """The order of the DCGAN tutorial."""
    real, noise, _ = batch
    fake = model.g(noise[:, 0])
    yield "d", like(1, model.d(real)) + like(0, model.d(fake.detach()))
    judged = model.d(fake)
    yield "g", like(1, judged), {"fooled": (judged > 0).float().mean()}


def wasserstein(model: Any, batch: Any) -> Iterator[Any]:
    """Three critic steps with a gradient penalty, then one of the generator (WGAN-GP)."""
    real, noise, mix = batch
    for number in range(3):
        fake = model.g(noise[:, number]).detach()
        between = (mix[:, number] * real + (1 - mix[:, number]) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(model.d(between).sum(), between, create_graph=True)
        penalty = 10 * (slope.norm(dim=1) - 1).square().mean()
        drift = 1e-3 * model.d(real).square().mean()
        yield "d", model.d(fake).mean() - model.d(real).mean() + penalty + drift, {"penalty": penalty}
    yield "g", -model.d(model.g(noise[:, 0])).mean()


def task(step: Any = alternate, optimizer: Any = adams, **fields: Any) -> hotloop.Task:
    given: dict[str, Any] = dict(model=Pair, data=(REAL, NOISE, MIX), batch_size=BATCH, shuffle=False)
    return hotloop.Task(step=step, optimizer=optimizer, **given | fields)


def batches(epochs: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for _ in range(epochs):
        yield from zip(REAL.split(BATCH), NOISE.split(BATCH), MIX.split(BATCH), strict=True)


def parts_of(model: nn.Module) -> Any:
    return hotloop.task.Parameters(model)


def assert_as_by_hand(a_task: hotloop.Task, model: nn.Module, epochs: int = 2) -> None:
    """The weights and buffers of so many epochs are those of a model that was trained by hand, bit by bit."""
    program = hotloop.lower(a_task)
    for _ in range(epochs):
        while not program.advance(3).ended:
            pass
        program.end_epoch(1.0)
    ours = program.model.state_dict()
    program.close()
    for name, value in model.state_dict().items():
        assert torch.equal(value, ours[name]), name


def test_a_dcgan_is_bitwise_the_loop_of_the_tutorial() -> None:
    a_task = task()
    model = a_task.build_model().train()
    optimizers = adams(parts_of(model))
    for real, noise, _ in batches(2):
        model.zero_grad()
        like(1, model.d(real)).backward()
        fake = model.g(noise[:, 0])
        like(0, model.d(fake.detach())).backward()
        optimizers["d"].step()
        model.g.zero_grad()
        like(1, model.d(fake)).backward()
        optimizers["g"].step()
    assert_as_by_hand(a_task, model)


@pytest.mark.parametrize("clip", [{}, {"clip_norm": 0.3}, {"clip_value": 0.01}], ids=str)
def test_a_wgan_with_a_gradient_penalty_is_bitwise_a_loop_by_hand(clip: dict[str, float]) -> None:
    a_task = task(wasserstein, plain, model=lambda: Pair(norm=False), **clip)
    model = a_task.build_model().train()
    optimizers = plain(parts_of(model))
    for batch in batches(2):
        for name, loss, *_ in wasserstein(model, batch):
            values = list(getattr(model, name).parameters())
            model.zero_grad()
            loss.backward()
            if "clip_norm" in clip:
                nn.utils.clip_grad_norm_(values, clip["clip_norm"])
            if "clip_value" in clip:
                nn.utils.clip_grad_value_(values, clip["clip_value"])
            optimizers[name].step()
    assert_as_by_hand(a_task, model)


def test_autocast_that_stays_open_over_an_update_has_the_new_weights() -> None:
    def step(model: Any, batch: Any) -> Iterator[Any]:
        with torch.autocast("cpu", torch.bfloat16):
            yield from alternate(model, batch)

    a_task = task(step, model=lambda: Pair(norm=False))
    model = a_task.build_model().train()
    optimizers = adams(parts_of(model))
    for real, noise, _ in batches(2):
        with torch.autocast("cpu", torch.bfloat16):
            fake = model.g(noise[:, 0])
            loss = like(1, model.d(real)) + like(0, model.d(fake.detach()))
        loss.backward()
        optimizers["d"].step()
        with torch.autocast("cpu", torch.bfloat16):
            loss = like(1, model.d(fake))
        optimizers["g"].zero_grad()
        loss.backward()
        optimizers["g"].step()
        model.zero_grad()
    assert_as_by_hand(a_task, model)


def test_a_loss_gives_gradients_to_the_parameters_of_its_optimizer_alone() -> None:
    seen = []

    def step(model: Any, batch: Any) -> Iterator[Any]:
        whole = model.d(model.g(batch[1][:, 0]))  # not detached
        yield "d", whole.mean()
        seen.append([value.grad is None for value in model.g.parameters()])
        yield "g", model.d(model.g(batch[1][:, 0])).mean()

    advance(hotloop.lower(task(step)), 2)
    assert all(map(all, seen))


# --- figures


def test_figures_are_the_mean_of_each_optimizers_losses_and_their_sum(tmp_path: Path) -> None:
    (row,) = trained(task(wasserstein, plain), tmp_path / "run").epochs
    assert row["train_loss"] == pytest.approx(row["train_d_loss"] + row["train_g_loss"])
    assert row["train_penalty"] > 0
    losses: dict[str, list[float]] = {"d": [], "g": []}
    model = task(wasserstein, plain).build_model().train()
    optimizers = plain(parts_of(model))
    for batch in batches(1):
        for name, loss, *_ in wasserstein(model, batch):
            losses[name].append(loss.item())
            optimizers[name].zero_grad()
            loss.backward(inputs=list(getattr(model, name).parameters()))
            optimizers[name].step()
    for name, values in losses.items():
        assert row[f"train_{name}_loss"] == pytest.approx(np.mean(values), rel=1e-5)


def test_a_figure_that_some_batches_lack_is_the_mean_over_those_that_have_it(tmp_path: Path) -> None:
    def step(model: Any, batch: Any) -> Iterator[Any]:
        model.steps += 1
        yield "d", model.d(batch[0]).square().mean()
        if model.steps % 2 == 0:
            made = model.g(batch[1][:, 0]).square().mean()
            yield "g", made - made.detach() + 5
        return {"one": 1}

    def build() -> nn.Module:
        model = Pair(norm=False)
        model.register_buffer("steps", torch.zeros(()))
        return model

    a_task = task(step, plain, model=build)
    (row,) = trained(a_task, tmp_path / "run").epochs
    assert row["train_g_loss"] == pytest.approx(5.0)
    assert row["train_one"] == 1
    assert_resumes(a_task)


def test_validation_takes_no_update_and_may_have_a_gradient_in_its_loss(tmp_path: Path) -> None:
    a_task = task(wasserstein, plain, validation=(REAL, NOISE, MIX), test=(REAL[:8], NOISE[:8], MIX[:8]))
    run = trained(a_task, tmp_path / "run")
    program = hotloop.lower(task(wasserstein, plain))
    advance(program, 5)
    assert differing_paths(last_state(run), program.state()) == []
    model = program.model.eval()
    with torch.enable_grad():
        losses = [[loss.item() for _, loss, *_ in wasserstein(model, batch)] for batch in batches(1)]
    expected = {"d": np.mean([row[:3] for row in losses]), "g": np.mean([row[3] for row in losses])}
    for name, value in expected.items():
        assert run.epochs[0][f"validation_{name}_loss"] == pytest.approx(value, rel=1e-4)
    assert run.final is not None and "test_penalty" in run.final
    assert hotloop.evaluate(run, task=a_task).metrics["g_loss"] == pytest.approx(run.final["test_g_loss"])


# --- a run goes on exactly


def scheduled(optimizers: dict[str, torch.optim.Optimizer], total: int) -> dict[str, Any]:
    return {"d": OneCycleLR(optimizers["d"], 0.1, total_steps=total), "g": ExponentialLR(optimizers["g"], 0.9)}


CARRIED = {
    "plain": {},
    "average": {"average": 0.9},
    "schedules": {"schedule": scheduled},
    "plateau": {"schedule": lambda both: {"d": ReduceLROnPlateau(both["d"], patience=0)}, "schedule_every": "epoch"},
    "one schedule": {"schedule": lambda both: ExponentialLR(both["g"], 0.9)},
    "clipped": {"clip_norm": 0.1, "clip_value": 0.1},
}


@pytest.mark.parametrize("name", CARRIED)
@pytest.mark.parametrize("step", [alternate, wasserstein])
def test_it_resumes_bitwise(name: str, step: Any) -> None:
    fields = dict(optimizer=plain, model=lambda: Pair(norm=False)) if step is wasserstein else {}
    assert_resumes(task(step, epochs=3, shuffle=True, **fields | CARRIED[name]))


@pytest.mark.more
def test_a_run_that_was_stopped_ends_as_one_that_never_was(tmp_path: Path) -> None:
    given = dict(epochs=4, validation=(REAL, NOISE, MIX), schedule=scheduled, average=0.9)
    whole = trained(task(**given), tmp_path / "whole")

    def stop(view: Any) -> None:
        if view.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(task(**given, callbacks=[stop]), tmp_path / "run", checkpoint_every="3")
    resumed = hotloop.fit(task(**given), run=tmp_path / "run", resume=True, device="cpu", progress=False)
    assert differing_paths(last_state(whole), last_state(resumed)) == []
    assert whole.final == resumed.final


def test_schedules_move_their_own_optimizers() -> None:
    program = hotloop.lower(task(epochs=2, schedule=scheduled))
    advance(program, 3)
    reference = adams(parts_of(task().build_model()))
    expected = scheduled(reference, 10)
    for _ in range(3):
        for one in [*reference.values(), *expected.values()]:
            one.step()
    rates = [group["lr"] for group in program.optimizer.param_groups]
    assert rates == [group["lr"] for one in reference.values() for group in one.param_groups]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (task(optimizer=plain), "Adam 'd' and Adam 'g', where the Task has SGD 'd' and RMSprop 'g'"),
        (
            task(optimizer=lambda p: {"g": adams(p)["g"], "d": adams(p)["d"]}),
            "where the Task has Adam 'g' and Adam 'd'",
        ),
        (task(lambda model, batch: model.d(batch[0]).mean(), Adam), "Adam 'd' and Adam 'g', where the Task has Adam"),
    ],
    ids=["kinds", "names", "one"],
)
def test_a_checkpoint_of_other_optimizers_is_refused(other: hotloop.Task, said: str) -> None:
    state = through_file(state_after(task(), 2))
    program = hotloop.lower(other)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        program.restore(state)


# --- plans


@pytest.mark.parametrize("axes", [{"optimizer": "forloop"}, {"residency": "host"}, {"threads": 1}], ids=str)
def test_eager_plans_train_it_bitwise_alike(axes: dict[str, Any]) -> None:
    program = hotloop.lower(task(), Plan(**axes))
    advance(program, 7)
    program.close()
    assert differing_paths(program.state(), state_after(task(), 7)) == []


@pytest.mark.parametrize("form", ["foreach", "fused"])
def test_each_optimizer_has_the_form_of_the_plan(form: Any) -> None:
    a_task = task(model=lambda: Pair(norm=False))
    program = hotloop.lower(a_task, Plan(optimizer=form))
    assert all(group[form] for group in program.optimizer.param_groups)
    advance(program, 7)
    expected = state_after(a_task, 7)
    for name, value in program.state().parameters.items():
        if name != "g.0.bias":  # before a BatchNorm a bias has a gradient of rounding alone
            torch.testing.assert_close(value, expected.parameters[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "axes",
    [
        {"compile": "step"},
        {"compile": "forward"},
        {"compile": "package"},
        {"accumulation": 2},
        {"precision": "fp16"},
        {"graphs": "step"},
    ],
    ids=str,
)
def test_what_takes_one_update_in_a_step_is_refused(axes: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="the optimizers 'd', 'g'") as caught:
        hotloop.lower(task(), Plan(**axes))
    assert "\n" not in str(caught.value)


def test_bf16_casts_anew_after_each_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine may have no bf16 instructions, without which the plan is refused."""
    monkeypatch.setattr("hotloop.lowering.build.check", lambda *args: None)
    step = lambda model, batch: alternate(model, batch)  # noqa: E731
    program = hotloop.lower(task(step, model=lambda: Pair(norm=False)), Plan(precision="bf16"))
    advance(program, 7)

    def cast(model: Any, batch: Any) -> Iterator[Any]:
        with torch.autocast("cpu", torch.bfloat16):
            yield from alternate(model, batch)

    expected = state_after(task(cast, model=lambda: Pair(norm=False)), 7)
    assert differing_paths(program.state(), expected) == []


def test_auto_trains_eagerly_and_says_why(tmp_path: Path) -> None:
    said: list[str] = []
    program = lower_requested(task(epochs=1000), PlanRequest.from_value("auto", {}), said.append)
    program.close()
    assert program.parts.plan.compile == "none"
    assert any("the optimizers 'd', 'g' in turn" in line for line in said)


def test_a_proof_says_in_a_line_that_there_is_none() -> None:
    parity = hotloop.check(task(), Plan(optimizer="foreach"))
    assert parity.parity == "unproven"
    assert "several optimizers" in parity.reason


@pytest.mark.more
def test_a_profile_has_each_optimizer() -> None:
    profile = hotloop.profile(task(wasserstein, plain), steps=4)
    assert {use.kind for use in profile.optimizers} == {"SGD", "RMSprop"}
    assert sum(use.steps for use in profile.optimizers) == pytest.approx(4)


@pytest.mark.more
def test_a_race_takes_it() -> None:
    verdict = hotloop.race(task(), ["baseline", Plan(optimizer="forloop")], time_limit="1s", prove=None, progress=False)
    assert all(plan.failure is None for plan in verdict.plans)


# --- put to use


def test_the_generator_predicts_and_is_exported(tmp_path: Path) -> None:
    a_task = task(predict=lambda model, noise: model.g(noise))
    run = trained(a_task, tmp_path / "run")
    noise = NOISE[:, 0].numpy()
    images = hotloop.predict(run, noise, task=a_task)
    model = hotloop.load_model(run, task=a_task)
    np.testing.assert_allclose(images, model.g(NOISE[:, 0]).detach().numpy(), rtol=1e-5)
    hotloop.export(run, tmp_path / "g.pt2", task=a_task, inputs=noise)
    loaded = torch.export.load(tmp_path / "g.pt2").module()
    np.testing.assert_allclose(loaded(NOISE[:5, 0]).detach().numpy(), images[:5], rtol=1e-5)
    for name in ("g.pt2", "g.safetensors"):
        with pytest.raises(HotloopError, match=r"can't take the training data's inputs.*inputs=") as caught:
            hotloop.export(run, tmp_path / name, task=a_task)
        assert "\n" not in str(caught.value)


def test_explain_says_that_it_follows_one_loss() -> None:
    from hotloop.explainer.explain import explain

    with pytest.raises(TaskError, match="losses for several optimizers"):
        explain(task())
