"""A server of the Tinker API on this machine: LoRA training and sampling of one base model."""
