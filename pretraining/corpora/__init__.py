"""The corpora of the tiny base model: a generator of conversations for each example agent."""
