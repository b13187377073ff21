"""Plain JAX: the data on the device, parameters and Adam's state donated, and a jitted `lax.scan` over the epoch's batches,
or with the option `step` a jitted step: XLA runs convolutions inside of loops on one thread of a CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from bench.speed.data import load
from bench.speed.job import LR, Evaluate, Job, main

Weights = list[dict[str, Any]]


def drawn(key: Any, fan_in: int, *shape: int) -> dict[str, Any]:
    """As torch draws them: uniform within one over the root of the inputs."""
    limit = fan_in**-0.5
    one, other = random.split(key)
    return {
        "w": random.uniform(one, shape, minval=-limit, maxval=limit),
        "b": random.uniform(other, shape[-1:], minval=-limit, maxval=limit),
    }


def conv(layer: dict[str, Any], x: Any, padding: str) -> Any:
    return (
        lax.conv_general_dilated(x, layer["w"], (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))
        + layer["b"]
    )


def pooled(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def dropped(key: Any, x: Any, rate: float) -> Any:
    """Without a key nothing is dropped."""
    return x if key is None else jnp.where(random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def small_cnn(weights: Weights, x: Any, key: Any) -> Any:
    x = pooled(jax.nn.relu(conv(weights[0], x, "SAME")))
    return mlp(weights[1:], x, key)


def tutorial_cnn(weights: Weights, x: Any, key: Any) -> Any:
    keys = (None, None) if key is None else random.split(key)
    x = jax.nn.relu(conv(weights[0], x, "VALID"))
    x = dropped(keys[0], pooled(jax.nn.relu(conv(weights[1], x, "VALID"))), 0.25).reshape(len(x), -1)
    x = dropped(keys[1], jax.nn.relu(x @ weights[2]["w"] + weights[2]["b"]), 0.5)
    return x @ weights[3]["w"] + weights[3]["b"]


def mlp(weights: Weights, x: Any, key: Any) -> Any:
    x = x.reshape(len(x), -1)
    for layer in weights[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ weights[-1]["w"] + weights[-1]["b"]


_SMALL = (small_cnn, ((9, 3, 3, 1, 10), (1960, 1960, 100), (100, 100, 10)))
NETWORKS = {
    "W1": _SMALL,
    "W2": _SMALL,
    "W3": (tutorial_cnn, ((9, 3, 3, 1, 32), (288, 3, 3, 32, 64), (9216, 9216, 128), (128, 128, 10))),
    "W4": (mlp, ((784, 784, 128), (128, 128, 10))),
    "W5": (mlp, ((784, 784, 2048), (2048, 2048, 2048), (2048, 2048, 10))),
}


def loss_of(forward: Any, weights: Weights, x: Any, y: Any, key: Any) -> Any:
    logits = jax.nn.log_softmax(forward(weights, x, key))
    return -jnp.take_along_axis(logits, y[:, None], 1).mean()


def adam(state: Any, gradients: Any) -> Any:
    """Kingma and Ba, "Adam", 2015, algorithm 1, with torch's numbers."""
    weights, first, second, count = state
    count = count + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, gradients)
    one, other = 1 - 0.9**count, 1 - 0.999**count
    weights = jax.tree.map(lambda w, m, v: w - LR * (m / one) / (jnp.sqrt(v / other) + 1e-8), weights, first, second)
    return weights, first, second, count


def stepped(forward: Any, state: Any, x: Any, y: Any, index: Any, key: Any, number: Any) -> Any:
    """One step, the one of that number, on the samples at `index`: the new state, and the loss."""
    own = random.fold_in(key, number)
    loss, gradients = jax.value_and_grad(partial(loss_of, forward))(state[0], x[index], y[index], own)
    return adam(state, gradients), loss


one_step = jax.jit(stepped, static_argnums=0, donate_argnums=1)


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def scanned(forward: Any, state: Any, x: Any, y: Any, order: Any, key: Any, number: Any) -> Any:
    """`order`: (steps, batch) positions; `number` is that of the first step."""

    def step(state: Any, batch: Any) -> Any:
        return stepped(forward, state, x, y, batch[0], key, batch[1])

    return lax.scan(step, state, (order, number + jnp.arange(len(order))))


def train(job: Job) -> Evaluate:
    jax.config.update("jax_platforms", "cpu")  # it takes an accelerator by itself
    data = load(job.workload.data).prepared()
    x, test_x = (jnp.asarray(part.transpose(0, 2, 3, 1)) for part in (data.x, data.test_x))
    y, test_y = jnp.asarray(data.y), jnp.asarray(data.test_y)
    forward, shapes = NETWORKS[job.workload.name]
    weights = [drawn(key, *shape) for key, shape in zip(random.split(random.key(0), len(shapes)), shapes, strict=True)]
    state = (weights, *(jax.tree.map(jnp.zeros_like, weights) for _ in range(2)), jnp.zeros(()))
    job.marks.sync = lambda: jax.block_until_ready(state)
    draws = np.random.default_rng(0)
    key, batch, number = random.key(1), job.workload.batch, 0
    by_step, goes_on = job.options == ("step",), True
    for _ in range(job.epochs):
        order = draws.permutation(len(x))[: len(x) // batch * batch].reshape(-1, batch)
        # In turns with others a part of the epoch at a time, all of one length: another would be compiled anew.
        while goes_on and len(order) >= (steps := 1 if by_step else min(job.marks.left, len(x) // batch)):
            if by_step:
                state, _ = one_step(forward, state, x, y, order[0], key, number)
            else:
                state, _ = scanned(forward, state, x, y, order[:steps], key, number)
            order, number = order[steps:], number + steps
            goes_on = job.marks.step(steps)
        if not goes_on:
            break

    def evaluate() -> tuple[float, float]:
        few = job.few
        right = forward(state[0], test_x[job.tested], None).argmax(1) == test_y[job.tested]
        return float(loss_of(forward, state[0], x[few], y[few], None)), float(right.mean())

    return evaluate


if __name__ == "__main__":
    main(train)
