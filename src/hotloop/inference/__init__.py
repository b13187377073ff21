"""A trained model put to use: predictions, evaluation and export."""
