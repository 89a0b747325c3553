"""Optimizers, the inner loop, evaluation, checkpoints and local runs. No network."""
