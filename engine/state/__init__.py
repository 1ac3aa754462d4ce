"""State on disk: checkpoints and the registry of sessions."""
