"""Agents that only benchmarks train."""
