"""The base model, its attention and its LoRA weights."""
