"""Judges: agents whose examples are the groups of a step, and what they say of the rollouts."""
