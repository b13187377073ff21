"""Optuna with a plain loop, as its tutorial has it: the other side of `bench.study`. Prints the best value as JSON.

python bench/study_loop.py NET SAMPLES EPOCHS TRIALS SEED
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import optuna
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.study_task import BATCH_SIZES, arrays, network


def main() -> None:
    net, *numbers = sys.argv[1:]
    samples, epochs, trials, seed = map(int, numbers)
    train, validation = (TensorDataset(*part) for part in arrays(samples))
    size = BATCH_SIZES[net]

    def objective(trial: optuna.Trial) -> float:
        torch.manual_seed(seed)
        lr = trial.suggest_float("lr", 1e-3, 1.0, log=True)
        width = trial.suggest_categorical("width", [64, 128])
        dropout = trial.suggest_float("dropout", 0.0, 0.5)
        model = network(net, width, dropout)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        loss_function = nn.CrossEntropyLoss()
        best = float("inf")
        for _ in range(epochs):
            model.train()
            for x, y in DataLoader(train, batch_size=size, shuffle=True):
                optimizer.zero_grad()
                loss_function(model(x), y).backward()
                optimizer.step()
            best = min(best, validation_loss(model, DataLoader(validation, batch_size=512)))
        return best

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="minimize", sampler=optuna.samplers.TPESampler(seed=seed))
    study.optimize(objective, n_trials=trials)
    print(json.dumps({"value": study.best_value, "params": study.best_params}))


def validation_loss(model: nn.Module, batches: DataLoader) -> float:
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for x, y in batches:
            total += nn.functional.cross_entropy(model(x), y, reduction="sum").item()
            count += len(y)
    loss = total / count
    return loss if loss == loss else float("inf")


if __name__ == "__main__":
    main()
