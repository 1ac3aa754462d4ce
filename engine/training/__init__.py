"""Training: datums, losses and the optimizer."""
