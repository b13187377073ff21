"""Ten networks of transformers, small, with random weights, on data made up here: what strangers would train.

hotloop tune bench/zoo.py -p name=bert
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hotloop

WORDS, LENGTH, CLASSES = 1000, 64, 10
SAMPLES = 512


def _made(config: str, model: str, **axes: Any) -> nn.Module:
    """A network of transformers, by the names of its classes."""
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**axes))


_SMALL = dict(
    vocab_size=WORDS,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=512,
    max_position_embeddings=LENGTH,
    num_labels=CLASSES,
)

_NO_ENDS = dict(bos_token_id=0, eos_token_id=0)

CLASSIFIERS: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: _made("BertConfig", "BertForSequenceClassification", **_SMALL),
    "electra": lambda: _made("ElectraConfig", "ElectraForSequenceClassification", embedding_size=128, **_SMALL),
    "distilbert": lambda: _made(
        "DistilBertConfig",
        "DistilBertForSequenceClassification",
        **dict(vocab_size=WORDS, dim=128, n_layers=2, n_heads=2, hidden_dim=512, num_labels=CLASSES),
    ),
}
"""Tokens int64 (B, T), labels int64 (B,)."""

WRITERS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: _made(
        "GPT2Config",
        "GPT2LMHeadModel",
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=128,
        n_layer=2,
        n_head=2,
        **_NO_ENDS,
    ),
    "llama": lambda: _made(
        "LlamaConfig",
        "LlamaForCausalLM",
        **{name: value for name, value in _SMALL.items() if name != "num_labels"},
    ),
    "t5": lambda: _made(
        "T5Config",
        "T5ForConditionalGeneration",
        **dict(vocab_size=WORDS, d_model=128, d_kv=64, d_ff=512, num_layers=2, num_heads=2, decoder_start_token_id=0),
    ),
}
"""Tokens int64 (B, T), which are the labels, too."""

SEEING: dict[str, Callable[[], nn.Module]] = {
    "convnext": lambda: _made(
        "ConvNextConfig",
        "ConvNextForImageClassification",
        **dict(hidden_sizes=[40, 80, 160, 320], depths=[2, 2, 6, 2], num_labels=CLASSES),
    ),
    "mobilenet": lambda: _made(
        "MobileNetV2Config",
        "MobileNetV2ForImageClassification",
        depth_multiplier=0.5,
        image_size=64,
        num_labels=CLASSES,
    ),
    "resnet": lambda: _made(
        "ResNetConfig",
        "ResNetForImageClassification",
        **dict(embedding_size=32, hidden_sizes=[32, 64, 128, 256], layer_type="basic", num_labels=CLASSES),
    ),
    "vit": lambda: _made(
        "ViTConfig",
        "ViTForImageClassification",
        **dict(hidden_size=192, num_hidden_layers=4, num_attention_heads=3, intermediate_size=768),
        **dict(image_size=64, patch_size=8, num_labels=CLASSES),
    ),
}
"""Images float32 (B, 3, 64, 64), labels int64 (B,)."""

NAMES = (*CLASSIFIERS, *WRITERS, *SEEING)


def of_text(model: nn.Module, batch: Any) -> Tensor:
    """The loss that networks of transformers compute by themselves."""
    tokens, labels = batch
    return model(input_ids=tokens, labels=labels).loss


def of_images(model: nn.Module, batch: Any) -> Tensor:
    """The same for networks that see."""
    images, labels = batch
    return model(pixel_values=images, labels=labels).loss


def task(name: str = "bert", epochs: int = 1) -> hotloop.Task:
    draws = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=draws)
    if name in SEEING:
        x, step = torch.randn(SAMPLES, 3, 64, 64, generator=draws), of_images
    else:
        x, step = torch.randint(WORDS, (SAMPLES, LENGTH), generator=draws), of_text
    return hotloop.Task(
        model={**CLASSIFIERS, **WRITERS, **SEEING}[name],
        step=step,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        data=(x, x if name in WRITERS else labels),
        batch_size=16,
        epochs=epochs,
        name=name,
    )
