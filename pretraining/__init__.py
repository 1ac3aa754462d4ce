"""Everything that builds the tiny base model that ships with the engine."""
