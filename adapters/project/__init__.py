"""The user's project: its agents and its datasets, by name."""
