"""Small networks of transformers and timm, with random weights, on data made up here: what strangers would train.

Of the `FIRST` one trains with RMSprop and one with SGD and momentum, all others with AdamW; one draws its samples
from a map-style data set in a single long epoch, the others have theirs in memory.

python -m hotloop tune bench/zoo.py -p name=bert      from the project's folder
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import hotloop
from bench.without_torchvision import imported_timm

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
_GROUPED = dict(num_key_value_heads=1)
_OF_ITS_OWN = dict(vocab_size=WORDS, num_labels=CLASSES)
_ENDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)


def _writing(**others: Any) -> dict[str, Any]:
    return {name: value for name, value in _SMALL.items() if name != "num_labels"} | others


def _of_timm(name: str, **options: Any) -> nn.Module:
    return imported_timm().create_model(name, num_classes=CLASSES, **options)


CLASSIFIERS: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: _made("BertConfig", "BertForSequenceClassification", **_SMALL),
    "electra": lambda: _made("ElectraConfig", "ElectraForSequenceClassification", embedding_size=128, **_SMALL),
    "deberta": lambda: _made(
        "DebertaV2Config",
        "DebertaV2ForSequenceClassification",
        **_SMALL,
        **dict(relative_attention=True, position_buckets=32, pos_att_type=["p2c", "c2p"]),
    ),
    "distilbert": lambda: _made(
        "DistilBertConfig",
        "DistilBertForSequenceClassification",
        **_OF_ITS_OWN,
        **dict(dim=128, n_layers=2, n_heads=2, hidden_dim=512, max_position_embeddings=LENGTH),
    ),
    "fnet": lambda: _made("FNetConfig", "FNetForSequenceClassification", **_SMALL),
    "funnel": lambda: _made(
        "FunnelConfig",
        "FunnelForSequenceClassification",
        **_OF_ITS_OWN,
        **dict(block_sizes=[1, 1], d_model=128, n_head=2, d_head=64, d_inner=512),
    ),
    "modernbert": lambda: _made("ModernBertConfig", "ModernBertForSequenceClassification", **_SMALL, **_ENDS),
    "robertaxl": lambda: _made(
        "XLMRobertaXLConfig",
        "XLMRobertaXLForSequenceClassification",
        **_SMALL | dict(max_position_embeddings=LENGTH + 2),
    ),
    "xlnet": lambda: _made(
        "XLNetConfig",
        "XLNetForSequenceClassification",
        **_OF_ITS_OWN,
        **dict(d_model=128, n_layer=2, n_head=2, d_inner=512),
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
        **_writing(),
    ),
    "bart": lambda: _made(
        "BartConfig",
        "BartForConditionalGeneration",
        **dict(vocab_size=WORDS, d_model=128, max_position_embeddings=LENGTH),
        **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
        **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
        **{f"{part}_ffn_dim": 512 for part in ("encoder", "decoder")},
    ),
    "gemma": lambda: _made("Gemma3TextConfig", "Gemma3ForCausalLM", **_writing(sliding_window=16, **_GROUPED)),
    "mixtral": lambda: _made(
        "MixtralConfig", "MixtralForCausalLM", **_writing(num_local_experts=4, num_experts_per_tok=2, **_GROUPED)
    ),
    "olmoe": lambda: _made("OlmoeConfig", "OlmoeForCausalLM", **_writing(num_experts=8, num_experts_per_tok=2)),
    "opt": lambda: _made(
        "OPTConfig",
        "OPTForCausalLM",
        **dict(vocab_size=WORDS, hidden_size=128, num_hidden_layers=2, num_attention_heads=2, ffn_dim=512),
        **dict(max_position_embeddings=LENGTH, word_embed_proj_dim=128, pad_token_id=0),
        **_NO_ENDS,
    ),
    "qwen": lambda: _made("Qwen3Config", "Qwen3ForCausalLM", **_writing(**_GROUPED)),
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
    "poolformer": lambda: _made(
        "PoolFormerConfig",
        "PoolFormerForImageClassification",
        **dict(depths=[1, 1, 2, 1], hidden_sizes=[32, 64, 96, 128], num_labels=CLASSES),
    ),
    "resnet": lambda: _made(
        "ResNetConfig",
        "ResNetForImageClassification",
        **dict(embedding_size=32, hidden_sizes=[32, 64, 128, 256], layer_type="basic", num_labels=CLASSES),
    ),
    "swin": lambda: _made(
        "SwinConfig",
        "SwinForImageClassification",
        **dict(image_size=64, patch_size=2, embed_dim=48, depths=[2, 2], num_heads=[3, 6], window_size=8),
        num_labels=CLASSES,
    ),
    "vit": lambda: _made(
        "ViTConfig",
        "ViTForImageClassification",
        **dict(hidden_size=192, num_hidden_layers=4, num_attention_heads=3, intermediate_size=768),
        **dict(image_size=64, patch_size=8, num_labels=CLASSES),
    ),
}
"""Images float32 (B, 3, 64, 64), labels int64 (B,)."""

TIMM: dict[str, Callable[[], nn.Module]] = {
    "edgenext": lambda: _of_timm("edgenext_xx_small"),
    "efficientnet": lambda: _of_timm("efficientnet_lite0"),
    "mixer": lambda: _of_timm("mixer_s32_224", img_size=64),
    "regnet": lambda: _of_timm("regnety_002"),
    "ghostnet": lambda: _of_timm("ghostnet_050"),
    "repvgg": lambda: _of_timm("repvgg_a0"),
    "xcit": lambda: _of_timm("xcit_nano_12_p16_224", img_size=64),
}
"""Images float32 (B, 3, 64, 64), labels int64 (B,); the loss is outside of the network."""

NETWORKS = {**CLASSIFIERS, **WRITERS, **SEEING, **TIMM}

NAMES = tuple(NETWORKS)

FIRST = ("bert", "electra", "gpt2", "llama", "t5", "convnext", "mobilenet", "resnet", "vit", "mixer", "regnet")
"""What a bench takes that isn't told."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "mobilenet": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-4, momentum=0.9),
    "resnet": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=1e-4),
}
"""Where it isn't AdamW."""

MAPPED = ("gpt2",)
"""Whose samples come from a map-style data set, each of them once."""


class Windows(Dataset):
    """So many windows of one long text, cut out when they are asked for: tokens (T,), twice."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.text = torch.randint(WORDS, (samples + LENGTH,), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = self.text[index : index + LENGTH]
        return tokens, tokens


def of_text(model: nn.Module, batch: Any) -> Tensor:
    """The loss that networks of transformers compute by themselves."""
    tokens, labels = batch
    return model(input_ids=tokens, labels=labels).loss


def of_images(model: nn.Module, batch: Any) -> Tensor:
    """The same for networks that see."""
    images, labels = batch
    return model(pixel_values=images, labels=labels).loss


def of_logits(model: nn.Module, batch: Any) -> Tensor:
    """The same for networks that put out logits alone, as those of timm do."""
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def task(name: str = "bert", epochs: int = 1) -> hotloop.Task:
    """One of them; `epochs` is how often it sees so many samples, whether they are the same each time or not."""
    mapped = name in MAPPED
    return hotloop.Task(
        model=NETWORKS[name],
        step=of_images if name in SEEING else of_logits if name in TIMM else of_text,
        optimizer=OPTIMIZERS.get(name, adamw),
        data=Windows(SAMPLES * epochs) if mapped else _in_memory(name),
        batch_size=16,
        epochs=1 if mapped else epochs,
        name=name,
    )


def _in_memory(name: str) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=draws)
    if name in SEEING or name in TIMM:
        return torch.randn(SAMPLES, 3, 64, 64, generator=draws), labels
    x = torch.randint(WORDS, (SAMPLES, LENGTH), generator=draws)
    return x, x if name in WRITERS else labels
