"""What is said of loops as people write them: watched, and then read as a profile is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotloop.core.records.profile import LineTime, Profile, Remedy
from hotloop.profiler.detectors import device_sync, optimizer_updates, python_lines, small_ops
from hotloop.profiler.detectors.step import Detector, ProfiledStep
from hotloop.profiler.session import make_observers
from tests.support.profiler.profiled_steps import watched


def said(detector: Detector, loop: Callable[[], None]) -> list[Remedy]:
    """All that a detector says of a loop, however little it wins."""
    return list(detector(as_step(profiled(loop))))


def profiled(loop: Callable[[], None]) -> Profile:
    return watched(loop, observers=lambda watch: make_observers(watch, None))


def as_step(profile: Profile) -> ProfiledStep:
    assert profile.step_ms is not None
    return ProfiledStep(profile, profile.step_ms)


def named(profile: Profile, text: str) -> str:
    """What is said of the line of this file that holds a text as its comment, if the loop's own work is at that line."""
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    number = next(number for number, line in enumerate(source, 1) if line.endswith(f"# {text}"))
    where = next(one.where for one in profile.operators if one.where.endswith(f"{Path(__file__).name}:{number}"))
    worked = sum(one.ms for one in profile.operators if (one.where, one.phase) == (where, "python"))
    rest = max(0.0, profile.phases["python"] - worked)
    seen = [
        LineTime(where=place, function=function, library="torch", phase="python", ms=ms, own_ms=ms)
        for place, function, ms in ((where, "loop", worked), ("elsewhere.py:1", "rest", rest))
    ]
    found = python_lines.python_in_loop(as_step(profile.model_copy(update={"lines": seen})))
    (cause,) = [one.cause for one in found if one.where == where]
    return cause


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.sparse = nn.Embedding(300, 4), nn.Embedding(400, 4, sparse=True)
        self.frozen = nn.Embedding.from_pretrained(torch.randn(500, 4))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.dense(inputs) + self.sparse(inputs) + self.frozen(inputs)


def test_a_table_is_updated_as_a_whole_if_its_gradient_has_all_rows() -> None:
    model = Tables()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loop() -> None:
        for _ in range(40):
            model(torch.randint(0, 300, (8, 4))).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert [one.cause.partition(" rows")[0] for one in said(optimizer_updates.dense_embedding_update, loop)] == [
        "an embedding of 300"
    ]


def training(aside: Callable[[nn.Module, Tensor, Tensor], object]) -> Profile:
    """Of a loop that does something beside training, with what the network has said, and what is right."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)), nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)

    def loop() -> None:
        for _ in range(40):
            outputs, targets = model(torch.randn(16, 8)), torch.randint(0, 8, (16,))
            F.cross_entropy(outputs, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            aside(model, outputs, targets)

    return profiled(loop)


def test_counting_right_answers_at_each_step_is_a_metric() -> None:
    def aside(model: nn.Module, outputs: Tensor, targets: Tensor) -> None:
        (outputs.argmax(1) == targets).sum().item()  # on one line
        answers = outputs.topk(3).indices  # on several
        (answers == targets[:, None]).any(1).float().mean()
        torch.zeros(16).sin_()  # no metric

    profile = training(aside)
    for text in ("on one line", "on several"):
        assert named(profile, text).startswith("metrics at each step"), text
    assert named(profile, "no metric").startswith("tensors made")


def test_an_action_that_is_chosen_is_no_metric() -> None:
    def aside(model: nn.Module, outputs: Tensor, targets: Tensor) -> None:
        outputs.argmax(1).tolist()  # chosen

    assert named(training(aside), "chosen").startswith("tensors made")


def measuring(during: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[Remedy]:
    """What is said of metrics in a loop that does something between forward and backward, and what its loss is then."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)

    def loop() -> None:
        for _ in range(40):
            outputs, targets = model(torch.randn(16, 8)), torch.randint(0, 8, (16,))
            during(outputs, targets, F.cross_entropy(outputs, targets, reduction="none")).backward()
            optimizer.step()
            optimizer.zero_grad()

    return said(python_lines.step_metrics, loop)


def accuracy(outputs: Tensor, targets: Tensor, losses: Tensor) -> Tensor:
    best = outputs.softmax(1).argmax(1)
    (best == targets).float().mean()
    return losses.mean()


def confusion(outputs: Tensor, targets: Tensor, losses: Tensor) -> Tensor:
    torch.bincount(targets * 8 + outputs.argmax(1), minlength=64)
    return losses.mean()


def masked(outputs: Tensor, targets: Tensor, losses: Tensor) -> Tensor:
    """Of samples that count, by their targets."""
    mask = targets != 0
    many = mask.sum()
    return (losses * mask).sum() / many.clamp(min=1)


def of_answers(outputs: Tensor, targets: Tensor, losses: Tensor) -> Tensor:
    """Of a network's own answers, which weigh the loss."""
    best = outputs.detach().argmax(1)
    wrong = (best != targets).float()
    return (losses * wrong).mean()


@pytest.mark.parametrize(("during", "found"), [(accuracy, 1), (confusion, 1), (masked, 0), (of_answers, 0)])
def test_metrics_between_forward_and_backward_are_told_from_what_the_loss_needs(
    during: Callable[[Tensor, Tensor, Tensor], Tensor], found: int
) -> None:
    causes = [one.cause for one in measuring(during)]
    assert causes == ["metrics at each step, between forward and backward"] * found


def averaged(averages: dict[str, Tensor], model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        averages[name].mul_(0.9).add_(value, alpha=0.1) if value.is_floating_point() else averages[name].copy_(value)


def averaged_parameters(averages: dict[str, Tensor], model: nn.Module) -> None:
    for name, value in model.named_parameters():
        averages[name].data.copy_(0.9 * averages[name].data + 0.1 * value.data)  # parameter by parameter


@pytest.mark.parametrize("average", [averaged, averaged_parameters], ids=lambda average: average.__name__)
def test_an_average_of_weights_is_a_loop_over_parameters(
    average: Callable[[dict[str, Tensor], nn.Module], None],
) -> None:
    averages: dict[str, Tensor] = {}

    def aside(model: nn.Module, *answers: Tensor) -> None:
        if not averages:
            averages.update(copy.deepcopy(model.state_dict()))
        average(averages, model)

    profile = training(aside)
    loop = [one for one in small_ops.python_loops(as_step(profile)) if "over parameters" in one.cause]
    assert len(loop) == 1 and "_foreach_lerp_" in loop[0].remedy
    if average is averaged_parameters:
        assert named(profile, "parameter by parameter") == loop[0].cause


def test_a_loop_over_samples_in_place_is_none_over_parameters() -> None:
    noise = torch.zeros(12, 8)

    def aside(*given: object) -> None:
        for row in noise:
            row.add_(torch.rand(8))

    assert not [one for one in small_ops.python_loops(as_step(training(aside))) if "over parameters" in one.cause]


class Oscillating(nn.Module):
    def forward(self, place: Tensor, speed: Tensor) -> Tensor:
        for _ in range(12):
            force = -place.sin()
            speed = speed + force * 0.1
            place = place + speed * 0.1
        return place


def test_the_lines_of_a_loop_over_time_are_told_of_as_one() -> None:
    model, start = Oscillating(), nn.Parameter(torch.randn(16))
    optimizer = torch.optim.SGD([start], lr=0.01)

    def loop() -> None:
        for _ in range(40):
            model(start, torch.zeros(16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    (found,) = [one for one in said(small_ops.python_loops, loop) if "of 12 rounds" in one.cause]
    assert found.evidence.startswith("3 lines of Oscillating.forward run 12 times")


def test_outputs_that_go_to_numpy_and_come_back_are_moved_and_targets_are_not() -> None:
    def aside(model: nn.Module, outputs: Tensor, targets: Tensor) -> None:
        kept = outputs.detach()[:, :5].cpu().numpy()  # leaves
        torch.from_numpy(kept).to("cpu").abs().max()  # comes back
        outputs.detach()[:, :6].sigmoid().numpy()
        targets.to("cpu")
        F.cross_entropy(model(torch.ones(16, 8)), targets)

    found = list(device_sync.no_op_copies(as_step(training(aside))))
    source = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert [(source[int(one.where.rpartition(":")[2]) - 1].partition("  # ")[2], one.cause[:18]) for one in found] == [
        ("leaves", "a tensor moved bac"),
        ("comes back", "a copy to the devi"),
    ]
    assert all(one.note for one in found)


def test_a_number_that_is_read_after_an_update_by_hand_is_read_at_each_step() -> None:
    weight = torch.zeros(8, 1, requires_grad=True)

    def loop() -> None:
        for _ in range(60):
            weight.grad = None
            loss = (torch.randn(16, 8) @ weight - 1).square().mean()
            loss.backward()
            weight.data -= 0.01 * weight.grad
            loss.log10().item()

    assert [one.cause.partition(":")[0] for one in said(device_sync.host_sync, loop)] == [".item() at each step"]


def test_an_optimizers_own_numbers_are_not_read_by_the_loop() -> None:
    weight = torch.zeros(8, 1, requires_grad=True)
    optimizer = torch.optim.Adam([weight], foreach=False)

    def loop() -> None:
        for _ in range(60):
            optimizer.zero_grad()
            (torch.randn(16, 8) @ weight - 1).square().mean().backward()
            optimizer.step()

    assert said(device_sync.host_sync, loop) == []
