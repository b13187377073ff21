"""A network in NumPy, with a slow function."""

import numpy as np

draw = np.random.default_rng(0)
inputs, weights = draw.normal(size=(64, 8)), draw.normal(size=(8, 1))


def slow(values):
    return sum(float(value) ** 2 for value in values)


def step():
    global weights
    outputs = inputs @ weights
    weights = weights - 0.001 * inputs.T @ outputs
    return slow(outputs[:, 0])


for _ in range(20000):
    loss = step()
print(loss)
