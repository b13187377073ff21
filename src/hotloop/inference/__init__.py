"""Predictions, evaluation and export of a trained model."""
