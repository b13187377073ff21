"""Asynchronous training: workers compute gradients, and a server updates the parameters."""
