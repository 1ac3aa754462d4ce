"""Sampling: continuous batching on the device thread."""
