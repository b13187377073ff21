"""Chooses the fastest plan that is proven equal: by rules, races and a search."""
