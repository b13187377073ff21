"""Keras 3 on torch or on JAX: `compile` and `fit` with nothing turned on or off but the progress bar and the own shuffling."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from bench.speed.data import load
from bench.speed.job import LR, Evaluate, Job, main
from bench.speed.marks import Marks
from bench.speed.start import channels_last_weights, epoch_order


def layers(name: str) -> list[Any]:
    from keras import layers as of

    small = [
        of.Conv2D(10, 3, padding="same", activation="relu"),
        of.MaxPooling2D(2),
        of.Flatten(),
        of.Dense(100, activation="relu"),
        of.Dense(10),
    ]
    tutorial = [
        of.Conv2D(32, 3, activation="relu"),
        of.Conv2D(64, 3, activation="relu"),
        of.MaxPooling2D(2),
        of.Dropout(0.25),
        of.Flatten(),
        of.Dense(128, activation="relu"),
        of.Dropout(0.5),
        of.Dense(10),
    ]
    relu = "relu"
    return {
        "W1": small,
        "W2": small,
        "W3": tutorial,
        "W4": [of.Flatten(), of.Dense(128, activation=relu), of.Dense(10)],
        "W5": [of.Flatten(), of.Dense(2048, activation=relu), of.Dense(2048, activation=relu), of.Dense(10)],
    }[name]


def counting(marks: Marks) -> Any:
    import keras

    class Counting(keras.callbacks.Callback):
        """Counts a step where the next begins: with an `on_train_batch_end` Keras would wait for each step's loss."""

        called = False

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if self.called and not marks.step():
                self.model.stop_training = True
            self.called = True

        def on_train_end(self, logs: Any = None) -> None:
            marks.done += self.called  # the last, after which none begins

    return Counting()


def batches(x: Any, y: Any, size: int) -> tuple[Any, Any]:
    """Returns the samples in the order in which all peers see them, and the callback that sets each epoch's order."""
    import keras

    class Batches(keras.utils.PyDataset):
        order = epoch_order(len(x), 0)

        def __len__(self) -> int:
            return len(x) // size

        def __getitem__(self, index: int) -> tuple[Any, Any]:
            rows = self.order[index * size : (index + 1) * size]
            return x[rows], y[rows]

    class Ordering(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            samples.order = epoch_order(len(x), epoch)

    samples = Batches()
    return samples, Ordering()


def waiting(model: Any) -> Callable[[], None]:
    """Waits until JAX has computed the steps that were called."""

    def wait() -> None:
        import jax

        kinds = getattr(model, "_jax_state", None) or {}
        jax.block_until_ready([list(values) for values in kinds.values()])  # Keras's own lists are nothing to JAX

    return wait


def train(job: Job) -> Evaluate:
    os.environ["KERAS_BACKEND"] = job.options[0] if job.options else "torch"
    os.environ["KERAS_TORCH_DEVICE"] = job.device  # each takes an accelerator by itself unless it is told so
    os.environ["JAX_PLATFORMS"] = "cpu"
    import keras

    keras.utils.set_random_seed(0)
    data = load(job.workload.data).prepared()
    x, test_x = (part.transpose(0, 2, 3, 1) for part in (data.x, data.test_x))
    model = keras.Sequential([keras.Input(x.shape[1:]), *layers(job.workload.name)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.set_weights([part for layer in channels_last_weights(job.workload.name) for part in layer])
    model.compile(optimizer=keras.optimizers.Adam(LR, epsilon=1e-8), loss=loss)
    samples, ordering = batches(x, data.y, job.workload.batch)
    callbacks = [ordering, counting(job.marks)]
    if keras.backend.backend() == "jax":
        job.marks.sync = waiting(model)
    elif job.device != "cpu":
        from bench.peers.on_torch import placed

        placed(job)
    model.fit(samples, epochs=job.epochs, callbacks=callbacks, shuffle=False, verbose=0)

    def evaluate() -> tuple[float, float]:
        model.compile(loss=loss, metrics=["accuracy"])
        few = model.evaluate(x[job.few], data.y[job.few], verbose=0)
        return float(few[0]), float(model.evaluate(test_x[job.tested], data.test_y[job.tested], verbose=0)[1])

    return evaluate


if __name__ == "__main__":
    main(train)
