"""Plain JAX: the data on the device, parameters and Adam's state donated, and a jitted `lax.scan` over the epoch's batches,
or with the option `step` a jitted step: XLA runs convolutions inside of loops on one thread of a CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax, random

from bench.speed.data import load
from bench.speed.job import LR, Evaluate, Job, main
from bench.speed.start import channels_last_weights, epoch_order

Weights = list[dict[str, Any]]


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


NETWORKS = {"W1": small_cnn, "W2": small_cnn, "W3": tutorial_cnn, "W4": mlp, "W5": mlp}


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
    forward = NETWORKS[job.workload.name]
    weights = [{"w": jnp.asarray(w), "b": jnp.asarray(b)} for w, b in channels_last_weights(job.workload.name)]
    state = (weights, *(jax.tree.map(jnp.zeros_like, weights) for _ in range(2)), jnp.zeros(()))
    job.marks.sync = lambda: jax.block_until_ready(state)
    key, batch, number = random.key(1), job.workload.batch, 0
    by_step, goes_on = job.options == ("step",), True
    for epoch in range(job.epochs):
        order = epoch_order(len(x), epoch)[: len(x) // batch * batch].reshape(-1, batch)
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
