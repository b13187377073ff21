"""Models of other libraries: each trains, its State goes through a file, and a stopped training goes on exactly."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotloop
from hotloop.core.state import differing_paths
from tests.support.programs import a_task, assert_resumes, labelled, last_state, state_after, trained
from tests.support.tasks.tokens_and_images import IMAGES, TOKENS, adam


@pytest.mark.more
def test_bert_gpt2_and_vit_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers (the examples extra)")
    small = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)

    def its_own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Any:
        return model(**batch)

    bert = a_task(
        model=lambda: transformers.BertForSequenceClassification(
            transformers.BertConfig(vocab_size=11, max_position_embeddings=7, num_labels=3, **small)
        ),
        step=its_own_loss,
        data={"input_ids": TOKENS[0], "attention_mask": (TOKENS[0] > 0).long(), "labels": TOKENS[1]},
        optimizer=adam,
        average=0.9,
    )
    assert_resumes(bert)
    gpt2 = a_task(
        model=lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=11, n_positions=7, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
            )
        ),
        step=its_own_loss,
        data={"input_ids": TOKENS[0], "labels": TOKENS[0]},
        optimizer=adam,
    )
    assert "lm_head.weight" not in assert_resumes(gpt2).parameters, "it shares the embedding's"
    vit = a_task(
        model=lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(image_size=8, patch_size=4, num_channels=2, num_labels=3, **small)
        ),
        loss=lambda output, target: F.cross_entropy(output.logits, target),
        data=IMAGES,
        optimizer=adam,
    )
    assert_resumes(vit)


@pytest.mark.more
def test_a_pretrained_model_of_transformers_goes_on_from_its_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers (the examples extra)")
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, num_labels=3
    )
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    saved = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "bert").state_dict()
    task = a_task(
        model=lambda: transformers.BertForSequenceClassification.from_pretrained(tmp_path / "bert"),
        step=lambda model, batch: model(**batch),
        data={"input_ids": TOKENS[0], "labels": TOKENS[1]},
        optimizer=adam,
    )
    start = state_after(task, 0).parameters
    assert all(value.equal(saved[name]) for name, value in start.items())
    assert_resumes(task)


@pytest.fixture(scope="module")
def keras() -> Any:
    """Keras 3 on torch; another backend can't be chosen once it is imported."""
    os.environ["KERAS_BACKEND"] = "torch"
    module = pytest.importorskip("keras", reason="needs keras (the examples extra)")
    assert module.backend.backend() == "torch"
    return module


def keras_models(keras: Any) -> dict[str, Callable[[], nn.Module]]:
    layers = keras.layers

    def functional() -> nn.Module:
        inputs = keras.Input((6,))
        hidden = layers.BatchNormalization()(layers.Dense(8, activation="relu")(inputs))
        return keras.Model(inputs, layers.Dense(3)(layers.Dropout(0.5)(hidden)))

    def unbuilt() -> nn.Module:
        return keras.Sequential([layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(3)])

    class Subclassed(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first = keras.Sequential([keras.Input((6,)), layers.Dense(8)])  # built, unlike the others
            self.norm, self.drop, self.out = layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(3)

        def call(self, x: Tensor, training: bool | None = None) -> Tensor:
            return self.out(self.drop(self.norm(self.first(x))))

    class Within(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out = unbuilt(), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.inner(x, training=self.training))

    return {"functional": functional, "unbuilt": unbuilt, "subclassed": Subclassed, "within": Within}


KERAS = ["functional", "unbuilt", "subclassed", "within"]


@pytest.mark.few("functional", "subclassed")
@pytest.mark.parametrize("name", KERAS)
def test_keras_models_train_and_resume_exactly(name: str, keras: Any) -> None:
    def squares(output: Tensor, target: Tensor) -> Tensor:  # no cross entropy, so that nobody looks at its output
        return F.mse_loss(output, F.one_hot(target, 3).float())

    state = assert_resumes(a_task(model=keras_models(keras)[name], optimizer=adam, average=0.9, loss=squares))
    kinds = [name.rpartition("/")[2] for name in state.parameters if "/" in name]
    assert (kinds.count("kernel"), kinds.count("bias")) == (2, 2)
    assert {"gamma", "beta", "moving_mean", "moving_variance", "seed_generator_state"} <= set(kinds)


@pytest.mark.parametrize("name", KERAS)
def test_dropout_and_batch_norm_of_keras_know_when_they_train(name: str, keras: Any) -> None:
    task = a_task(model=keras_models(keras)[name], optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    program = hotloop.lower(task)
    x, y = labelled()

    def moving() -> list[Tensor]:
        return [value for name, value in program.state().parameters.items() if "moving" in name]

    before = moving()
    losses = [float(program.step((x, y))) for _ in range(3)]
    assert len(set(losses)) == 3, "dropout draws anew at each step"
    assert before and not any(old.equal(new) for old, new in zip(before, moving(), strict=True))
    trained_ones = moving()
    with program.inference() as model:
        first, second = (task.compute(model, (x, y)).output for _ in range(2))
    assert first.equal(second)
    assert all(old.equal(new) for old, new in zip(trained_ones, moving(), strict=True))


def test_a_model_of_keras_has_the_same_names_each_time(keras: Any) -> None:
    build = keras_models(keras)["functional"]
    first = list(hotloop.lower(a_task(model=build)).state().parameters)
    build()
    keras.layers.Dense(3)
    assert list(hotloop.lower(a_task(model=build)).state().parameters) == first
    assert any("seed_generator" in name for name in first)


@pytest.mark.parametrize("name", KERAS)
def test_keras_goes_where_the_plan_says(name: str, keras: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By itself it takes the first accelerator it finds; here it is made to find one, which may not be there."""
    expected = state_after(a_task(model=keras_models(keras)[name]), 3)
    monkeypatch.setattr("keras.src.backend.torch.core.DEFAULT_DEVICE", "cuda")
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
            keras.ops.ones(1)
    assert differing_paths(state_after(a_task(model=keras_models(keras)[name]), 3), expected) == []


@pytest.mark.more
def test_a_keras_module_instead_of_a_factory(keras: Any, tmp_path: Path) -> None:
    module = keras_models(keras)["functional"]()
    before = {name: value.detach().clone() for name, value in module.named_parameters()}
    task = a_task(model=module, optimizer=adam)
    first, second = (last_state(trained(task, tmp_path / name)) for name in "ab")
    assert differing_paths(first, second) == []
    assert all(value.equal(before[name]) for name, value in module.named_parameters())


@pytest.mark.more
def test_models_of_timm() -> None:
    """In a process of its own, since a stand-in for torchvision would be found by others too."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm isn't installed (pip install timm; with --no-deps where torchvision has no fitting build)")
    command = [sys.executable, "-m", "tests.support.processes.timm_training"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 4, done.stdout
