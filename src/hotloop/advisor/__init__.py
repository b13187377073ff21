"""Predictions of a training step's time, memory and cost on chips that are not at hand, and the advice that rests on them."""
