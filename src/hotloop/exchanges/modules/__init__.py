"""The exchange of networks: found, compiled in place, proven in a fork, and raced in whole steps."""
