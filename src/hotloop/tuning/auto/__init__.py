"""What `--plan auto` chooses, by rules and by earlier races."""
