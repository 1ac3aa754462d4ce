"""What is done with checkpoints: they are compared, named and exported."""
