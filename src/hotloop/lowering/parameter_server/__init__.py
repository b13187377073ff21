"""Asynchronous training: workers compute gradients, a server holds the parameters."""
