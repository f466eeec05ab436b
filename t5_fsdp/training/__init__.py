"""Optimizer, metrics and the training loop."""
