"""Losses and optimizers give what torch's give, in float64, on random shapes; a sign turned round is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from hotloop import arrays
from tests.support.array_layer_checks import NAMESPACES, PLANTED, QUIET, close, examples, host, remade, turned

# --- losses


@dataclass(frozen=True)
class LossCase:
    loss: type[arrays.Loss]
    reference: Callable[..., torch.Tensor]
    target: Callable[[Any, np.random.Generator, tuple[int, ...]], np.ndarray]
    error: Callable[[np.ndarray, np.ndarray], float]


def _labels(draw: Any, random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return random.integers(0, shape[1], (shape[0], *shape[2:]))


LOSSES = {
    "SquaredError": LossCase(
        arrays.SquaredError,
        F.mse_loss,
        lambda draw, random, shape: random.standard_normal(shape),
        lambda y, t: float(((y - t) ** 2).mean()),
    ),
    "BinaryCrossEntropy": LossCase(
        arrays.BinaryCrossEntropy,
        F.binary_cross_entropy_with_logits,
        lambda draw, random, shape: random.integers(0, 2, shape).astype("float64"),
        lambda y, t: float(((y > 0) != (t == 1)).mean()),
    ),
    "CrossEntropy": LossCase(
        arrays.CrossEntropy, F.cross_entropy, _labels, lambda y, t: float((y.argmax(1) != t).mean())
    ),
}


def compare_loss(case: LossCase, draw: Any, xp: Any, made: type[Any]) -> None:
    shape = (draw(st.integers(1, 4)), draw(st.integers(1, 4)), *draw(st.lists(st.integers(1, 3), max_size=2)))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    y, target = 3 * random.standard_normal(shape), case.target(draw, random, shape)
    loss, scores, right = made(), xp.asarray(y), xp.asarray(target)
    loss.check(right, shape[1:], "y")
    found = loss.forward(scores, right)
    tensor = torch.tensor(y, requires_grad=True)
    expected = case.reference(tensor, torch.tensor(target))
    expected.backward()
    assert tensor.grad is not None
    close(float(found), expected.item(), "loss")
    close(host(loss.backward()), tensor.grad.numpy(), "dY")
    close(float(loss.error(scores, right)), case.error(y, target), "error")


def loss_differs(case: LossCase, made: type[Any]) -> bool:
    @settings(**PLANTED)
    @given(st.data())
    def agrees(data: st.DataObject) -> None:
        compare_loss(case, data.draw, NAMESPACES["numpy"], made)

    try:
        agrees()
    except Exception:
        return True
    return False


@pytest.mark.parametrize("space", NAMESPACES)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_gives_what_torch_gives(name: str, space: str) -> None:
    @settings(max_examples=examples(space), **QUIET)
    @given(st.data())
    def agrees(data: st.DataObject) -> None:
        compare_loss(LOSSES[name], data.draw, NAMESPACES[space], LOSSES[name].loss)

    agrees()


HARMLESS = {
    "shifted = y - xp.max(y, axis=1, keepdims=True)",  # the softmax is the same whatever is taken off
}


@pytest.mark.parametrize("name", LOSSES)
def test_each_sign_of_a_loss_matters(name: str) -> None:
    case = LOSSES[name]
    assert not loss_differs(case, remade(case.loss))
    signs = list(turned(case.loss))
    assert signs
    assert {line for line, wrong in signs if not loss_differs(case, wrong)} <= HARMLESS


def test_ignored_labels_count_nothing() -> None:
    random = np.random.default_rng(0)
    y, target = random.standard_normal((5, 3, 4)), random.integers(0, 3, (5, 4))
    target[0, :], target[2, 1] = -100, -100
    loss, tensor = arrays.CrossEntropy(ignored=-100), torch.tensor(y, requires_grad=True)
    loss.check(target, (3, 4), "y")
    expected = F.cross_entropy(tensor, torch.tensor(target))
    expected.backward()
    close(loss.forward(y, target), expected.item(), "loss")
    assert tensor.grad is not None
    close(loss.backward(), tensor.grad.numpy(), "dY")
    counted = target != -100
    close(loss.error(y, target), (y.argmax(1) != target)[counted].mean(), "error")


def test_large_scores_do_not_overflow() -> None:
    y = np.array([[1000.0, -1000.0], [-1000.0, 1000.0]])
    with np.errstate(all="raise", under="ignore"):
        assert arrays.CrossEntropy().forward(y, np.array([0, 0])) == 1000.0
        binary = arrays.BinaryCrossEntropy()
        assert binary.forward(y, np.array([[1.0, 0.0], [1.0, 1.0]])) == 250.0
        assert np.isfinite(binary.backward()).all()


# --- optimizers


def _betas(make: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    return lambda values, beta1, beta2, **more: make(values, betas=(beta1, beta2), **more)  # type: ignore[call-arg]


_SHARES = {
    "momentum": (0.1, 0.95),
    "alpha": (0.5, 0.99),
    "rho": (0.5, 0.99),
    "beta1": (0.1, 0.95),
    "beta2": (0.5, 0.999),
}

RULES: dict[str, tuple[type[Any], Callable[..., torch.optim.Optimizer], tuple[str, ...]]] = {
    "SGD": (arrays.SGD, torch.optim.SGD, ()),
    "Momentum": (arrays.Momentum, torch.optim.SGD, ("momentum",)),
    "Nesterov": (arrays.Nesterov, lambda p, **a: torch.optim.SGD(p, nesterov=True, **a), ("momentum",)),
    "AdaGrad": (arrays.AdaGrad, torch.optim.Adagrad, ("eps",)),
    "RMSProp": (arrays.RMSProp, torch.optim.RMSprop, ("alpha", "eps")),
    "AdaDelta": (arrays.AdaDelta, torch.optim.Adadelta, ("rho", "eps")),
    "Adam": (arrays.Adam, _betas(torch.optim.Adam), ("beta1", "beta2", "eps")),
    "AdamW": (arrays.AdamW, _betas(torch.optim.AdamW), ("beta1", "beta2", "eps")),
}


def compare_rule(name: str, draw: Any, xp: Any, made: type[Any], steps: int = 10) -> None:
    _, theirs, names = RULES[name]
    arguments = {one: draw(st.floats(*_SHARES.get(one, (1e-8, 1e-3)))) for one in names}
    arguments |= {"lr": draw(st.floats(1e-4, 0.5)), "weight_decay": draw(st.sampled_from([0.0, 0.03]))}
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    start = random.standard_normal(shape)
    rule, weight, parameter = made(**arguments), xp.asarray(start.copy()), torch.tensor(start, requires_grad=True)
    memory, optimizer = rule.memory(weight), theirs([parameter], **arguments)
    for step in range(1, steps + 1):
        gradient = random.standard_normal(shape)
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        rule.update(weight, xp.asarray(gradient), memory, step)
        close(host(weight), parameter.detach().numpy(), f"the weight after step {step}")
    for key, value in memory.items():
        close(host(value), optimizer.state[parameter][key].numpy(), key)


def rule_differs(name: str, made: type[Any]) -> bool:
    @settings(**PLANTED)
    @given(st.data())
    def agrees(data: st.DataObject) -> None:
        compare_rule(name, data.draw, NAMESPACES["numpy"], made)

    try:
        agrees()
    except Exception:
        return True
    return False


@pytest.mark.parametrize("space", NAMESPACES)
@pytest.mark.parametrize("name", RULES)
def test_ten_steps_of_an_optimizer_are_those_of_torch(name: str, space: str) -> None:
    @settings(max_examples=examples(space), **QUIET)
    @given(st.data())
    def agrees(data: st.DataObject) -> None:
        compare_rule(name, data.draw, NAMESPACES[space], RULES[name][0])

    agrees()


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("name", RULES)
def test_each_sign_of_an_optimizer_matters(name: str) -> None:
    made = RULES[name][0]
    assert not rule_differs(name, remade(made))
    # What a class doesn't use of its module or its bases makes no difference to it: other cases see those signs.
    unseen = [line for line, wrong in turned(made) if not rule_differs(name, wrong)]
    own = [line for line in unseen if line not in UNUSED.get(name, ())]
    assert own == []


_FOR_AVERAGES = "mean += (1 - share) * value"
_DECAY = "self._move(w, g + self.weight_decay * w if self.weight_decay else g, memory, step)"
UNUSED = {
    "SGD": {_FOR_AVERAGES},
    "Momentum": {_FOR_AVERAGES},
    "Nesterov": {_FOR_AVERAGES},
    "AdaGrad": {_FOR_AVERAGES},
    "AdamW": {_DECAY},
}


@pytest.mark.parametrize("name", RULES)
def test_the_defaults_are_those_of_torch(name: str) -> None:
    made, _, names = RULES[name]
    theirs: Any = {"RMSProp": "RMSprop", "AdaDelta": "Adadelta", "AdaGrad": "Adagrad"}.get(name, name)
    theirs = torch.optim.SGD if name in ("Momentum", "Nesterov") else getattr(torch.optim, theirs)
    group = theirs([torch.zeros(1, requires_grad=True)]).param_groups[0]
    known = dict(zip(("beta1", "beta2"), group.get("betas", ()), strict=False)) | group
    mine = vars(made())
    assert {one: mine[one] for one in ("lr", "weight_decay", *names) if one != "momentum"} == {
        one: known[one] for one in ("lr", "weight_decay", *names) if one != "momentum"
    }
