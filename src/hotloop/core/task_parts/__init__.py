"""The parts of a Task as PyTorch knows them: models, losses, optimizers and schedules."""
