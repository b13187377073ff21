"""The search for a plan: candidates, races, proofs, and the cache of their results."""
