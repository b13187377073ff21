"""FLOPs and bytes of operators and layers, and the least time that a machine needs for them; without torch."""
