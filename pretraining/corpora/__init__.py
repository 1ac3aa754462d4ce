"""What the tiny base model reads: a generator of conversations for each format of an agent."""
