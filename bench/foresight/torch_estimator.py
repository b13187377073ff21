"""Estimates of torch's RuntimeEstimator for NeuSight's training runs on the chips that torch 2.14 has data of.

The program needs torch 2.14 and transformers, not hotloop: `python -P bench/foresight/torch_estimator.py PATH` prints JSON, which
`torch_estimates.json` stores. RuntimeEstimator refuses to run without an accelerator, though `gpu_type` needs none; the program
records the refusal, and then reports an accelerator to it.
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

GPU_TYPES = {"NVIDIA_A100_80GB_PCIe": "NVIDIA A100", "AMD_Instinct_MI210": "AMD MI210X"}
"""torch's name of a chip by NeuSight's; torch has one entry for all forms of an A100."""


LAYERS = {"gpt2": "n_layer", "bert": "num_hidden_layers", "opt": "num_hidden_layers"}

CHIPS = {"NVIDIA_A100_80GB_PCIe": "A100 PCIe 80GB", "AMD_Instinct_MI210": "MI210"}

STORED = Path(__file__).with_name("torch_estimates.json")


def stored_ms() -> dict[str, float]:
    """Returns the stored estimates by the names of runs in the record."""
    found = json.loads(STORED.read_text())["runs"]
    return {
        f"{CHIPS[run['device']]} {run['model']} {run['batch']}": run["estimated_ms"]
        for run in found
        if "estimated_ms" in run
    }


def runs(data: Path) -> list[dict[str, str]]:
    """Returns the training runs on one GPU without operators fused by hand."""
    with (data / "neusight" / "labels_end_to_end.csv").open(newline="") as file:
        found = [row for row in csv.DictReader(file) if row["mode"] == "train" and not row["variant"]]
    return [row for row in found if row["device"] in GPU_TYPES]


def model_of(config: dict[str, Any]) -> torch.nn.Module:
    import transformers

    names = {"gpt2": "GPT2", "bert": "Bert", "opt": "OPT", "switch_transformers": "SwitchTransformers"}
    heads = {
        "gpt2": "LMHeadModel",
        "bert": "LMHeadModel",
        "opt": "ForCausalLM",
        "switch_transformers": "ForConditionalGeneration",
    }
    kind = config["model_type"]
    given = {name: value for name, value in config.items() if name not in ("architectures", "model_type")}
    made = getattr(transformers, f"{names[kind]}Config")(**given, attn_implementation="eager")
    made.use_cache = False
    return getattr(transformers, names[kind] + heads[kind])(made)


def estimate_ms(row: dict[str, str], data: Path, *, is_reported: bool = True) -> float:
    """Returns the estimate of forward and backward in fp32: a sum over operators, so one and two layers give that of all."""
    config = json.loads((data / "neusight" / "model_configs" / f"{row['model']}.json").read_text())
    layers = LAYERS.get(config["model_type"])
    if layers is None:
        return of_config_ms(config, row, is_reported)
    one, two = (of_config_ms(config | {layers: count}, row, is_reported) for count in (1, 2))
    return one + (config[layers] - 1) * (two - one)


def of_config_ms(config: dict[str, Any], row: dict[str, str], is_reported: bool) -> float:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator

    estimator = RuntimeEstimator(gpu_type=GPU_TYPES[row["device"]])
    available = mock.patch("torch.accelerator.is_available", return_value=True)
    with FakeTensorMode():
        model = model_of(config).train()
        tokens = torch.zeros(int(row["batch"]), int(row["seq"]), dtype=torch.long)
        inputs = {"input_ids": tokens, "labels": tokens}
        if is_reported:
            available.start()
        try:
            with estimator(estimate_mode_type="operator-level-cost-model"):
                model(**inputs).loss.backward()
        finally:
            if is_reported:
                available.stop()
    return estimator.total_runtime


def main(data: Path) -> None:
    found: dict[str, Any] = {"torch": torch.__version__, "refusal": "", "runs": []}
    for row in runs(data):
        named = {name: row[name] for name in ("device", "model", "batch")}
        if not found["refusal"]:
            try:
                estimate_ms(row, data, is_reported=False)
            except AssertionError as error:
                found["refusal"] = str(error)
        try:
            found["runs"].append(named | {"estimated_ms": estimate_ms(row, data)})
        except Exception as error:
            found["runs"].append(named | {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"})
        print(found["runs"][-1], file=sys.stderr, flush=True)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
