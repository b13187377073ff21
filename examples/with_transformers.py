"""Models of Hugging Face transformers: three kinds, small and untrained, so that nothing is downloaded.

Run it:

    pip install transformers
    hotloop train examples/with_transformers.py:bert
    hotloop train examples/with_transformers.py:gpt2
    hotloop train examples/with_transformers.py:vit

A pretrained one is used in the same way, with `from_pretrained` in the factory:

    model=lambda: AutoModelForSequenceClassification.from_pretrained("distilbert-base-uncased", num_labels=2)

The factory runs again when a run is resumed; its weights are then replaced by the checkpoint's.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
)

import hotloop

WORDS = 32
LENGTH = 16


def adamw(parameters: hotloop.Parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2e-3)


def step(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    """These models compute their loss themselves, where a batch has `labels`. What they return holds it as `loss`."""
    return model(**batch)


def sentences(count: int = 500) -> dict[str, Tensor]:
    """Sentences of word numbers, padded with 0. Label 1: word 5 comes more often than word 6."""
    draws = torch.Generator().manual_seed(0)
    words = torch.randint(1, WORDS, (count, LENGTH), generator=draws)
    rare = torch.rand(count, LENGTH, generator=draws)
    words[rare < 0.4] = 6
    words[rare < 0.2] = 5
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (count, 1), generator=draws)
    mask = torch.arange(LENGTH) < lengths
    words = words * mask
    labels = ((words == 5).sum(1) > (words == 6).sum(1)).long()
    return {"input_ids": words, "attention_mask": mask.long(), "labels": labels}


def repetitions(count: int = 500) -> dict[str, Tensor]:
    """Sequences whose second half repeats the first. The label -100 leaves the first half out of the loss."""
    half = torch.randint(WORDS, (count, LENGTH // 2), generator=torch.Generator().manual_seed(0))
    words = torch.cat([half, half], dim=1)
    labels = words.clone()
    labels[:, : LENGTH // 2] = -100
    return {"input_ids": words, "labels": labels}


bert = hotloop.Task(
    model=lambda: BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=LENGTH,
        )
    ),
    step=step,
    optimizer=adamw,
    data=sentences(),
    validation=0.2,
    epochs=12,
    # Without it, gradients of the first steps may be large; most recipes for transformers have it.
    clip_norm=1.0,
)

gpt2 = hotloop.Task(
    model=lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    ),
    step=step,
    optimizer=adamw,
    data=repetitions(),
    validation=0.2,
    epochs=20,
    clip_norm=1.0,
    # How many words a batch's loss is a mean over, since the first half of each sequence is left out.
    weight=lambda batch: (batch["labels"] != -100).sum(),
)

vit = hotloop.Task(
    model=lambda: ViTForImageClassification(
        ViTConfig(
            image_size=28,
            patch_size=7,
            num_channels=1,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            num_labels=10,
        )
    ),
    # With (inputs, target) data, `loss` is enough: the model's output holds the scores as `logits`.
    loss=lambda output, target: nn.functional.cross_entropy(output.logits, target),
    metrics={"accuracy": lambda output, target: (output.logits.argmax(1) == target).float()},
    optimizer=adamw,
    data=hotloop.data.digits(),
    epochs=8,
    batch_size=50,
)
