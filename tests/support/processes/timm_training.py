"""Trains models of timm, and stops and resumes them: run by test_library_models.py in a process of its own."""

from __future__ import annotations

import torch

from bench.without_torchvision import imported_timm
from tests.support.programs import a_task, assert_resumes


def main() -> None:
    timm = imported_timm()
    images = torch.randn(12, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
    models = {
        "test_resnet": {},
        "test_vit": {"img_size": 32, "patch_size": 16},
        "test_convnext": {},
        "test_efficientnet": {"drop_rate": 0.2, "drop_path_rate": 0.2},
    }
    for name, options in models.items():
        task = a_task(
            model=lambda name=name, options=options: timm.create_model(name, num_classes=3, **options),
            data=images,
            batch_size=4,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        )
        state = assert_resumes(task, stop=2, steps=4)
        print(name, len(state.parameters))


if __name__ == "__main__":
    main()
