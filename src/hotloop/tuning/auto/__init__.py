"""The choice of `--plan auto`, by rules and by earlier races."""
